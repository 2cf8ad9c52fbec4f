package accept

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

//go:embed train.py
var trainScript string

// pytorch trains while the process is suspended again and again, then as many steps without,
// and compares the digests of the weights.
func pytorch(ctx context.Context, r *result) error {
	return r.sameWeights(ctx, nil)
}

// profiled is pytorch with the suspended training under ROCm's profiler, whose trace must have
// kernels of every step.
func profiled(ctx context.Context, r *result) (err error) {
	dir, err := os.MkdirTemp("", "accept-profile-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	return r.sameWeights(ctx, &profile{dir})
}

// profile is a run of ROCm's profiler, with its output in a directory.
type profile struct{ dir string }

const profiler = "rocprofv3"

func (p *profile) command(program ...string) []string {
	if p == nil {
		return program
	}
	return append([]string{profiler, "--kernel-trace", "--output-format", "csv", "--output-directory", p.dir, "--"}, program...)
}

// kernels returns the number of kernels in the trace.
func (p *profile) kernels() (n int, err error) {
	dir := os.DirFS(p.dir)
	err = fs.WalkDir(dir, ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "kernel_trace.csv") {
			return err
		}
		text, err := fs.ReadFile(dir, path)
		n += max(bytes.Count(text, []byte("\n"))-1, 0) // the first line has the names of the columns
		return err
	})
	return n, err
}

// sameWeights trains with suspensions, under the profiler if there is one, and without either.
func (r *result) sameWeights(ctx context.Context, p *profile) error {
	if out, err := exec.CommandContext(ctx, "python3", "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())").CombinedOutput(); err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		return skipped(fmt.Sprintf("no python3 with a torch that has a GPU: %v %s", err, lines[len(lines)-1]))
	}
	cycles := r.cycles(1000)
	suspended, err := r.train(ctx, "0", p, func(pid int32) error { return r.disturb(ctx, pid, cycles) })
	if err != nil {
		return err
	}
	text, _, _ := strings.Cut(suspended, " ")
	steps, err := strconv.Atoi(text)
	if err != nil {
		return fmt.Errorf("training wrote %q", suspended)
	}
	free := func(steps int) (string, error) {
		return r.train(ctx, strconv.Itoa(steps), nil, func(int32) error { return nil })
	}
	undisturbed, err := free(steps)
	if err != nil {
		return err
	}
	r.note("%d suspensions: %d steps, digest %s", cycles, steps, suspended)
	if suspended != undisturbed {
		return fmt.Errorf("with suspensions %q, without %q: the weights differ", suspended, undisturbed)
	}
	more, err := free(steps + 1)
	if err != nil {
		return err
	}
	_, one, _ := strings.Cut(undisturbed, " ")
	if _, other, _ := strings.Cut(more, " "); one == other {
		return errors.New("the check cannot fail: one more step has the same weights")
	}
	r.controls = append(r.controls, "one more step: other weights")
	if p == nil {
		return nil
	}
	n, err := p.kernels()
	r.note("the trace has %d kernels", n)
	if err == nil && n < steps {
		err = fmt.Errorf("the trace of %d steps has %d kernels", steps, n)
	}
	return err
}

// train runs the script, under the profiler if there is one, and during the training what
// disturbs it. It returns the last line.
func (r *result) train(ctx context.Context, steps string, p *profile, disturb func(pid int32) error) (last string, err error) {
	args := p.command("python3", "-c", trainScript, steps)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // G204: no shell reads the steps

	index := 0 // ROCm counts the GPUs in the order of the topology
	for i, g := range r.b.gpus {
		if g.ID == r.b.gpu.ID {
			index = i
		}
	}
	cmd.Env = append(os.Environ(), fmt.Sprint("ROCR_VISIBLE_DEVICES=", index))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		last = lines.Text()
		var pid int32
		if _, err := fmt.Sscanf(last, "ready %d", &pid); err != nil {
			continue
		}
		if err = disturb(pid); err == nil {
			_, err = io.WriteString(in, "stop\n")
		}
		if err != nil {
			err = errors.Join(err, cmd.Process.Kill())
			break
		}
	}
	if ended := cmd.Wait(); err == nil && ended != nil {
		err = fmt.Errorf("training: %w", ended)
	}
	return last, errors.Join(err, lines.Err())
}

// disturb suspends and resumes a process n times.
func (r *result) disturb(ctx context.Context, pid int32, n int) error {
	key, err := keyOf(pid)
	if err != nil {
		return err
	}
	s, err := r.b.attach(ctx, key)
	if err != nil {
		return err
	}
	for range n {
		if err = errors.Join(s.Suspend(ctx, nil), s.Resume(ctx)); err != nil {
			break
		}
	}
	return errors.Join(err, s.Close())
}

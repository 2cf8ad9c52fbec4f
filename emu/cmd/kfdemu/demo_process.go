package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/emu/workload"
)

// maxWait bounds the waiting for steps that take milliseconds on an idle machine.
const maxWait = 20 * time.Second

// process is a program that this one started. The demo's are in a process group of their
// own, so that Ctrl-C reaches the demo alone, which ends everything in order.
type process struct {
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	said chan workload.Message // the program's lines; closed at the end of the program's output
	over chan struct{}
	// ended is closed when the process was waited for; err is how it ended.
	ended chan struct{}
	err   error
}

// detached returns a program that Ctrl-C does not reach.
func detached(path string, args ...string) *exec.Cmd {
	cmd := exec.Command(path, args...) //nolint:gosec,noctx // G204: the user of the demo named it; interrupt and kill end it in order
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// startProcess starts a program whose output is not read; its standard error goes to log.
func startProcess(log io.Writer, cmd *exec.Cmd) (*process, error) {
	p := newProcess(log, cmd)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	go p.wait()
	return p, nil
}

// startSample starts a program that writes lines of JSON, and waits until it is ready.
func startSample(ctx context.Context, log io.Writer, cmd *exec.Cmd) (p *process, err error) {
	p = newProcess(log, cmd)
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	go p.listen(out)
	if _, err := p.await(ctx, "ready"); err != nil {
		return nil, errors.Join(err, p.kill())
	}
	return p, nil
}

func newProcess(log io.Writer, cmd *exec.Cmd) *process {
	cmd.Stderr = log
	// A child of the program may keep its standard error open.
	cmd.WaitDelay = time.Second
	return &process{
		name: filepath.Base(cmd.Path), cmd: cmd,
		said: make(chan workload.Message, 64), over: make(chan struct{}), ended: make(chan struct{}),
	}
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) wait() {
	p.err = p.cmd.Wait()
	close(p.ended)
}

// listen passes on the messages of the program, until it ends.
func (p *process) listen(out io.Reader) {
	defer p.wait()
	defer close(p.said)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var m workload.Message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			m = workload.Message{Event: "error", What: fmt.Sprintf("said %q", lines.Text())}
		}
		select {
		case p.said <- m:
		case <-p.over:
			return
		}
	}
}

func (p *process) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// ask writes a line to the program, and returns its answer: see await.
func (p *process) ask(ctx context.Context, line, event string) (workload.Message, error) {
	if _, err := io.WriteString(p.in, line+"\n"); err != nil {
		return workload.Message{}, fmt.Errorf("tell %s %q: %w", p.name, line, err)
	}
	return p.await(ctx, event)
}

// await returns the next message of a kind. The error has the errors that the program
// reported before, or that the message does not come.
func (p *process) await(ctx context.Context, event string) (workload.Message, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, maxWait, fmt.Errorf("not within %v", maxWait))
	defer cancel()
	var errs []error
	for {
		select {
		case m, more := <-p.said:
			switch {
			case !more:
				return workload.Message{}, errors.Join(append(errs, fmt.Errorf("%s ended before it said %q", p.name, event))...)
			case m.Event == "error":
				errs = append(errs, fmt.Errorf("%s: %s", p.name, m.What))
			case m.Event == event:
				return m, errors.Join(errs...)
			}
		case <-ctx.Done():
			return workload.Message{}, errors.Join(append(errs, fmt.Errorf("wait for %q from %s: %w", event, p.name, context.Cause(ctx)))...)
		}
	}
}

// finish closes the standard input of a program, which ends it, and waits for that.
func (p *process) finish() error {
	err := p.in.Close()
	_, said := p.await(context.Background(), "done")
	return errors.Join(err, said, p.awaitEnd())
}

// interrupt ends a program as Ctrl-C does.
func (p *process) interrupt() error {
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	return p.awaitEnd()
}

// awaitEnd waits for the end of a program that is ending, and returns how it ended.
func (p *process) awaitEnd() error {
	select {
	case <-p.ended:
	case <-time.After(maxWait):
		return errors.Join(fmt.Errorf("%s did not end within %v", p.name, maxWait), p.kill())
	}
	if p.err != nil {
		return fmt.Errorf("%s ended with: %w", p.name, p.err)
	}
	return nil
}

// kill ends a program with SIGKILL, if it has not ended, and waits for it.
func (p *process) kill() error {
	close(p.over)
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	<-p.ended
	return nil
}

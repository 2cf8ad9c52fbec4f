package dbgtrap

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// What this binary can be besides the tests.
const (
	roleJob    = "job"
	roleDaemon = "daemon"
	roleQueues = "queues" // a job with a queue on each GPU: see workload.Main
)

// answerCommands carries out the lines of standard input and answers each with one
// line, "ok" or what went wrong.
func answerCommands(do func(command string, args []string) error) {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		answer := "ok"
		if err := do(words[0], words[1:]); err != nil {
			answer = strings.ReplaceAll(err.Error(), "\n", " ")
		}
		fmt.Println(answer)
	}
}

// realJob uses the driver like a program with a ROCm runtime.
type realJob struct {
	fd      int
	endMain chan struct{}
}

// main is what the main thread does: it waits until it is to end, without the
// process.
func (j *realJob) main() {
	<-j.endMain
	_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) //nolint:forbidigo // Go has no word for the end of one thread
}

func (j *realJob) do(command string, _ []string) (err error) {
	switch command {
	case "open":
		j.fd, err = kfd.Kernel().Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC)
		return err
	case "enable":
		return j.runtime(kfdabi.RuntimeEnableModeEnable)
	case "disable":
		return j.runtime(0)
	case "exec":
		fmt.Println("ok") // the next answer is the new program's
		return unix.Exec("/proc/self/exe", os.Args, os.Environ())
	case "end-main":
		close(j.endMain)
		for {
			stat, err := statOf(int32(os.Getpid()))
			if err != nil || stat.MainEnded() {
				return err
			}
			runtime.Gosched()
		}
	case "come-and-go": // until it is killed
		for {
			if err := errors.Join(j.runtime(kfdabi.RuntimeEnableModeEnable), j.runtime(0)); err != nil {
				return err
			}
		}
	case "exit":
		os.Exit(0)
	}
	return fmt.Errorf("a job cannot %s", command)
}

func (j *realJob) runtime(mode uint32) error {
	args := kfdabi.RuntimeEnableArgs{ModeMask: mode}
	for {
		_, err := kfd.Kernel().Ioctl(j.fd, kfdabi.ReqRuntimeEnable, kfd.PointerTo(&args))
		if err != unix.EINTR { //nolint:errorlint // Sys returns bare errnos
			return err
		}
	}
}

// realDaemon is a second program that holds targets, or one that does not answer them.
type realDaemon struct {
	session  *driven
	device   *kfd.Device
	target   gpreempt.ProcessKey
	notified chan struct{}
}

func (d *realDaemon) do(command string, args []string) (err error) {
	ctx := context.Background()
	if len(args) > 0 {
		if d.target, err = gpreempt.ParseProcessKey(args[0]); err != nil {
			return err
		}
		if d.device, err = kfd.Open(); err != nil {
			return err
		}
	}
	switch command {
	case "attach":
		if os.Getenv(uncheckedEnv) != "" {
			if err := d.enableUnchecked(ctx); err != nil {
				return err
			}
		}
		session, err := drive(ctx, New(Config{Device: d.device, Attach: realTracer}), d.target, make(chan gpreempt.ProcessKey), make(chan error, 1))
		if err == nil { // else it has what it had
			d.session = session
		}
		return err
	case "ignore": // it debugs the target and answers nothing
		thread, err := realTracer(ctx, d.target.PID, d.target.Start)
		if err != nil {
			return err
		}
		d.notified = make(chan struct{}, 1000)
		pipe, err := newEventPipe(func() { d.notified <- struct{}{} })
		if err != nil {
			return err
		}
		err = thread.Do(ctx, func() error {
			_, err := d.device.Enable(d.target.PID, subscribed, pipe.write)
			return err
		})
		pipe.handOver()
		go func() { <-pipe.done }() // it is kept
		return err
	case "await-runtime": // that the target has announced itself
		<-d.notified
		return nil
	case "suspend":
		return d.session.Suspend(ctx, nil)
	case "resume":
		return d.session.Resume(ctx)
	case "close":
		return d.session.Close()
	case "exit":
		os.Exit(0)
	}
	return fmt.Errorf("a daemon cannot %s", command)
}

// enableUnchecked enables debugging of the target as the first thing, and ends it. A refusal
// is left as it is.
func (d *realDaemon) enableUnchecked(ctx context.Context) error {
	thread, err := realTracer(ctx, d.target.PID, d.target.Start)
	if err != nil {
		return err
	}
	pipe, err := newEventPipe(func() {})
	if err != nil {
		return err
	}
	err = thread.Do(ctx, func() error {
		_, err := d.device.Enable(d.target.PID, subscribed, pipe.write)
		if errors.Is(err, unix.EALREADY) {
			return fmt.Errorf("%w: %w", mechanism.ErrDebugged, err)
		}
		return errors.Join(err, d.device.Disable(d.target.PID))
	})
	pipe.handOver()
	pipe.close()
	return errors.Join(err, thread.Detach(ctx))
}

func realTracer(ctx context.Context, pid int32, start uint64) (Thread, error) {
	thread, err := proc.Trace(ctx, pid, start)
	if err != nil {
		return nil, err
	}
	return thread, nil
}

// guardTime is how long a test waits for an answer before it fails. It is no
// measure of anything: emulated machines are slow.
const guardTime = 5 * time.Minute

// program is this binary in a role.
type program struct {
	tb  testing.TB
	cmd *exec.Cmd
	key gpreempt.ProcessKey
	in  *os.File
	out *os.File
	r   *bufio.Reader
}

func startReal(tb testing.TB, role string) *program {
	tb.Helper()
	p := &program{tb: tb, cmd: exec.CommandContext(context.WithoutCancel(tb.Context()), "/proc/self/exe")}
	p.cmd.Env = append(os.Environ(), roleEnv+"="+role)
	p.cmd.Stderr = os.Stderr
	inRead, inWrite, err := os.Pipe()
	if err != nil {
		tb.Fatal(err)
	}
	outRead, outWrite, err := os.Pipe()
	if err != nil {
		tb.Fatal(err)
	}
	p.in, p.out, p.r = inWrite, outRead, bufio.NewReader(outRead)
	p.cmd.Stdin, p.cmd.Stdout = inRead, outWrite
	err = p.cmd.Start()
	inRead.Close()
	outWrite.Close()
	tb.Cleanup(p.hangUp)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(p.kill)
	stat, err := statOf(int32(p.cmd.Process.Pid))
	if err != nil {
		tb.Fatal(err)
	}
	p.key = gpreempt.ProcessKey{PID: stat.PID, Start: stat.Start}
	return p
}

func statOf(pid int32) (discovery.ProcStat, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(int(pid)), "stat"))
	if err != nil {
		return discovery.ProcStat{}, err
	}
	return discovery.ParseProcStat(text)
}

// kill ends the program with SIGKILL and waits for that, once.
func (p *program) kill() {
	defer p.hangUp()
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Kill() // it may have ended
		_ = p.cmd.Wait()         // killed, as it says
	}
}

// hangUp closes the pipes of the program.
func (p *program) hangUp() {
	_ = p.in.Close()
	_ = p.out.Close()
}

// exits waits for the program's own end.
func (p *program) exits() {
	p.tb.Helper()
	defer p.hangUp()
	timer := time.AfterFunc(guardTime, func() { _ = p.cmd.Process.Kill() })
	defer timer.Stop()
	if err := p.cmd.Wait(); err != nil {
		p.tb.Errorf("its end: %v", err)
	}
}

func (p *program) tell(command ...string) {
	p.tb.Helper()
	if _, err := fmt.Fprintln(p.in, strings.Join(command, " ")); err != nil {
		p.tb.Fatal(err)
	}
}

func (p *program) answer() string {
	p.tb.Helper()
	if err := p.out.SetReadDeadline(time.Now().Add(guardTime)); err != nil {
		p.tb.Fatal(err)
	}
	line, err := p.r.ReadString('\n')
	if err != nil {
		p.tb.Fatalf("no answer: %v", err)
	}
	return strings.TrimSpace(line)
}

// must returns a command that has to work.
func (p *program) must(command ...string) {
	p.tb.Helper()
	p.tell(command...)
	if got := p.answer(); got != "ok" {
		p.tb.Fatalf("%v: %s", command, got)
	}
}

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
)

// maxWait bounds the waiting for steps that take milliseconds on an idle machine.
const maxWait = 20 * time.Second

// process is a program the demo started. It is in a process group of its own, so that
// Ctrl-C reaches the demo alone, which ends everything in order.
type process struct {
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	said chan message // closed at the end of the program's output
	over chan struct{}
	// ended is closed when the process was waited for; err is how it ended.
	ended chan struct{}
	err   error
}

// message is a line of JSON that a sample program of kfdemu writes.
type message struct {
	Event     string `json:"event"`
	Packets   uint64 `json:"packets"`
	Count     uint64 `json:"count"`
	Abandoned uint64 `json:"abandoned"`
	OK        bool   `json:"ok"`
	What      string `json:"what"`
	Queues    []struct {
		Count uint64 `json:"count"`
	} `json:"queues"`
}

// startProcess starts a program whose output is not read; its standard error goes to log.
func startProcess(log io.Writer, env []string, path string, args ...string) (*process, error) {
	p := newProcess(log, path, args...)
	p.cmd.Env = append(os.Environ(), env...)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	go p.wait()
	return p, nil
}

// startSample starts a program that writes lines of JSON, and waits until it is ready.
func startSample(ctx context.Context, log io.Writer, path string, args ...string) (p *process, err error) {
	p = newProcess(log, path, args...)
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

func newProcess(log io.Writer, path string, args ...string) *process {
	p := &process{
		name: filepath.Base(path), cmd: exec.Command(path, args...), //nolint:gosec,noctx // G204: the user of the demo named it; interrupt and kill end it in order
		said: make(chan message), over: make(chan struct{}), ended: make(chan struct{}),
	}
	p.cmd.Stderr = log
	// A child of the program may keep its standard error open.
	p.cmd.WaitDelay = time.Second
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return p
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
		var m message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			m = message{Event: "error", What: fmt.Sprintf("said %q", lines.Text())}
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

// tell writes a line to the program.
func (p *process) tell(line string) error {
	if _, err := io.WriteString(p.in, line+"\n"); err != nil {
		return fmt.Errorf("tell %s %q: %w", p.name, line, err)
	}
	return nil
}

// await returns the next message of a kind. The error has the errors that the program
// reported before, or that the message does not come.
func (p *process) await(ctx context.Context, event string) (message, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, maxWait, fmt.Errorf("not within %v", maxWait))
	defer cancel()
	var errs []error
	for {
		select {
		case m, more := <-p.said:
			switch {
			case !more:
				return message{}, errors.Join(append(errs, fmt.Errorf("%s ended before it said %q", p.name, event))...)
			case m.Event == "error":
				errs = append(errs, fmt.Errorf("%s: %s", p.name, m.What))
			case m.Event == event:
				return m, errors.Join(errs...)
			}
		case <-ctx.Done():
			return message{}, errors.Join(append(errs, fmt.Errorf("wait for %q from %s: %w", event, p.name, context.Cause(ctx)))...)
		}
	}
}

// finish closes the standard input of a program, which ends it, and waits for that.
func (p *process) finish() error {
	errs := []error{p.in.Close()}
	timeout := time.NewTimer(maxWait)
	defer timeout.Stop()
	for {
		select {
		case m, more := <-p.said:
			switch {
			case !more:
				<-p.ended
				if p.err != nil {
					errs = append(errs, fmt.Errorf("%s ended with: %w", p.name, p.err))
				}
				return errors.Join(errs...)
			case m.Event == "error":
				errs = append(errs, fmt.Errorf("%s: %s", p.name, m.What))
			}
		case <-timeout.C:
			return errors.Join(append(errs, fmt.Errorf("%s did not end within %v", p.name, maxWait), p.kill())...)
		}
	}
}

// interrupt ends a program as Ctrl-C does.
func (p *process) interrupt() error {
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.ended:
	case <-time.After(maxWait):
		return errors.Join(fmt.Errorf("%s did not stop within %v", p.name, maxWait), p.kill())
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

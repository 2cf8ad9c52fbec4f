package trial

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// maxLine bounds a line that is looked at, in bytes. The log has all of it.
const maxLine = 1 << 20

// process is a command line with all its children: a process group of its own, so that Ctrl-C
// reaches the trial alone, which ends the group in order.
type process struct {
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	log  *os.File
	// ended is closed when the shell of the command line has ended; err is how.
	ended chan struct{}
	err   error
	// silent is closed when no process of the group can write any more.
	silent  chan struct{}
	readers []*os.File
}

// startProcess starts a command line by /bin/sh. Its output goes to the file log, and line is
// called for each of its lines, in turn.
func startProcess(name, command, log string, env []string, line func(at time.Time, line string)) (*process, error) {
	p := &process{name: name, ended: make(chan struct{}), silent: make(chan struct{})}
	var err error
	if err = os.MkdirAll(filepath.Dir(log), 0o755); err != nil { //nolint:gosec // G301: as the folder of the run
		return nil, err
	}
	if p.log, err = os.Create(log); err != nil {
		return nil, err
	}
	p.cmd = exec.Command("/bin/sh", "-c", command) //nolint:gosec,noctx // G204: the user's own command line; stop ends it in order
	p.cmd.Env = env
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, errors.Join(err, p.log.Close())
	}
	var mu sync.Mutex // keeps lines of both outputs whole
	var readers sync.WaitGroup
	var writers []*os.File
	for _, out := range []*io.Writer{&p.cmd.Stdout, &p.cmd.Stderr} {
		r, w, pipeErr := os.Pipe()
		if pipeErr != nil {
			err = pipeErr
			break
		}
		*out = w
		p.readers, writers = append(p.readers, r), append(writers, w)
		readers.Go(func() { p.read(r, &mu, line) })
	}
	if err == nil {
		err = p.cmd.Start()
	}
	for _, w := range writers {
		err = errors.Join(err, w.Close())
	}
	go func() {
		readers.Wait()
		close(p.silent)
	}()
	if err != nil {
		<-p.silent
		return nil, errors.Join(fmt.Errorf("cannot start %s: %w", name, err), p.close())
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// read passes on the lines of an output. Progress bars end lines with carriage returns.
func (p *process) read(r io.Reader, mu *sync.Mutex, line func(time.Time, string)) {
	lines := bufio.NewReaderSize(r, 64<<10)
	var text []byte
	for {
		part, err := lines.ReadSlice('\n')
		at := time.Now()
		mu.Lock()
		_, _ = p.log.Write(part) // a full disk must not change what the command does
		text = append(text, part...)
		for {
			i := bytes.IndexAny(text, "\r\n")
			if i < 0 {
				break
			}
			if i > 0 {
				line(at, string(text[:i]))
			}
			text = text[i+1:]
		}
		if len(text) > maxLine {
			text = nil
		}
		mu.Unlock()
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			if len(text) > 0 {
				mu.Lock()
				line(at, string(text))
				mu.Unlock()
			}
			return
		}
	}
}

// pid is that of the shell, which is that of the group too.
func (p *process) pid() int32 { return int32(p.cmd.Process.Pid) }

// hasEnded reports whether the command has ended.
func (p *process) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// how describes the end of a command.
func (p *process) how() string {
	if p.err == nil {
		return "exit status 0"
	}
	return p.err.Error()
}

// stop ends the group: with SIGTERM, and after grace with SIGKILL. It returns when no process of
// it can write any more. It reports whether SIGKILL was needed.
func (p *process) stop(grace time.Duration) (killed bool) {
	_ = p.in.Close() // the command may have closed its side
	_ = syscall.Kill(-int(p.pid()), syscall.SIGTERM)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	over := false
	for _, end := range []<-chan struct{}{p.silent, p.ended} {
		if over {
			break
		}
		select {
		case <-end:
		case <-timer.C:
			over, killed = true, true
		}
	}
	_ = syscall.Kill(-int(p.pid()), syscall.SIGKILL) // also children that closed their output
	<-p.ended
	select {
	case <-p.silent:
	case <-time.After(time.Second):
		// A process that left the group still has the output. It is not ours any more.
		for _, r := range p.readers {
			_ = r.Close()
		}
		<-p.silent
	}
	_ = p.close()
	return killed
}

func (p *process) close() error {
	errs := []error{p.log.Close()}
	for _, r := range p.readers {
		if err := r.Close(); !errors.Is(err, os.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

package proc

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// lineTimeout is how long a test waits for a line before it gives up: a machine may be
// emulated, and busy.
const lineTimeout = time.Minute

// target is a running program with a parent of its own, so that the tracer is not
// its parent.
type target struct {
	tb      testing.TB
	pid     int32
	start   uint64
	process *os.Process // by pidfd: it never signals another one
	in      *os.File
	out     lines
	// events are what the parent sees.
	events lines
}

// lines reads a pipe line by line.
type lines struct {
	pipe   *os.File
	reader *bufio.Reader
}

func (l lines) next(tb testing.TB) string {
	tb.Helper()
	if err := l.pipe.SetReadDeadline(time.Now().Add(lineTimeout)); err != nil {
		tb.Fatal(err)
	}
	line, err := l.reader.ReadString('\n')
	if err != nil {
		tb.Fatalf("after %q: %v", line, err)
	}
	return strings.TrimSpace(line)
}

func newPipe(tb testing.TB) (read, write *os.File) {
	tb.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		tb.Fatal(err)
	}
	return read, write
}

// command returns this binary in a role, with pipes to it.
func command(tb testing.TB, role string) (cmd *exec.Cmd, in *os.File, out lines) {
	tb.Helper()
	cmd = exec.CommandContext(tb.Context(), "/proc/self/exe")
	cmd.Args, cmd.Env = as(role)
	cmd.Stderr = os.Stderr
	inRead, inWrite := newPipe(tb)
	outRead, outWrite := newPipe(tb)
	cmd.Stdin, cmd.Stdout = inRead, outWrite
	tb.Cleanup(func() {
		inWrite.Close()
		outRead.Close()
	})
	return cmd, inWrite, lines{outRead, bufio.NewReader(outRead)}
}

// begin starts cmd and closes the ends of the pipes that are its own.
func begin(tb testing.TB, cmd *exec.Cmd) {
	tb.Helper()
	err := cmd.Start()
	cmd.Stdin.(*os.File).Close()
	cmd.Stdout.(*os.File).Close()
	for _, f := range cmd.ExtraFiles {
		f.Close()
	}
	if err != nil {
		tb.Fatal(err)
	}
}

func startTarget(tb testing.TB) *target {
	tb.Helper()
	return startTargetUnder(tb, roleParent)
}

func startTargetUnder(tb testing.TB, parent string) *target {
	tb.Helper()
	requirePtrace(tb)
	cmd, in, out := command(tb, parent)
	eventsRead, eventsWrite := newPipe(tb)
	cmd.ExtraFiles = []*os.File{eventsWrite}
	begin(tb, cmd)
	x := &target{tb: tb, in: in, out: out, events: lines{eventsRead, bufio.NewReader(eventsRead)}}
	tb.Cleanup(func() {
		if x.process != nil {
			_ = x.process.Kill() // it may have ended
			_ = x.process.Release()
		}
		if err := cmd.Wait(); err != nil && tb.Context().Err() == nil {
			tb.Errorf("the parent: %v", err)
		}
		eventsRead.Close()
	})
	pid, err := strconv.Atoi(x.events.next(tb))
	if err != nil {
		tb.Fatal(err)
	}
	x.pid = int32(pid)
	if x.process, err = os.FindProcess(pid); err != nil {
		tb.Fatal(err)
	}
	x.start = startOf(tb, x.pid)
	if got := x.out.next(tb); got != "ready" {
		tb.Fatalf("the target says %q", got)
	}
	return x
}

func startOf(tb testing.TB, pid int32) uint64 {
	tb.Helper()
	return statOf(tb, gpreempt.ProcessKey{PID: pid}).Start
}

// statOf returns the stat of a process.
func statOf(tb testing.TB, key gpreempt.ProcessKey) discovery.ProcStat {
	tb.Helper()
	p, err := Open("/", key)
	if err != nil {
		tb.Fatal(err)
	}
	defer p.Close()
	stat, err := p.Stat()
	if err != nil {
		tb.Fatal(err)
	}
	return stat
}

// tell sends the target a command.
func (x *target) tell(format string, arguments ...any) {
	x.tb.Helper()
	if _, err := fmt.Fprintf(x.in, format+"\n", arguments...); err != nil {
		x.tb.Fatal(err)
	}
}

// ask sends the target a command and returns the answer.
func (x *target) ask(format string, arguments ...any) string {
	x.tb.Helper()
	x.tell(format, arguments...)
	return x.out.next(x.tb)
}

func (x *target) signal(number unix.Signal) {
	x.tb.Helper()
	if err := x.process.Signal(number); err != nil {
		x.tb.Fatal(err)
	}
}

// queue sends a signal with a value, as soon as the target's user may have one more
// pending.
func (x *target) queue(number unix.Signal, value int32) {
	x.tb.Helper()
	for deadline := time.Now().Add(lineTimeout); ; {
		err := queueSignal(x.pid, number, value)
		if err == nil {
			return
		}
		if !errors.Is(err, unix.EAGAIN) || time.Now().After(deadline) {
			x.tb.Fatalf("queueing signal %d: %v", number, err)
		}
	}
}

func (x *target) attach() *Tracer {
	x.tb.Helper()
	thread, err := Trace(x.tb.Context(), x.pid, x.start)
	if err != nil {
		x.tb.Fatal(err)
	}
	return thread
}

// tracer returns the thread that traces the target's main thread, 0 for none.
func (x *target) tracer() int32 {
	x.tb.Helper()
	status, err := Status("/", strconv.Itoa(int(x.pid)))
	if err != nil {
		x.tb.Fatal(err)
	}
	return status.Tracer
}

func detach(tb testing.TB, thread *Tracer) {
	tb.Helper()
	if err := thread.Detach(tb.Context()); err != nil {
		tb.Error(err)
	}
}

// await waits for the end of a trace.
func await(tb testing.TB, thread *Tracer) {
	tb.Helper()
	select {
	case <-thread.Done():
	case <-time.After(lineTimeout):
		tb.Fatal("the thread still traces")
	}
}

// count makes the target count the signals of a number.
func (x *target) count(number unix.Signal) {
	x.tb.Helper()
	if runtime.GOARCH != "amd64" {
		x.tb.Skip("the handler that counts signals is machine code for amd64")
	}
	x.ask("count %d", number)
}

// counted returns how many signals of a number came, and the sum of their values.
func (x *target) counted(number unix.Signal) (count, sum int64) {
	x.tb.Helper()
	answer := x.ask("counted %d", number)
	if _, err := fmt.Sscan(answer, &count, &sum); err != nil {
		x.tb.Fatalf("the target says %q: %v", answer, err)
	}
	return count, sum
}

// ptraceAllowed tries once whether this environment has ptrace at all.
var ptraceAllowed = sync.OnceValue(func() error {
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	argv, env := as(roleTarget)
	child, err := os.StartProcess("/proc/self/exe", argv, &os.ProcAttr{Env: env, Files: []*os.File{read, nil, os.Stderr}})
	if err != nil {
		write.Close()
		return err
	}
	var refused error
	onNewThread(func() { refused = ptrace(unix.PTRACE_SEIZE, int32(child.Pid), 0) })
	write.Close()
	_, err = child.Wait()
	return errors.Join(refused, err)
})

func requirePtrace(tb testing.TB) {
	tb.Helper()
	if err := ptraceAllowed(); errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		tb.Skipf("ptrace is not allowed here: PTRACE_SEIZE of an own child: %v", err)
	} else if err != nil {
		tb.Fatal(err)
	}
}

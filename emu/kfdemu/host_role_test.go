package kfdemu

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// play as its only argument makes this binary a program that does what its input says.
// depthEnv counts the programs that started each other.
const (
	play     = "play-program"
	depthEnv = "KFDEMU_TEST_DEPTH"
	maxDepth = 8
)

func isProgram() bool { return len(os.Args) == 2 && os.Args[1] == play }

// A program keeps its main goroutine on its main thread.
func init() {
	if isProgram() {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	if role, dir, ok := strings.Cut(os.Getenv(roleVariable), ":"); ok {
		runRole(role, dir)
	}
	depth, _ := strconv.Atoi(os.Getenv(depthEnv)) // 0 if it is not set
	switch {
	case depth > maxDepth || (depth > 0) != isProgram():
		fmt.Fprintf(os.Stderr, "refused: arguments %q at depth %d\n", os.Args, depth)
		os.Exit(2)
	case isProgram():
		runProgram()
	default:
		os.Exit(testutil.VerifyMain(m))
	}
}

func programEnv() []string {
	depth, _ := strconv.Atoi(os.Getenv(depthEnv))
	env := slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, depthEnv+"=") })
	// A program built with -race sleeps for a second before it exits, unless configured.
	return append(env, fmt.Sprint(depthEnv, "=", depth+1), "GORACE=atexit_sleep_ms=0")
}

// program is the state of a program.
type program struct {
	memory map[uint64][]byte
	// threads receive work by their ID; the main one also has ID 0.
	threads map[int]chan func()
	// held are the inputs of programs that this one has started, which end with it.
	held []*os.File
}

// runProgram reads lines "THREAD WORD ARGUMENTS", and the thread answers each with a line.
// It returns at the end of the input.
func runProgram() {
	p := &program{memory: map[uint64][]byte{}, threads: map[int]chan func(){0: make(chan func())}}
	p.threads[os.Getpid()] = p.threads[0]
	fmt.Println("ready")
	go func() {
		lines := bufio.NewScanner(os.Stdin)
		for lines.Scan() {
			words := strings.Fields(lines.Text())
			id, err := strconv.Atoi(words[0])
			must(err)
			done := make(chan string)
			p.threads[id] <- func() { done <- p.do(words[1], words[2:]) }
			answer := <-done
			fmt.Println(answer)
			if answer == "exit" {
				close(p.threads[id])
			}
		}
		os.Exit(0)
	}()
	for work := range p.threads[0] {
		work()
	}
	// The runtime would not end the main thread.
	_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "program:", err)
		os.Exit(99)
	}
}

func arg(args []string, i int) int {
	n, err := strconv.ParseInt(args[i], 0, 64)
	must(err)
	return int(n)
}

func said(err error) string {
	if err != nil {
		return err.Error()
	}
	return "ok"
}

// do does one thing on a thread.
func (p *program) do(word string, args []string) string {
	switch word {
	case "thread":
		work, tid := make(chan func()), make(chan int)
		go func() {
			runtime.LockOSThread()
			tid <- unix.Gettid()
			for do := range work {
				do()
			}
		}()
		id := <-tid
		p.threads[id] = work
		return fmt.Sprint(id)
	case "exit":
		return "exit"
	case "exec":
		must(syscall.Exec("/proc/self/exe", os.Args, programEnv()))
	case "seize":
		return said(unix.PtraceSeize(arg(args, 0)))
	case "detach":
		return said(detach(arg(args, 0)))
	case "name":
		return said(os.WriteFile(fmt.Sprintf("/proc/self/task/%d/comm", unix.Gettid()), []byte(args[0]), 0))
	case "map": // PROTECTION TEXT, returns the address of two pages, the second unmapped later
		return p.mapMemory(arg(args, 0), args[1])
	case "unmap": // ADDRESS: the second page
		b := p.memory[uint64(arg(args, 0))]
		_, _, errno := unix.Syscall(unix.SYS_MUNMAP, uintptr(arg(args, 0)+os.Getpagesize()), uintptr(len(b)-os.Getpagesize()), 0)
		if errno != 0 {
			return errno.Error()
		}
		return "ok"
	case "peek": // ADDRESS COUNT
		return string(p.memory[uint64(arg(args, 0))][:arg(args, 1)])
	case "pipe": // FLAGS
		var fds [2]int
		must(unix.Pipe2(fds[:], arg(args, 0)))
		return fmt.Sprint(fds[0], " ", fds[1])
	case "open": // PATH FLAGS
		fd, err := unix.Open(args[0], arg(args, 1), 0o600)
		must(err)
		return fmt.Sprint(fd)
	case "close":
		return said(unix.Close(arg(args, 0)))
	case "read": // FD COUNT, returns how many
		n, err := unix.Read(arg(args, 0), make([]byte, arg(args, 1)))
		if err != nil {
			return err.Error()
		}
		return fmt.Sprint(n)
	case "block": // SIGNAL
		var set unix.Sigset_t
		set.Val[0] = 1 << (arg(args, 0) - 1)
		return said(unix.PthreadSigmask(unix.SIG_BLOCK, &set, nil))
	case "eventfd":
		fd, err := unix.Eventfd(0, 0)
		must(err)
		return fmt.Sprint(fd)
	case "unshare-files":
		return said(unix.Unshare(unix.CLONE_FILES))
	case "zombie": // returns the ID of a child that has ended
		child := exec.Command("/proc/self/exe", play)
		child.Env = programEnv()
		must(child.Start()) // without input it ends at once
		var info unix.Siginfo
		must(unix.Waitid(unix.P_PID, child.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil))
		return fmt.Sprint(child.Process.Pid)
	case "start": // PATH, in a new thread; returns that thread
		in, held, err := os.Pipe()
		must(err)
		p.held = append(p.held, held)
		tid := make(chan int)
		go func() {
			runtime.LockOSThread()
			tid <- unix.Gettid()
			_, err := os.StartProcess(args[0], []string{args[0], play}, &os.ProcAttr{Env: programEnv(), Files: []*os.File{in, nil, os.Stderr}})
			must(err)
		}()
		return fmt.Sprint(<-tid)
	case "new-host":
		h, err := NewHost(func() {}, func(error) {})
		if err == nil {
			h.Close()
		}
		return said(err)
	case "reach": // PID, returns the error of accessing that process's memory
		var trouble []string
		h, err := NewHost(func() {}, func(err error) { trouble = append(trouble, err.Error()) })
		must(err)
		task, err := h.Task(int32(arg(args, 0)))
		must(err)
		for range 2 {
			trouble = append(trouble, fmt.Sprint(task.MM()))
		}
		h.Close()
		return strings.Join(trouble, "; ")
	case "nest": // returns the ID, here, of a child in a new pid namespace
		return p.startNested()
	}
	must(fmt.Errorf("no such thing as %q", word))
	return ""
}

func (p *program) mapMemory(protection int, text string) string {
	page := os.Getpagesize()
	b, err := unix.Mmap(-1, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	must(err)
	copy(b, text)
	copy(b[page-len(text):], text)
	must(unix.Mprotect(b[:page], protection))
	must(unix.Mprotect(b[page:], unix.PROT_NONE))
	addr, err := strconv.ParseUint(fmt.Sprintf("%p", &b[0]), 0, 64)
	must(err)
	p.memory[addr] = b
	return fmt.Sprint(addr)
}

// startNested starts a program that ends with this one.
func (p *program) startNested() string {
	child := exec.Command("/proc/self/exe", play)
	child.Env = programEnv()
	child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	_, err := child.StdinPipe()
	must(err)
	out, err := child.StdoutPipe()
	must(err)
	must(child.Start())
	_, err = bufio.NewReader(out).ReadString('\n')
	must(err)
	return fmt.Sprint(child.Process.Pid)
}

// detach ends the tracing of a thread, which must be stopped for that.
func detach(pid int) error {
	if err := unix.PtraceInterrupt(pid); err != nil {
		return err
	}
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &status, unix.WALL, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		return unix.PtraceDetach(pid)
	}
}

// child is a program under test.
type child struct {
	tb  testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	pid int32
}

// startProgram starts a program, which ends with the test. attr may be nil.
func startProgram(tb testing.TB, attr *syscall.SysProcAttr) *child {
	tb.Helper()
	cmd := exec.Command("/proc/self/exe", play)
	cmd.Env, cmd.Stderr, cmd.SysProcAttr = programEnv(), os.Stderr, attr
	in, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		if attr != nil && (errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSPC)) {
			tb.Skipf("needs namespaces, which are not available: %v", err)
		}
		tb.Fatal(err)
	}
	c := &child{tb: tb, cmd: cmd, in: in, out: bufio.NewReader(out), pid: int32(cmd.Process.Pid)}
	tb.Cleanup(c.kill)
	c.expect("ready")
	return c
}

// kill ends the program and waits for its end. It may be called again.
func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// do makes a thread do something; 0 is the main one.
func (c *child) do(thread int32, format string, args ...any) string {
	c.tb.Helper()
	c.tell(thread, format, args...)
	line, err := c.out.ReadString('\n')
	if err != nil {
		c.tb.Fatalf("%s: %v", fmt.Sprintf(format, args...), err)
	}
	return strings.TrimSpace(line)
}

func (c *child) tell(thread int32, format string, args ...any) {
	c.tb.Helper()
	if _, err := fmt.Fprintf(c.in, "%d %s\n", thread, fmt.Sprintf(format, args...)); err != nil {
		c.tb.Fatal(err)
	}
}

// number is do for a result that is a number.
func (c *child) number(thread int32, format string, args ...any) int32 {
	c.tb.Helper()
	return int32(c.numbers(thread, format, args...)[0])
}

func (c *child) numbers(thread int32, format string, args ...any) []uint64 {
	c.tb.Helper()
	var all []uint64
	answer := c.do(thread, format, args...)
	for text := range strings.FieldsSeq(answer) {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			c.tb.Fatalf("%s: %s", fmt.Sprintf(format, args...), answer)
		}
		all = append(all, n)
	}
	return all
}

// ok is do for what must succeed.
func (c *child) ok(thread int32, format string, args ...any) {
	c.tb.Helper()
	c.expectAnswer("ok", c.do(thread, format, args...))
}

func (c *child) expect(want string) {
	c.tb.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil {
		c.tb.Fatalf("waiting for %q: %v", want, err)
	}
	c.expectAnswer(want, strings.TrimSpace(line))
}

func (c *child) expectAnswer(want, got string) {
	c.tb.Helper()
	if got != want {
		c.tb.Fatalf("the program says %q, want %q", got, want)
	}
}

// state returns the letter of /proc/TID/stat, 0 without such a thread.
func state(tid int32) byte {
	stat, err := os.ReadFile(procPath(tid, "stat"))
	if err != nil {
		return 0
	}
	return stat[bytes.LastIndexByte(stat, ')')+2]
}

// until polls until a condition holds that has no notification.
func until(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	late := time.After(20 * time.Second)
	for !cond() {
		select {
		case <-again.C:
		case <-late:
			tb.Fatalf("after 20 s still not: %s", what)
		}
	}
}

// newHost returns a Host that ends with the test, and a channel of its wakes.
func newHost(tb testing.TB) (*Host, <-chan struct{}) {
	tb.Helper()
	wakes := make(chan struct{}, 1)
	h, err := NewHost(func() {
		select {
		case wakes <- struct{}{}:
		default:
		}
	}, func(err error) { tb.Error(err) })
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		tb.Skip(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(h.Close)
	return h, wakes
}

func taskOf(tb testing.TB, h *Host, tid int32) *Task {
	tb.Helper()
	t, err := h.Task(tid)
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

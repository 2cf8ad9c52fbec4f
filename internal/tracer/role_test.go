package tracer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// roleEnv names what this binary plays when a test starts it again.
const roleEnv = "GPREEMPT_TRACER_TEST_ROLE"

// The roles.
const (
	roleTarget = "target" // the traced program
	roleParent = "parent" // starts a target and tells what wait tells a parent
	roleChild  = "child"  // what a target forks
	roleTracer = "tracer" // attaches, as the daemon does
)

// A target keeps its main goroutine on its main thread, the one that is traced. A
// tracer does not: there a goroutine may come to run on the main thread.
func init() {
	if role := os.Getenv(roleEnv); role != "" && role != roleTracer {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleEnv); role {
	case "":
		os.Exit(testutil.VerifyMain(m))
	case roleTarget:
		fmt.Println("ready")
		playTarget(bufio.NewReader(os.Stdin))
	case roleParent:
		playParent()
	case roleChild:
		status, err := readStatus("/proc/self/status")
		fmt.Println("child traced by", status.tracer, err)
	case roleTracer:
		playTracer()
	default:
		fmt.Fprintln(os.Stderr, "no role", role)
		os.Exit(2)
	}
}

// must ends a role whose ground gave way.
func must(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", os.Getenv(roleEnv), err)
		os.Exit(99)
	}
}

// as gives the environment in which this binary plays a role.
func as(role string) []string {
	own := slices.DeleteFunc(os.Environ(), func(entry string) bool { return strings.HasPrefix(entry, roleEnv+"=") })
	// A program built with -race sleeps for a second before it exits, unless told.
	return append(own, roleEnv+"="+role, "GORACE=atexit_sleep_ms=0")
}

// playTarget does what the lines of its input say, and answers each with a line.
// The end of the input ends it.
func playTarget(in *bufio.Reader) {
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		word, argument, _ := strings.Cut(strings.TrimSpace(line), " ")
		number, _ := strconv.Atoi(argument)
		switch word {
		case "ping":
			fmt.Println("pong")
		case "exit":
			os.Exit(number)
		case "catch": // from now on, a line for each signal of this number
			caught := make(chan os.Signal, 1)
			signal.Notify(caught, unix.Signal(number))
			go func() {
				for range caught {
					fmt.Println("caught", number)
				}
			}()
			fmt.Println("catching", number)
		case "count": // from now on, sum up the values of the queued signals of this number
			must(installCounter(number))
			fmt.Println("counting", number)
		case "counted":
			fmt.Println("counted", readCounter())
		case "exec":
			must(syscall.Exec("/proc/self/exe", os.Args, as(roleTarget)))
		case "exec-in-thread":
			go func() {
				runtime.LockOSThread() // the main thread is taken, by main
				must(syscall.Exec("/proc/self/exe", os.Args, as(roleTarget)))
			}()
			select {}
		case "end-main-thread":
			go playTarget(in)
			fmt.Println("ending")
			_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
		case "fork":
			child, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{Env: as(roleChild), Files: []*os.File{nil, os.Stdout, os.Stderr}})
			must(err)
			_, err = child.Wait()
			must(err)
		case "sleep-in-kernel": // uninterruptible until the next line, which is lost
			sleepInKernel()
			fmt.Println("slept")
		default:
			must(fmt.Errorf("no command %q", line))
		}
	}
}

// sleepInKernel forks a child and waits for it in the kernel, deaf to all signals but
// SIGKILL, as one waits for a driver. The child is a copy of one thread: it makes
// system calls and nothing else.
func sleepInKernel() {
	told := []byte("asleep\n")
	var line [64]byte
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_VFORK|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		must(errno)
	}
	if pid == 0 {
		rawWriteRead(told, line[:])
		for {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
		}
	}
	_, err := unix.Wait4(int(pid), nil, 0, nil)
	must(err)
}

// playParent starts a target with its own input and output, and writes to
// descriptor 3 its pid and then what happens to it.
func playParent() {
	const eventFD = 3
	unix.CloseOnExec(eventFD)
	events := os.NewFile(eventFD, "events")
	target, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{
		Env: as(roleTarget), Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
	})
	must(err)
	fmt.Fprintln(events, target.Pid)
	for {
		var status unix.WaitStatus
		_, err := unix.Wait4(target.Pid, &status, unix.WUNTRACED|unix.WCONTINUED, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			must(err)
		case status.Stopped():
			fmt.Fprintln(events, "stopped", int(status.StopSignal()))
		case status.Continued():
			fmt.Fprintln(events, "continued")
		case status.Exited():
			fmt.Fprintln(events, "exited", status.ExitStatus())
			return
		case status.Signaled():
			fmt.Fprintln(events, "killed", int(status.Signal()))
			return
		}
	}
}

// playTracer attaches to the process its input names, says how that went, and stays
// until its input ends. With "nobody" it gives up root's rights before, and with
// "one" it attaches with one processor, which brings goroutines to the main thread.
func playTracer() {
	var how string
	var pid int32
	var start uint64
	_, err := fmt.Scanln(&how, &pid, &start)
	must(err)
	switch how {
	case "nobody":
		must(syscall.Setgid(65534))
		must(syscall.Setuid(65534))
	case "one":
		runtime.GOMAXPROCS(1)
	}
	ctx := context.Background()
	thread, err := Attach(ctx, pid, start)
	if err != nil {
		fmt.Println(err)
		return
	}
	var tid int
	must(thread.Do(ctx, func() error { tid = unix.Gettid(); return nil }))
	if tid == unix.Getpid() {
		fmt.Println("attached on the main thread")
		return
	}
	fmt.Println("attached")
	_, _ = io.Copy(io.Discard, os.Stdin)
	must(thread.Detach(ctx))
}

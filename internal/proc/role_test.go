package proc

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

// What this binary plays when it is started by a test, as its only arguments: a
// role, and nothing a process inherits, so that no process plays one by accident.
const (
	roleTarget   = "play-target"   // the traced program
	roleParent   = "play-parent"   // starts a target and reports what wait tells a parent
	roleOrphaner = "play-orphaner" // the same, with the target in a session of its own
	roleChild    = "play-child"    // what a target forks
	roleTracer   = "play-tracer"   // attaches, as the daemon does
)

// generationEnv counts the programs between the test run and a process, and
// maxGeneration bounds them: should roles ever start each other without end, or one
// of them start the tests, the chain breaks.
const (
	generationEnv = "GPREEMPT_TRACER_TEST_GENERATION"
	maxGeneration = 32
)

func role() string {
	if len(os.Args) == 2 && strings.HasPrefix(os.Args[1], "play-") {
		return os.Args[1]
	}
	return ""
}

func generation() int {
	n, _ := strconv.Atoi(os.Getenv(generationEnv)) // 0 if unset
	return n
}

// as returns the arguments and the environment that make /proc/self/exe play a role.
func as(role string) (argv, env []string) {
	env = slices.DeleteFunc(os.Environ(), func(entry string) bool { return strings.HasPrefix(entry, generationEnv+"=") })
	// A program built with -race sleeps for a second before it exits, unless told.
	return []string{os.Args[0], role}, append(env, fmt.Sprint(generationEnv, "=", generation()+1), "GORACE=atexit_sleep_ms=0")
}

// A target keeps its main goroutine on its main thread, the one that is traced. A
// tracer does not: there a goroutine may come to run on the main thread.
func init() {
	if role := role(); role != "" && role != roleTracer {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	if os.Getenv(roleEnv) != "" {
		playChild()
		return
	}
	role, generation := role(), generation()
	if generation > maxGeneration || (generation > 0) != (role != "") {
		fmt.Printf("refused: role %q in generation %d\n", role, generation)
		os.Exit(2)
	}
	switch role {
	case "":
		os.Exit(testutil.VerifyMain(m))
	case roleTarget:
		fmt.Println("ready")
		playTarget(bufio.NewReader(os.Stdin))
	case roleParent:
		// A process group is not orphaned while the parent of its leader is in another
		// group of the same session. In an orphaned one the stop signals other than
		// SIGSTOP have no effect (kernel/signal.c: get_signal).
		playParent(&syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL})
	case roleOrphaner:
		playParent(&syscall.SysProcAttr{Setsid: true, Pdeathsig: unix.SIGKILL})
	case roleChild:
		status, err := Status("/", "self")
		fmt.Println("child traced by", status.Tracer, err)
	case roleTracer:
		playTracer()
	default:
		must(errors.New("no such role"))
	}
}

// must ends a role after an error.
func must(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", role(), err)
		os.Exit(99)
	}
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
		case "count": // from now on, count the signals of this number and sum up their values
			must(installCounter(number))
			fmt.Println("counting", number)
		case "counted":
			count, sum := readCounter(number)
			fmt.Println(count, sum)
		case "raise": // so many queued signals to itself
			for i := range number {
				must(queueSignal(int32(os.Getpid()), countedSignal, int32(i)))
			}
			fmt.Println("raised", number)
		case "stop":
			must(unix.Tgkill(os.Getpid(), os.Getpid(), unix.SIGSTOP))
			fmt.Println("stopped itself")
		case "exec":
			must(execTarget())
		case "exec-in-thread":
			go func() {
				runtime.LockOSThread() // the main thread is taken, by main
				must(execTarget())
			}()
			select {}
		case "end-main-thread":
			go func() {
				playTarget(in)
				os.Exit(0)
			}()
			fmt.Println("ending")
			_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
		case "fork":
			argv, env := as(roleChild)
			child, err := os.StartProcess("/proc/self/exe", argv, &os.ProcAttr{Env: env, Files: []*os.File{nil, os.Stdout, os.Stderr}})
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

func execTarget() error {
	argv, env := as(roleTarget)
	return syscall.Exec("/proc/self/exe", argv, env)
}

// sleepInKernel forks a child and waits for it in the kernel, where only SIGKILL
// interrupts it, as a wait for a driver does.
func sleepInKernel() {
	pid, errno := vfork([]byte("asleep\n"), make([]byte, 64))
	if errno != 0 {
		must(errno)
	}
	_, err := unix.Wait4(int(pid), nil, 0, nil)
	must(err)
}

// playParent starts a target with its own input and output, and writes to descriptor 3
// the pid and then what happens to the target. When the reader closes descriptor 3 the
// tests have ended, and the target, even a stopped one, dies with its parent.
func playParent(group *syscall.SysProcAttr) {
	for _, stop := range []unix.Signal{unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU} {
		must((&sigaction{}).install(int(stop))) // some shells have them ignored
	}
	const eventFD = 3
	unix.CloseOnExec(eventFD)
	events := os.NewFile(eventFD, "events")
	go func() {
		for {
			if n, err := unix.Poll([]unix.PollFd{{Fd: eventFD}}, -1); n > 0 || !errors.Is(err, unix.EINTR) {
				os.Exit(0)
			}
		}
	}()
	argv, env := as(roleTarget)
	target, err := os.StartProcess("/proc/self/exe", argv, &os.ProcAttr{
		Env: env, Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Sys: group,
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

// playTracer attaches to the process that its input names, prints the result, and
// traces until its input ends. With "nobody" it drops the rights of root first, and with
// "one" it uses one processor, which runs goroutines on the main thread.
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
	thread, err := Trace(ctx, pid, start)
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

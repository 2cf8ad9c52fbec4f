package seccomp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// buffer is a bytes.Buffer that can be read while a process writes to it.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// clients are the programs in the test binary. They print their results; the error they
// return determines the exit code.
var clients = map[string]func(args []string) error{
	"echo":         clientEcho,
	"storm":        clientStorm,
	"wait":         clientWait,
	"twice":        clientTwice,
	"spawn":        clientSpawn,
	"replaced":     clientReplaced,
	"enter":        clientEnter,
	"reenter":      clientReenter,
	"supervisor":   clientSupervisor,
	"supported":    clientSupported,
	"where":        clientWhere,
	"stranger":     clientStranger,
	"full":         clientFull,
	"pair":         clientPair,
	"measure":      clientMeasure,
	"unprivileged": clientUnprivileged,
	"own":          clientOwn,
}

func runClient(name string, args []string) int {
	client, ok := clients[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "no client %q\n", name)
		return 2
	}
	if err := client(args); err != nil {
		fmt.Fprintf(os.Stderr, "client %s: %v\n", name, err)
		return 1
	}
	return 0
}

// clientEcho calls once for each argument, and prints the results.
func clientEcho(args []string) error {
	for _, arg := range args {
		n, err := strconv.Atoi(arg)
		if err != nil {
			return err
		}
		r, errno := call(nrEcho, uintptr(n))
		fmt.Printf("%d %d\n", int(r), int(errno))
	}
	return nil
}

// stormResult is the result of clientStorm.
type stormResult struct {
	// Bad counts wrong results, Restart errnos internal to the kernel, and Interrupted
	// counts EINTR.
	Bad, Restart, Interrupted int
	// Signals is the number of signals sent.
	Signals int64
}

// clientStorm makes args[1] calls of the kind args[2] while it sends the thread many
// signals, with handlers that have SA_RESTART if args[0] is "restart".
func clientStorm(args []string) error {
	calls, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	kind := uintptr(nrEcho)
	if args[2] == "wait" {
		kind = nrWait
	}
	if err := handleSignal(unix.SIGUSR1, args[0] == "restart"); err != nil {
		return err
	}
	var result stormResult
	var sent atomic.Int64
	stop := make(chan struct{})
	tid := unix.Gettid()
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if err := unix.Tgkill(os.Getpid(), tid, unix.SIGUSR1); err == nil {
					sent.Add(1)
				}
				runtime.Gosched()
			}
		}
	})
	for i := range calls {
		for {
			r, errno := call(kind, uintptr(i))
			if errno == unix.EINTR {
				result.Interrupted++
				continue
			}
			switch {
			case errno > 133: // EHWPOISON, the last errno of programs
				result.Restart++
			case errno != 0 || kind == nrEcho && r != uintptr(i):
				result.Bad++
			}
			break
		}
	}
	close(stop)
	wg.Wait()
	result.Signals = sent.Load()
	return json.NewEncoder(os.Stdout).Encode(result)
}

// clientWait makes a blocking call and prints its result. The handler of SIGUSR1
// has SA_RESTART if args[0] is "restart".
func clientWait(args []string) error {
	if err := handleSignal(unix.SIGUSR1, args[0] == "restart"); err != nil {
		return err
	}
	r, errno := call(nrWait, 0)
	fmt.Printf("%d %d\n", int(r), int(errno))
	return nil
}

// clientTwice makes a blocking call and an echo, and prints their errnos.
func clientTwice([]string) error {
	_, first := call(nrWait, 0)
	_, second := call(nrEcho, 1)
	fmt.Printf("%d %d\n", int(first), int(second))
	return nil
}

// clientSpawn makes a child echo its arguments, and then echoes itself.
func clientSpawn(args []string) error {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), clientVariable+"=echo")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return err
	}
	return clientEcho(args)
}

// clientReplaced blocks in a call while another thread, once it reads a byte,
// executes the echo client.
func clientReplaced(args []string) error {
	go func() {
		runtime.LockOSThread()
		var b [1]byte
		if _, err := os.Stdin.Read(b[:]); err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(become("echo", args))
	}()
	r, errno := call(nrWait, 0)
	return fmt.Errorf("the call came back: %d, %d", r, int(errno))
}

// clientEnter enters the supervisor at args[0] and becomes the client args[1].
func clientEnter(args []string) error {
	if err := Enter(args[0], Filter(ioctlType)); err != nil {
		fmt.Println(err)
		return nil
	}
	return become(args[1], args[2:])
}

// become executes another client in this one's place.
func become(client string, args []string) error {
	if err := os.Setenv(clientVariable, client); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", append([]string{client}, args...), os.Environ())
}

// clientUnprivileged drops its capabilities and enters.
func clientUnprivileged(args []string) error {
	// Capset changes one thread. The program that it executes also has no capabilities:
	// without these bits root would regain them.
	const noRoot, noRootLocked = 1, 2
	if err := unix.Prctl(unix.PR_SET_SECUREBITS, noRoot|noRootLocked, 0, 0, 0); err != nil {
		return err
	}
	var none [2]unix.CapUserData
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
		return err
	}
	return clientEnter(args)
}

// clientReenter tries to enter again, and echoes.
func clientReenter(args []string) error {
	fmt.Println(errors.Is(Enter(args[0], Filter(ioctlType)), ErrAlready))
	return clientEcho([]string{"5"})
}

// clientSupervisor serves programs at args[0] until it is killed, and prints when
// it is ready and when a call blocks.
func clientSupervisor(args []string) error {
	handle := func(c *Call) {
		if byte(c.Args[1]) == nrWait && isDevice(c) {
			c.Wait()
			fmt.Println("blocked")
			select {}
		}
		_ = c.Continue()
	}
	_, err := Serve(args[0], func(fd int) error {
		NewListener(fd, handle)
		return nil
	}, func(err error) { fmt.Println(err) })
	if err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}

// clientSupported prints the result of Supported.
func clientSupported([]string) error {
	fmt.Println(Supported())
	return nil
}

// clientWhere prints the working directory, the content of the file "marker" in it, and
// whether no_new_privs is set.
func clientWhere([]string) error {
	dir, err := unix.Getwd()
	if err != nil {
		return err
	}
	marker, err := os.ReadFile("marker")
	if err != nil {
		return err
	}
	nnp, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	if err != nil {
		return err
	}
	fmt.Printf("%s %s %d\n", dir, marker, nnp)
	return nil
}

// clientStranger blocks until its standard input ends.
func clientStranger([]string) error {
	fmt.Println("ready")
	_, err := os.Stdin.Read(make([]byte, 1))
	_ = err // end of file
	return nil
}

// clientPair blocks in a call on one thread and, once it reads a byte, echoes and
// then blocks on another.
func clientPair([]string) error {
	first := make(chan uintptr)
	go func() {
		r, _ := call(nrWait, 0)
		first <- r
	}()
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		return err
	}
	echo, _ := call(nrEcho, 6)
	second, _ := call(nrWait, 0)
	fmt.Println(echo, <-first, second)
	return nil
}

// clientOwn prints whether OwnThread used the first thread, which would otherwise run its
// goroutine.
func clientOwn([]string) error {
	runtime.GOMAXPROCS(1)
	runtime.UnlockOSThread()
	OwnThread(func() { fmt.Println(onMainThread()) })
	return nil
}

// clientFull requests a descriptor at the limit of descriptors.
func clientFull([]string) error {
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: 3}); err != nil {
		return err
	}
	_, errno := call(nrFile, 0)
	fmt.Println(unix.ErrnoName(errno))
	return nil
}

// handleSignal makes the runtime handle a signal, with SA_RESTART or without, which Go
// itself never does.
func handleSignal(sig syscall.Signal, restart bool) error {
	signal.Notify(make(chan os.Signal, 1), sig)
	return setRestart(sig, restart)
}

package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// An agent is a process of a script on a real kernel: this binary again, which connects to
// the host's socket and carries out the orders. After an execve, and in the child of a
// fork, it connects again.
const agentEnv = "GPREEMPT_CONFORMANCE_AGENT"

// AgentCommand is the first argument of a program that is an agent.
const AgentCommand = "conformance-agent"

// interruption is a signal to threads with a handler of Go's runtime.
const interruption = unix.SIGWINCH

// hello is the first message of an agent.
type hello struct {
	PID int32
}

// order is a line to an agent: a call for one of its threads, or a change of the agent
// itself.
type order struct {
	ID     int
	Thread int
	// What is "" for the call, or one of the constants below.
	What string
	Call call
}

const (
	orderThread   = "thread"   // create the thread
	orderEnd      = "end"      // end the thread
	orderFork     = "fork"     // start a child, with every descriptor that execve does not close
	orderExec     = "exec"     // execute this program again
	orderExit     = "exit"     // end
	orderDropCaps = "dropcaps" // drop the thread's capabilities for CRIU_OP
	orderPass     = "pass"     // continue the thread's tracee, with the signal that stopped it
)

// result is an agent's answer, by the order's ID.
type result struct {
	ID    int
	Reply reply
	TID   int32 // of a new thread, or the pid of a child
	Err   string
}

// Agent is the main function of an agent, which Play has started. The caller is the main
// thread, and stays on it.
func Agent() error {
	if err := neverRestart(interruption); err != nil {
		return err
	}
	conn, err := net.Dial("unix", os.Getenv(agentEnv)) //nolint:gosec,noctx // G704: the host, which started this process, listens there
	if err != nil {
		return err
	}
	mainThread := make(chan order, 1)
	g := &agent{out: json.NewEncoder(conn), threads: map[int]chan order{0: mainThread}, sys: kernelSystem{kfd.Kernel(), newProgram()}}
	if err := g.out.Encode(hello{PID: int32(os.Getpid())}); err != nil {
		return err
	}
	go func() {
		// The agent ends with the socket.
		fmt.Fprintln(os.Stderr, "agent:", g.dispatch(json.NewDecoder(conn)))
		os.Exit(1)
	}()
	g.loop(mainThread)
	select {}
}

type agent struct {
	mu      sync.Mutex // guards out
	out     *json.Encoder
	threads map[int]chan order // used by the dispatcher
	sys     kernelSystem
}

func (g *agent) dispatch(in *json.Decoder) error {
	for {
		var o order
		if err := in.Decode(&o); err != nil {
			return err
		}
		if o.What == orderThread {
			g.threads[o.Thread] = make(chan order, 1)
			go func(c chan order) {
				runtime.LockOSThread()
				g.answer(result{ID: o.ID, TID: int32(unix.Gettid())})
				g.loop(c) // returning without unlocking ends the thread
			}(g.threads[o.Thread])
			continue
		}
		g.threads[o.Thread] <- o
	}
}

func (g *agent) loop(orders chan order) {
	for o := range orders {
		r := result{ID: o.ID}
		var err error
		switch o.What {
		case "":
			r.Reply = perform(g.sys, o.Call)
		case orderEnd:
			g.answer(r)
			return
		case orderFork:
			var child *os.Process
			child, err = os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{Env: os.Environ(), Files: []*os.File{nil, os.Stdout, os.Stderr}}) //nolint:gosec // G702: this program again
			if err == nil {
				r.TID = int32(child.Pid)
				go func() { _, _ = child.Wait() }() // for the kernel to forget it; how it ended does not matter
			}
		case orderExec:
			err = syscall.Exec("/proc/self/exe", os.Args, os.Environ()) //nolint:gosec // G204: this program again
		case orderExit:
			os.Exit(0)
		case orderDropCaps:
			err = dropCaps()
		case orderPass:
			err = pass(o.Call)
		default:
			err = fmt.Errorf("unknown order %q", o.What)
		}
		if err != nil {
			r.Err = err.Error()
		}
		g.answer(r)
	}
}

func (g *agent) answer(r result) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.out.Encode(r); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

// dropCaps drops CAP_CHECKPOINT_RESTORE and CAP_SYS_ADMIN of the thread.
func dropCaps() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	for _, c := range []int{unix.CAP_CHECKPOINT_RESTORE, unix.CAP_SYS_ADMIN} {
		data[c/32].Effective &^= 1 << (c % 32)
		data[c/32].Permitted &^= 1 << (c % 32)
		data[c/32].Inheritable &^= 1 << (c % 32)
	}
	return unix.Capset(&header, &data[0])
}

// pass waits until the traced thread stops for a signal, and delivers the signal.
func pass(c call) error {
	d := doing{values: c.Values}
	pid := int(d.num("pid", 0))
	for {
		var status unix.WaitStatus
		_, err := unix.Wait4(pid, &status, unix.WALL, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("waiting for %d: %w", pid, err)
		}
		if !status.Stopped() {
			return fmt.Errorf("process %d ended", pid)
		}
		signal := status.StopSignal()
		if uint32(status)>>16 != 0 {
			signal = 0 // an event, such as an execve
		}
		if err := unix.PtraceCont(pid, int(signal)); err != nil { //nolint:forbidigo // on the actor's own locked thread, see loop
			return fmt.Errorf("continue %d: %w", pid, err)
		}
		if signal != 0 {
			return nil
		}
	}
}

// kernelSystem is the running kernel.
type kernelSystem struct {
	kfd.Sys
	self *program
}

func (s kernelSystem) program() *program { return s.self }

func (kernelSystem) Seize(pid int32) error { return unix.PtraceSeize(int(pid)) } //nolint:forbidigo // on the actor's own locked thread, see loop

// Detach stops the thread first, as PTRACE_DETACH requires.
func (kernelSystem) Detach(pid int32) error {
	if err := unix.PtraceInterrupt(int(pid)); err != nil { //nolint:forbidigo // on the actor's own locked thread, see loop
		return err
	}
	var status unix.WaitStatus
	for {
		if _, err := unix.Wait4(int(pid), &status, unix.WALL, nil); !errors.Is(err, unix.EINTR) {
			if err != nil {
				return err
			}
			break
		}
	}
	return unix.PtraceDetach(int(pid)) //nolint:forbidigo // on the actor's own locked thread, see loop
}

func (kernelSystem) PidfdOpen(pid int32) (int, error) { return unix.PidfdOpen(int(pid), 0) }

func (kernelSystem) PidfdGetfd(pid int32, fd int) (int, error) {
	pidfd, err := unix.PidfdOpen(int(pid), 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(pidfd)
	return unix.PidfdGetfd(pidfd, fd, 0)
}

func (kernelSystem) Pipe(nonblock bool) (r, w int, err error) {
	flags := unix.O_CLOEXEC
	if nonblock {
		flags |= unix.O_NONBLOCK
	}
	var fds [2]int
	err = unix.Pipe2(fds[:], flags)
	return fds[0], fds[1], err
}

// Unmapped returns inaccessible memory, which stays until the process ends.
func (kernelSystem) Unmapped() (kfd.Pointer, error) {
	wall, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	return kfd.PointerToSlice(wall), err
}

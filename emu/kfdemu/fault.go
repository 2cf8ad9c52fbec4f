package kfdemu

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Fault is an injected failure of certain calls or steps of the hardware.
type Fault struct {
	// Op is the call: "CREATE_QUEUE", "DBG_TRAP SUSPEND_QUEUES", "open"; or with a Step
	// the call under way, "" for any.
	Op driver.Op
	// Step, if not "", is the step of the hardware that fails; GPU restricts it to one GPU.
	Step driver.StepKind
	GPU  gpreempt.GPUID
	// Caller and Target restrict it to a process, 0 for any: the one that calls, or its parent,
	// and the one that the call or the step is about.
	Caller, Target int32
	// Nth is the match that fails: 0 and 1 are the first. Always: all from there on.
	Nth    int
	Always bool

	// The effects, in this order. Do is called during the call, for tests; at a step it
	// must not wait and not use the emulator.
	Do func()
	// Kill ends the caller (Caller, if that is set) or the target, with SIGKILL, and waits until
	// it is dead.
	Kill Victim
	// Delay is added to the duration. If Until is not nil, a step lasts until it is closed instead;
	// it is for tests.
	Delay time.Duration
	Until <-chan struct{}
	// Reset is a queue that does not leave the GPU at a StepUnmap: the driver resets it. Without
	// a PID it is one of the process that the step is about.
	Reset *driver.QueueOf
	// Errno is returned instead of the result: before the call has an effect or, with
	// After, afterwards. At a step the hardware fails with it.
	Errno syscall.Errno
	After bool
}

// Victim is the process that a fault kills.
type Victim string

// The victims.
const (
	KillNobody Victim = ""
	KillCaller Victim = "caller"
	KillTarget Victim = "target"
)

// faultErrnos are the errnos that ParseFault knows.
var faultErrnos = func() map[string]syscall.Errno {
	m := map[string]syscall.Errno{}
	for _, e := range []syscall.Errno{
		syscall.EPERM, syscall.ESRCH, syscall.EINTR, syscall.EIO, syscall.EBADF, syscall.EAGAIN, syscall.ENOMEM, syscall.EACCES,
		syscall.EFAULT, syscall.EBUSY, syscall.ENODEV, syscall.EINVAL, syscall.ENOTTY, syscall.ENOSPC, syscall.ENOSYS, syscall.ETIME,
		syscall.EALREADY, syscall.EOPNOTSUPP,
	} {
		m[unix.ErrnoName(e)] = e
	}
	return m
}()

// stepNames are the names of steps in a fault's text.
var stepNames = map[string]driver.StepKind{
	"unmap": driver.StepUnmap, "map": driver.StepMap, "add": driver.StepAdd, "remove": driver.StepRemove,
}

// ParseFault reads WHAT[#N][/gpu=ID][/pid=PID][/target=PID]:ACTION[,ACTION...].
//
// WHAT is a call by the driver's name without AMDKFD_IOC_ (CREATE_QUEUE,
// SUSPEND_QUEUES, open), or step=unmap, map, add or remove. #N strikes the Nth, #N+ it
// and all later ones; without it all. ACTIONs: delay=80ms, errno=EIO (before any
// effect), errno-after=EIO (the effect stays), kill=caller, kill=target, and at
// step=unmap reset=[PID.]QUEUE: this queue does not leave the GPU, and the driver resets it.
func ParseFault(text string) (Fault, error) {
	f, err := parseFault(text)
	if err != nil {
		return Fault{}, fmt.Errorf("fault %q: %w; the form is WHAT[#N][/gpu=ID][/pid=PID][/target=PID]:ACTION[,ACTION...]", text, err)
	}
	return f, nil
}

func parseFault(text string) (Fault, error) {
	fail := func(format string, a ...any) (f Fault, err error) { return f, fmt.Errorf(format, a...) }
	what, actions, ok := strings.Cut(text, ":")
	if !ok || what == "" || actions == "" {
		return fail("it needs a call or a step, a colon and what is to happen")
	}
	f := Fault{Always: true}
	where := strings.Split(what, "/")
	name, nth, counted := strings.Cut(where[0], "#")
	if counted {
		n, later := strings.CutSuffix(nth, "+")
		v, err := strconv.Atoi(n)
		if err != nil || v < 1 {
			return fail("%q is not a number from 1", nth)
		}
		f.Nth, f.Always = v, later
	}
	if step, ok := strings.CutPrefix(name, "step="); ok {
		if f.Step = stepNames[step]; f.Step == "" {
			return fail("%q is not a step: use unmap, map, add or remove", step)
		}
	} else if f.Op, ok = opNamed(name); !ok {
		return fail("the driver has no call %q", name)
	}
	for _, w := range where[1:] {
		key, value, _ := strings.Cut(w, "=")
		v, err := strconv.ParseUint(value, 10, 31)
		if err != nil {
			return fail("%q is not a number", w)
		}
		switch key {
		case "gpu":
			f.GPU = gpreempt.GPUID(v)
		case "pid":
			f.Caller = int32(v)
		case "target":
			f.Target = int32(v)
		default:
			return fail("%q is not gpu, pid or target", key)
		}
	}
	if f.GPU != 0 && f.Step == "" {
		return fail("a GPU narrows down steps, not calls")
	}
	for action := range strings.SplitSeq(actions, ",") {
		key, value, _ := strings.Cut(action, "=")
		var err error
		switch key {
		case "delay":
			if f.Delay, err = time.ParseDuration(value); err != nil || f.Delay <= 0 {
				return fail("%q is no positive duration", value)
			}
		case "errno", "errno-after":
			if f.Errno = faultErrnos[value]; f.Errno == 0 {
				return fail("%q is no errno of the driver's", value)
			}
			f.After = key == "errno-after"
		case "kill":
			f.Kill = Victim(value)
			if f.Kill != KillCaller && f.Kill != KillTarget {
				return fail("%q is neither caller nor target", value)
			}
		case "reset":
			if f.Reset, err = parseQueue(value); err != nil {
				return fail("%q is not PID.QUEUE or QUEUE", value)
			}
		default:
			return fail("%q is not delay, errno, errno-after, kill or reset", key)
		}
	}
	if f.Step != "" && (f.After || f.Kill != KillNobody) {
		return fail("a step knows delay, errno and reset")
	}
	if f.Reset != nil && f.Step != driver.StepUnmap {
		return fail("a queue is reset at step=unmap only")
	}
	return f, nil
}

func parseQueue(text string) (*driver.QueueOf, error) {
	pid, id, both := strings.Cut(text, ".")
	if !both {
		pid, id = "0", text
	}
	p, err1 := strconv.ParseUint(pid, 10, 31)
	q, err2 := strconv.ParseUint(id, 10, 32)
	return &driver.QueueOf{PID: int32(p), ID: uint32(q)}, errors.Join(err1, err2)
}

// opNamed finds a call by its name, with or without the name of the ioctl that it is an
// operation of.
func opNamed(name string) (driver.Op, bool) {
	for _, op := range driver.Ops() {
		if string(op) == name || strings.HasSuffix(string(op), " "+name) {
			return op, true
		}
	}
	return "", false
}

// Injection is a Fault in its Emulator.
type Injection struct {
	Fault
	set  *faults
	seen int
	hits int
}

// Hits returns how often it has struck.
func (i *Injection) Hits() int {
	i.set.mu.Lock()
	defer i.set.mu.Unlock()
	return i.hits
}

// Remove removes the fault.
func (i *Injection) Remove() {
	i.set.mu.Lock()
	defer i.set.mu.Unlock()
	for k, o := range i.set.all {
		if o == i {
			i.set.all = append(i.set.all[:k:k], i.set.all[k+1:]...)
			return
		}
	}
}

// faults are the injected ones. The oldest strikes first.
type faults struct {
	mu  sync.Mutex
	all []*Injection
}

// Inject adds a fault.
func (e *Emulator) Inject(f Fault) *Injection {
	i := &Injection{Fault: f, set: &e.faults}
	e.faults.mu.Lock()
	defer e.faults.mu.Unlock()
	e.faults.all = append(e.faults.all, i)
	return i
}

// strike returns the first fault that matches, nil for none.
func (s *faults) strike(matches func(*Fault) bool) *Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range s.all {
		if !matches(&i.Fault) {
			continue
		}
		i.seen++
		if nth := max(i.Nth, 1); i.seen == nth || i.Always && i.seen > nth {
			i.hits++
			f := i.Fault
			return &f
		}
	}
	return nil
}

// forCall returns the fault for a call.
func (s *faults) forCall(op driver.Op, caller, target int32) *Fault {
	return s.strike(func(f *Fault) bool {
		return f.Step == "" && f.Op == op && calls(f.Caller, caller) && is(f.Target, target)
	})
}

// forStep returns the fault for a step of the hardware.
func (s *faults) forStep(step driver.Step) *Fault {
	return s.strike(func(f *Fault) bool {
		return f.Step == step.Kind && (f.Op == "" || f.Op == step.Op) && (f.GPU == 0 || f.GPU == step.GPU) &&
			calls(f.Caller, step.Caller) && is(f.Target, step.Process)
	})
}

func is(want, pid int32) bool { return want == 0 || want == pid }

// calls reports whether a call of pid is one of the process want, or of a child of it.
func calls(want, pid int32) bool {
	if is(want, pid) {
		return true
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err == nil && strings.Contains(string(status), fmt.Sprintf("\nPPid:\t%d\n", want))
}

func victim(f *Fault, caller, target int32) int32 {
	switch {
	case f.Kill == KillTarget:
		return target
	case f.Caller != 0:
		return f.Caller
	}
	return caller
}

// kill ends a process and waits until it has ended, at most a second: a process that
// waits for this call's answer may be its own debugger. Another may have ended it just before.
func kill(pid int32) error {
	fd, err := unix.PidfdOpen(int(pid), 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	if err = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); errors.Is(err, unix.ESRCH) {
		err = nil
	}
	for end := time.Now().Add(time.Second); err == nil; {
		left := max(time.Until(end), 0)
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			break
		}
		err = nil
	}
	return errors.Join(err, unix.Close(fd))
}

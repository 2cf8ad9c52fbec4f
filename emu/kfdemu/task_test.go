package kfdemu

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

func TestOneTaskForEachThread(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	tid := c.number(0, "thread")
	leader, thread := taskOf(t, h, c.pid), taskOf(t, h, tid)
	type facts struct {
		TID, Leader, Inside int32
		SameLeader          bool
	}
	got := []facts{
		{leader.TID(), leader.Leader().TID(), leader.PIDInside(), leader.Leader() == driver.Task(leader)},
		{thread.TID(), thread.Leader().TID(), thread.PIDInside(), thread.Leader() == driver.Task(leader)},
	}
	want := []facts{{c.pid, c.pid, c.pid, true}, {tid, c.pid, c.pid, true}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if again := taskOf(t, h, tid); again != thread {
		t.Errorf("thread %d is task %p, and then %p", tid, thread, again)
	}
	if found := leader.Find(tid); found != driver.Task(thread) {
		t.Errorf("Find gives %v, want the thread's task", found)
	}
}

func TestUnknownThreads(t *testing.T) {
	h, _ := newHost(t)
	for _, tid := range []int32{0, -1, 1 << 30} {
		if task, err := h.Task(tid); !errors.Is(err, ErrGone) {
			t.Errorf("Task(%d) gives %v and %v, want ErrGone", tid, task, err)
		}
	}
	c := startProgram(t, nil)
	task := taskOf(t, h, c.pid)
	for _, pid := range []int32{0, -1, 1 << 30} {
		if found := task.Find(pid); found != nil {
			t.Errorf("Find(%d) gives %v", pid, found)
		}
	}
}

func TestEndedThreadHasNoTask(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	tid := c.number(0, "thread")
	task := taskOf(t, h, tid)
	c.expectAnswer("exit", c.do(tid, "exit"))
	until(t, "the thread has ended", func() bool { return state(tid) == 0 })
	if other, err := h.Task(tid); err == nil && other == task {
		t.Error("the thread that ended is still found")
	}
	if mm := task.MM(); mm != nil {
		t.Errorf("a thread that ended has the address space %v", mm)
	}
}

// The test makes the kernel reuse the ID of an ended thread.
func TestTaskOfAReusedID(t *testing.T) {
	if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", fmt.Append(nil, os.Getpid()), 0); err != nil {
		t.Skipf("needs to write /proc/sys/kernel/ns_last_pid (CAP_CHECKPOINT_RESTORE, CONFIG_CHECKPOINT_RESTORE): %v", err)
	}
	h, _ := newHost(t)
	first := startProgram(t, nil)
	task, key := taskOf(t, h, first.pid), gpreemptKey(t, h, first.pid)
	for range 50 {
		first.kill()
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", fmt.Append(nil, first.pid-1), 0); err != nil {
			t.Fatal(err)
		}
		second := startProgram(t, nil)
		if second.pid != first.pid {
			first = second
			task, key = taskOf(t, h, first.pid), gpreemptKey(t, h, first.pid)
			continue // another process was faster
		}
		if other := taskOf(t, h, second.pid); other == task {
			t.Error("two processes with the same id have the same task")
		}
		if mm := task.MM(); mm != nil {
			t.Errorf("the process that ended has the address space %v", mm)
		}
		if other := gpreemptKey(t, h, second.pid); other.PID != key.PID {
			t.Errorf("got %v, want pid %d", other, key.PID)
		}
		return
	}
	t.Skip("another process took the id each of 50 times: too busy a machine")
}

func TestTracerIsTheThreadThatTraces(t *testing.T) {
	h, _ := newHost(t)
	target, tracer := startProgram(t, nil), startProgram(t, nil)
	tid := tracer.number(0, "thread")
	task := taskOf(t, h, target.pid)
	if by := task.Tracer(); by != nil {
		t.Fatalf("traced by %v before anybody does", by)
	}
	tracer.ok(tid, "seize %d", target.pid)
	if by := task.Tracer(); by != driver.Task(taskOf(t, h, tid)) {
		t.Errorf("traced by %v, want thread %d", by, tid)
	}
	tracer.ok(tid, "detach %d", target.pid)
	if by := task.Tracer(); by != nil {
		t.Errorf("traced by %v after detaching", by)
	}
	tracer.ok(tid, "seize %d", target.pid)
	tracer.expectAnswer("exit", tracer.do(tid, "exit"))
	until(t, "the tracing ended with its thread", func() bool { return task.Tracer() == nil })
}

func TestZombieIsFoundWithoutAddressSpace(t *testing.T) {
	h, _ := newHost(t)
	parent := startProgram(t, nil)
	zombie := parent.number(0, "zombie")
	found := taskOf(t, h, parent.pid).Find(zombie)
	if found == nil {
		t.Fatal("the zombie is not found")
	}
	if mm := found.MM(); mm != nil {
		t.Errorf("the zombie has the address space %v", mm)
	}
}

func TestThreadsWhoseLeaderEnded(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	tid := c.number(0, "thread")
	fds := c.numbers(tid, "pipe 0")
	thread := taskOf(t, h, tid)
	c.expectAnswer("exit", c.do(0, "exit"))
	until(t, "the main thread has ended", func() bool { return state(c.pid) == 'Z' })
	leader := thread.Leader()
	if leader.TID() != c.pid || leader.MM() != nil {
		t.Errorf("the leader is %d with the address space %v, want %d with none", leader.TID(), leader.MM(), c.pid)
	}
	space := thread.Space()
	if space == nil || !space.Alive() || space.PID() != c.pid {
		t.Fatalf("the thread has the address space %v, want that of %d", space, c.pid)
	}
	if again := taskOf(t, h, tid).Space(); again != space {
		t.Errorf("then it has another: %v", again)
	}
	if mm := leader.MM(); mm != nil {
		t.Errorf("the leader has the address space %v, since its thread's is known", mm)
	}
	addr := c.numbers(tid, "map %d hello", unix.PROT_READ|unix.PROT_WRITE)[0]
	b := make([]byte, 5)
	if !thread.Memory(addr).Read(b) || string(b) != "hello" {
		t.Errorf("the memory of the thread reads %q", b)
	}
	if err := space.WriteAt([]byte("world"), addr); err != nil || c.do(tid, "peek %d 5", addr) != "world" {
		t.Errorf("writing to the address space: %v", err)
	}
	f := thread.File(uint32(fds[1]))
	if f == nil {
		t.Fatal("the thread's pipe is not found")
	}
	defer f.Put()
	f.WriteDot(nil)
	if n := c.number(tid, "read %d 10", fds[0]); n != 1 {
		t.Errorf("%d bytes in the pipe, want 1", n)
	}
}

func TestCommIsTheNameNowAndTheLastAfterTheEnd(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	task := taskOf(t, h, c.pid)
	other := startProgram(t, nil)
	unasked := taskOf(t, h, other.pid)
	other.ok(0, "name other")
	unasked.Space()
	other.kill()
	if got := unasked.Comm(); got != "other" {
		t.Errorf("got %q, want the name when its address space was found, other", got)
	}
	c.ok(0, "name odd(name")
	if got := task.Comm(); got != "odd(name" {
		t.Errorf("got %q, want odd(name", got)
	}
	c.kill()
	if got := task.Comm(); got != "odd(name" {
		t.Errorf("after the end: got %q, want odd(name", got)
	}
}

func TestInterruptedIsThatOfTheCall(t *testing.T) {
	h, _ := newHost(t)
	task := taskOf(t, h, startProgram(t, nil).pid)
	if task.Interrupted() {
		t.Error("interrupted outside of any call")
	}
	pending := false
	task.Begin(func() bool { return pending }, nil, nil, nil)
	if task.Interrupted() {
		t.Error("interrupted without a signal")
	}
	pending = true
	if !task.Interrupted() {
		t.Error("not interrupted with a signal")
	}
	task.End()
	if task.Interrupted() {
		t.Error("interrupted after the call")
	}
}

func capabilities(t *Task) []driver.Capability {
	var all []driver.Capability
	for _, c := range []driver.Capability{driver.CapSysPtrace, driver.CapSysAdmin, driver.CapCheckpointRestore} {
		if t.Capable(c) {
			all = append(all, c)
		}
	}
	return all
}

func TestCapableNeedsTheCapabilityHere(t *testing.T) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	if !has(status, driver.CapSysAdmin) || !has(status, driver.CapSysPtrace) {
		t.Skip("needs root with CAP_SYS_ADMIN and CAP_SYS_PTRACE")
	}
	h, _ := newHost(t)
	all := []driver.Capability{driver.CapSysPtrace, driver.CapSysAdmin, driver.CapCheckpointRestore}
	if diff := cmp.Diff(all, capabilities(taskOf(t, h, startProgram(t, nil).pid))); diff != "" {
		t.Errorf("root (-want +got):\n%s", diff)
	}
	nobody := startProgram(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}})
	if got := capabilities(taskOf(t, h, nobody.pid)); got != nil {
		t.Errorf("an ordinary user has %v", got)
	}
	alone := startProgram(t, inUserNamespace(0))
	if got := capabilities(taskOf(t, h, alone.pid)); got != nil {
		t.Errorf("root of another user namespace has %v", got)
	}
	h.privileged = false // an emulator without privilege creates such a namespace for its programs
	if diff := cmp.Diff(all, capabilities(taskOf(t, h, alone.pid))); diff != "" {
		t.Errorf("root of the emulator's user namespace (-want +got):\n%s", diff)
	}
}

func inUserNamespace(flags uintptr) *syscall.SysProcAttr {
	id := []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
	return &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | flags, UidMappings: id, GidMappings: id}
}

func TestEndedTasksAreDropped(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	for range 3 * minTasks {
		tid := c.number(0, "thread")
		taskOf(t, h, tid)
		c.expectAnswer("exit", c.do(tid, "exit"))
		until(t, "the thread has ended", func() bool { return state(tid) == 0 })
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.tasks); n > minTasks {
		t.Errorf("%d tasks are kept, of which 1 lives", n)
	}
}

// Threads start and end while other goroutines look for them.
func TestTasksOfThreadsThatStartAndEnd(t *testing.T) {
	h, _ := newHost(t)
	self := int32(os.Getpid())
	leader := taskOf(t, h, self)
	var done atomic.Bool
	var threads, askers sync.WaitGroup
	tids := make(chan int32, 16)
	for range 4 {
		threads.Go(func() {
			for range 25 {
				var one sync.WaitGroup
				one.Go(func() {
					runtime.LockOSThread() // the thread ends with the goroutine
					tid := int32(unix.Gettid())
					tids <- tid
					task, err := h.Task(tid)
					if err != nil {
						t.Error(err)
						return
					}
					if again, err := h.Task(tid); err != nil || again != task {
						t.Errorf("thread %d is %p, and then %p, %v", tid, task, again, err)
					}
					if task.Leader() != driver.Task(leader) || task.MM() != leader.MM() || task.MM() == nil {
						t.Errorf("thread %d is not of this process", tid)
					}
				})
				one.Wait()
			}
		})
	}
	for range 2 {
		askers.Go(func() {
			for tid := range tids {
				if task, err := h.Task(tid); err == nil {
					task.Tracer()
					task.MM()
					task.Comm()
				} else if !errors.Is(err, ErrGone) {
					t.Error(err)
				}
			}
		})
	}
	askers.Go(func() {
		for !done.Load() {
			if ended := h.Sweep(); len(ended) != 0 {
				t.Errorf("%v ended", ended)
			}
			runtime.Gosched()
		}
	})
	threads.Wait()
	close(tids)
	done.Store(true)
	askers.Wait()
}

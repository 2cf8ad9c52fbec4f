package kfdtest_test

import (
	"context"
	"os"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// selfDebugs returns a machine, outside of a bubble, where this process debugs a job.
func selfDebugs(t *testing.T, profile string) (m *kfdtest.Machine, job *kfdtest.Process, fd int, device *kfd.Device) {
	t.Helper()
	m = kfdtest.New(kfdtest.Config{Profile: profile, Nodes: []driver.Node{{ID: gpuA, GFX: hws}}})
	job = m.Spawn()
	s := &scene{T: t}
	fd, err := job.Main().StartRuntime()
	s.must(err)
	device, err = kfd.OpenWith(m.Self().Main(), kfd.DevicePath)
	s.must(err)
	t.Cleanup(func() { s.must(device.Close()) })
	return m, job, fd, device
}

// onThread runs f on a new OS thread, which ends afterwards.
func onThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // without an unlock: the thread ends
		if unix.Gettid() == os.Getpid() {
			onThread(f) // the main thread never ends
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

func TestSelfCallsAsTheCallingThread(t *testing.T) {
	m, job, _, device := selfDebugs(t, "6.12")
	s := &scene{T: t}
	if m.Self().PID() != int32(os.Getpid()) {
		t.Errorf("pid %d", m.Self().PID())
	}
	r, w, err := os.Pipe()
	s.must(err)
	defer r.Close()
	onThread(func() {
		s.must(m.Self().Main().Seize(job.PID()))
		info, err := device.Enable(job.PID(), enabledMask, int(w.Fd()))
		s.must(err)
		if info.State != kfd.RuntimeEnabled {
			t.Errorf("runtime %v", info.State)
		}
		onThread(func() {
			_, err := device.Snapshot(job.PID(), 0)
			s.want(unix.EPERM, err) // another thread
			s.want(unix.ESRCH, m.Self().Main().Detach(job.PID()))
		})
		_, err = device.Snapshot(job.PID(), 0)
		s.must(err)
	})
	// The thread has ended, and with it its tracing.
	for m.Self().Main().Seize(job.PID()) != nil {
		runtime.Gosched() // the kernel may not have ended it yet
	}
	s.must(w.Close()) // the driver has a duplicate
	job2fd, err := job.Main().OpenKFD()
	s.must(err)
	_, err = job.Main().CreateQueue(job2fd, gpuA, kfd.QueueTypeComputeAQL)
	s.must(err)
	b := make([]byte, 8)
	if n, err := r.Read(b); err != nil || string(b[:n]) != "." {
		t.Errorf("read %q, %v", b[:n], err)
	}
	job.Kill() // releases the pipe
	if n, err := r.Read(b); n != 0 || err == nil {
		t.Errorf("read %d bytes after the end, %v", n, err)
	}
}

func TestAwaitEndsWithItsContext(t *testing.T) {
	m, _, _, _ := selfDebugs(t, "6.12")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(unix.EINTR)
	(&scene{T: t}).want(unix.EINTR, m.Await(ctx, func() bool { return false }))
}

func TestMachineIsSafeForConcurrentUse(t *testing.T) {
	m, job, fd, device := selfDebugs(t, "6.12.103")
	s := &scene{T: t}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s.must(m.Self().Main().Seize(job.PID()))
	var pipe [2]int
	s.must(unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	_, err := device.Enable(job.PID(), enabledMask, pipe[1])
	s.must(err)
	var all sync.WaitGroup
	repeat := func(f func()) {
		all.Go(func() {
			for range 100 {
				f()
			}
		})
	}
	for range 2 {
		thread := job.NewThread()
		repeat(func() {
			if id, err := thread.CreateQueue(fd, gpuA, kfd.QueueTypeComputeAQL); err == nil && id > 20 {
				_ = thread.DestroyQueue(fd, id) // it may wait for an interruption
			}
		})
		repeat(thread.Interrupt)
		repeat(func() {
			snapshot, err := device.Snapshot(job.PID(), kfd.ECQueueNew.Mask())
			var ids []uint32
			for _, q := range snapshot {
				ids = append(ids, q.QueueID)
			}
			if err == nil && len(ids) > 0 {
				_, err = device.Suspend(job.PID(), ids)
			}
			if err == nil {
				_, err = device.ResumeAll(job.PID())
			}
			if err != nil {
				t.Error(err)
			}
		})
		repeat(func() { m.GPU(gpuA); m.Calls(); job.Queues(); m.Processes() })
	}
	all.Wait()
	s.must(device.Disable(job.PID()))
	if got := job.Suspended(); got != nil {
		t.Errorf("suspended: %v", got)
	}
}

func TestSelfAlsoUsesTheRealMachine(t *testing.T) {
	m, job, _, _ := selfDebugs(t, "6.12")
	s := &scene{T: t}
	sys := m.Self().Main()
	var pipe [2]int
	s.must(unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	if n, err := sys.Write(pipe[1], []byte("ab")); n != 2 || err != nil {
		t.Error(n, err)
	}
	if n, err := sys.Read(pipe[0], make([]byte, 4)); n != 2 || err != nil {
		t.Error(n, err)
	}
	s.must(sys.Close(pipe[0]))
	s.must(sys.Close(pipe[1]))
	null, err := sys.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC)
	s.must(err)
	s.must(sys.Close(null))
	if _, err = job.Main().Open("/dev/null", 0); err != unix.ENOENT { //nolint:errorlint // errnos as they come
		t.Errorf("open by a fake process: %v", err)
	}
}

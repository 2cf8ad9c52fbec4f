package driver_test

import (
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// held is hardware whose steps end when the test says so.
type held struct{ atomic.Bool }

func (h *held) step(driver.Step) driver.Outcome { return driver.Outcome{Held: h.Load} }

// session is a debugger and its target, which has a suspended queue.
type session struct {
	t            *testing.T
	d            *driver.Driver
	hw           held
	job, dbg     *task
	jobFD, dbgFD *driver.File
}

func newSession(t *testing.T, profile string) *session {
	t.Helper()
	s := &session{t: t, job: &task{tid: 10}}
	s.dbg = &task{tid: 20, others: map[int32]*task{10: s.job}}
	s.job.tracer = s.dbg
	var err error
	if s.d, err = driver.New(driver.Config{Profile: profile, Nodes: []driver.Node{{ID: 7, GFX: 90402}}}, s.hw.step); err != nil {
		t.Fatal(err)
	}
	if s.jobFD, err = s.d.Open(s.job); err != nil {
		t.Fatal(err)
	}
	if s.dbgFD, err = s.d.Open(s.dbg); err != nil {
		t.Fatal(err)
	}
	s.must(s.job, s.jobFD, kfdabi.ReqRuntimeEnable, 1, 0, 1)
	s.must(s.job, s.jobFD, kfdabi.ReqCreateQueue, 1<<20, 0, 0, 0, 0, 0, 0, 0, 4096, 7, 2, 100)
	s.must(s.dbg, s.dbgFD, kfd.ReqDbgTrap, 10, 0, 0, 0, 64, 0, 16, 5)
	s.must(s.dbg, s.dbgFD, kfd.ReqDbgTrap, 10, 13, 0x40000000, 0, 64, 0, 1, 64)
	s.must(s.dbg, s.dbgFD, kfd.ReqDbgTrap, 10, 6, 0, 0, 32, 0, 1, 0, 0)
	return s
}

func (s *session) call(who *task, f *driver.File, req kfd.Request, args ...uint32) syscall.Errno {
	_, errno := s.d.Ioctl(who, f, req, space{bytes: append(words(args...), make([]byte, 256)...)})
	return errno
}

func (s *session) must(who *task, f *driver.File, req kfd.Request, args ...uint32) {
	s.t.Helper()
	if errno := s.call(who, f, req, args...); errno != 0 {
		s.t.Fatal(errno)
	}
}

// end ends a process, in its own goroutine.
func (s *session) end(who *task, f *driver.File) {
	go func() {
		s.d.MMReleased(who, who.MM())
		s.d.Release(f)
	}()
	synctest.Wait()
}

// finish releases the hardware and checks that no process is left.
func (s *session) finish() {
	s.t.Helper()
	s.hw.Store(false)
	s.d.Wake()
	synctest.Wait()
	for _, p := range s.d.Processes() {
		s.t.Errorf("the driver still has %+v", p)
	}
}

// A target exits while the exit of its debugger resumes it.
func TestTargetAndDebuggerThatExitTogetherEndTheSessionOnce(t *testing.T) {
	for _, profile := range driver.Profiles() {
		t.Run(profile, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSession(t, profile)
				s.hw.Store(true)
				s.end(s.dbg, s.dbgFD)
				s.end(s.job, s.jobFD)
				s.finish()
			})
		})
	}
}

// A target exits during a call of its debugger: the call completes as usual.
func TestTargetThatExitsInACallOfItsDebuggerIsRemovedAfterIt(t *testing.T) {
	for _, profile := range driver.Profiles() {
		t.Run(profile, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSession(t, profile)
				s.hw.Store(true)
				disabled := make(chan syscall.Errno, 1)
				go func() { disabled <- s.call(s.dbg, s.dbgFD, kfd.ReqDbgTrap, 10, 1) }()
				synctest.Wait()
				s.end(s.job, s.jobFD)
				s.hw.Store(false)
				s.d.Wake()
				if errno := <-disabled; errno != 0 {
					t.Errorf("DISABLE of a target that exited meanwhile: %v", errno)
				}
				s.end(s.dbg, s.dbgFD)
				s.finish()
			})
		})
	}
}

package dbgtrap

import (
	"cmp"
	"testing"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// A call that waits for the target's own lock is one thing, and one that waits for a GPU another.
func TestCallThatWaitsForTheTargetsLockIsRecognized(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		waits := f.cfg.WaitsIn
		f.cfg.WaitsIn = func(tid int) string { return cmp.Or(waits(tid), "another_function") }
		j := f.start()
		s := f.attach(j)
		if f.WaitsForTarget(j.key()) {
			t.Error("without a call, it waits for the target")
		}
		release := j.HoldMutex()
		suspended := make(chan error)
		go func() { suspended <- s.Suspend(t.Context(), nil) }()
		f.await("the call waits for the lock", func() bool { return f.WaitsForTarget(j.key()) })
		release()
		f.must("suspend", receive(f, "the suspension", suspended))
		j.wantSuspended()
		f.must("resume", s.Resume(t.Context()))

		hang := f.machine.Hang(driver.TrapOp(kfd.TrapSuspendQueues))
		go func() { suspended <- s.Suspend(t.Context(), nil) }()
		receive(f, "the hang", hang.Reached())
		if f.WaitsForTarget(j.key()) {
			t.Error("a call that waits for the hardware waits for the target")
		}
		hang.Remove()
		f.must("suspend", receive(f, "the suspension", suspended))
	})
}

// An attach waits like that, too: the session is not there yet.
func TestAttachThatWaitsForTheTargetsLockIsRecognized(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		release := j.HoldMutex()
		attached := make(chan *driven)
		go func() { attached <- f.attach(j) }()
		f.await("the call waits for the lock", func() bool { return f.WaitsForTarget(j.key()) })
		release()
		f.must("suspend", receive(f, "the attach", attached).Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

// Where the kernel says nothing, nothing is known.
func TestHiddenWaitIsUnknown(t *testing.T) {
	f := newFixture(t, "6.12", schedulers["HWS"])
	f.cfg.WaitsIn = func(int) string { return "" }
	j := f.start()
	s := f.attach(j)
	release := j.HoldMutex()
	suspended := make(chan error)
	go func() { suspended <- s.Suspend(t.Context(), nil) }()
	f.await("the call waits", func() bool { return s.session.(*session).debuggee.calling.Load() != 0 })
	if f.WaitsForTarget(j.key()) {
		t.Error("it waits for the target, by a kernel that does not say")
	}
	release()
	f.must("suspend", receive(f, "the suspension", suspended))
}

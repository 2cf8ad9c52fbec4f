package dbgtrap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Whatever happens to a target and to the calls: after a suspension that worked everything
// is suspended, until a fault ends the hold, which is reported; after a suspension or a hold that
// one fault made fail, after a resume that worked and after a close nothing is. The daemon closes
// a session whose resume failed.
func TestRandomHistories(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		profile := rapid.SampledFrom([]string{"6.5", "6.12.103", "7.2", "7.3"}).Draw(rt, "profile")
		scheduler := rapid.SampledFrom(slices.Sorted(maps.Keys(schedulers))).Draw(rt, "scheduler")
		newHistory(t, rt, profile, schedulers[scheduler]).run()
	})
}

// history is one random history.
type history struct {
	*fixture
	rt *rapid.T
	j  *job
	d  *debugger
	s  *driven

	suspended bool // as the session was last told, and it said that it worked
	runtime   bool
	faults    []*kfdtest.Injection
}

// check is the test of one history: rapid reports its failure with the seed, and logs
// only that history.
type check struct {
	testing.TB
	rt *rapid.T
}

func (c check) Helper()                           { c.rt.Helper() }
func (c check) Cleanup(f func())                  { c.rt.Cleanup(f) }
func (c check) Context() context.Context          { return c.rt.Context() }
func (c check) Failed() bool                      { return c.rt.Failed() }
func (c check) Fail()                             { c.rt.Fail() }
func (c check) FailNow()                          { c.rt.FailNow() }
func (c check) Log(args ...any)                   { c.rt.Log(args...) }
func (c check) Logf(format string, args ...any)   { c.rt.Logf(format, args...) }
func (c check) Error(args ...any)                 { c.rt.Error(args...) }
func (c check) Errorf(format string, args ...any) { c.rt.Errorf(format, args...) }
func (c check) Fatal(args ...any)                 { c.rt.Fatal(args...) }
func (c check) Fatalf(format string, args ...any) { c.rt.Fatalf(format, args...) }

func newHistory(t *testing.T, rt *rapid.T, profile string, gfx uint32) *history {
	h := &history{fixture: newFixture(check{t, rt}, profile, gfx), rt: rt}
	h.j, h.d = h.start(), h.debugger()
	h.runtime = true
	return h
}

func (h *history) run() {
	defer func() { // after a failure
		if h.s != nil {
			_ = h.s.Close()
		}
	}()
	for range rapid.IntRange(1, 25).Draw(h.rt, "steps") {
		if h.s == nil {
			h.attachNow()
		}
		steps := map[string]func(){
			"suspend": h.suspendNow, "resume": h.resumeNow, "create": h.createNow, "destroy": h.destroyNow,
			"restart the runtime": h.restartNow, "fault": h.faultNow, "steal": h.stealNow, "disable": h.disableNow,
			"close": h.closeNow, "exec": h.execNow,
		}
		name := rapid.SampledFrom(slices.Sorted(maps.Keys(steps))).Draw(h.rt, "step")
		steps[name]()
		h.closeIfLost()
	}
	h.healAll()
	if h.s != nil {
		h.closeNow()
	}
	h.await("the target is free", func() bool { s, _ := h.j.KFD(); return !s.Enabled && h.j.allRun() })
	h.j.kill()
}

func (h *history) healAll() {
	for _, i := range h.faults {
		i.Remove()
	}
	h.faults = nil
}

func (h *history) attachNow() {
	h.healAll()
	s, err := h.Attach(h.t.Context(), h.j.key())
	if err != nil {
		h.rt.Fatalf("attach: %v", err)
	}
	h.s, h.suspended = s, false
}

func (h *history) suspendNow() {
	before := h.struck()
	err := h.s.Suspend(h.t.Context(), nil)
	h.suspended = err == nil
	switch {
	case err == nil:
		h.await("everything is suspended, or a fault has ended the hold and everything runs", func() bool {
			struck := h.struck() - before // what was born before is perhaps looked at only now
			return h.j.allSuspended() || len(h.lost) > 0 && (struck == 1 && h.j.allRun() || struck > 1)
		})
	case h.struck() <= before+1: // no second fault kept it from being undone
		h.await(fmt.Sprintf("everything runs after %v", err), h.j.allRun)
		if final(err) {
			h.closeNow()
		}
	default:
		h.closeNow()
	}
}

// resumeNow resumes, again after a failure; a fault strikes once.
func (h *history) resumeNow() {
	err := h.s.Resume(h.t.Context())
	h.suspended = false
	for range h.faults {
		if err == nil || final(err) {
			break
		}
		err = h.s.Resume(h.t.Context())
	}
	if err != nil {
		h.closeNow()
		return
	}
	h.await("everything runs", h.j.allRun)
}

// struck counts how often faults have struck.
func (h *history) struck() (n int) {
	for _, i := range h.faults {
		n += i.Hits()
	}
	return n
}

func (h *history) createNow() {
	if !h.runtime || len(h.j.Queues()) > 12 {
		return
	}
	kind := rapid.SampledFrom([]uint32{kfd.QueueTypeComputeAQL, kfd.QueueTypeSDMA}).Draw(h.rt, "kind")
	gpu := rapid.SampledFrom([]gpreempt.GPUID{gpuA, gpuB}).Draw(h.rt, "gpu")
	h.j.create(gpu, kind)
	h.settle()
}

// settle waits until the session has caught up with what happened.
func (h *history) settle() {
	if h.suspended {
		h.await("what was born is suspended, or the hold has ended", func() bool {
			return h.j.allSuspended() || len(h.lost) > 0
		})
	}
}

func (h *history) destroyNow() {
	if h.suspended || len(h.j.Queues()) == 0 {
		return // it would wait
	}
	h.j.destroy(rapid.SampledFrom(slices.Sorted(maps.Keys(h.j.Queues()))).Draw(h.rt, "queue"))
}

// restartNow is a runtime that ends and begins again. Faults are removed
// first: a target that gets no answer for a time may wait for ever, in the real driver too.
func (h *history) restartNow() {
	h.healAll()
	h.resumeNow()
	if h.s == nil {
		return
	}
	for id := range h.j.Queues() {
		h.j.destroy(id)
	}
	h.j.disable()
	h.j.enable()
}

func (h *history) faultNow() {
	fault := kfdtest.Fault{Caller: h.machine.Self(), Nth: rapid.IntRange(1, 3).Draw(h.rt, "nth")}
	op := rapid.SampledFrom(used).Draw(h.rt, "op")
	switch rapid.IntRange(0, 2).Draw(h.rt, "fault") {
	case 0:
		fault.Errno = unix.EINTR
		fault.Stage = rapid.SampledFrom([]kfdtest.Stage{kfdtest.Before, kfdtest.After}).Draw(h.rt, "stage")
	case 1:
		fault.Errno = rapid.SampledFrom([]unix.Errno{unix.EFAULT, unix.ENOMEM}).Draw(h.rt, "errno")
	case 2:
		// A GPU that fails in ENABLE or DISABLE may stay reserved for debugging.
		op = rapid.SampledFrom([]kfd.TrapOp{kfd.TrapSuspendQueues, kfd.TrapResumeQueues}).Draw(h.rt, "op on queues")
		fault.Errno, fault.Stage = unix.EIO, kfdtest.Hardware
		fault.GPU = rapid.SampledFrom([]gpreempt.GPUID{gpuA, gpuB}).Draw(h.rt, "gpu")
	}
	fault.Op = driver.TrapOp(op)
	h.faults = append(h.faults, h.machine.Inject(fault))
}

// stealNow has another debugger try to debug the target, and give up.
func (h *history) stealNow() {
	if err := h.d.Main().Seize(h.j.PID()); err != nil {
		return // it is traced, or being traced
	}
	_, w, err := h.d.Main().Pipe(true)
	h.must("pipe", err)
	_, err = h.d.device.Enable(h.j.PID(), subscribed, w)
	h.d.detach(h.j)
	if err == nil { // the session has ended
		h.must("disable", h.d.device.Disable(h.j.PID()))
	} else if !errors.Is(err, unix.EALREADY) {
		h.rt.Fatalf("the other's ENABLE: %v", err)
	}
}

// disableNow has another program end the debugging, where it may.
func (h *history) disableNow() {
	h.stealNow()
	_ = h.d.device.Disable(h.j.PID()) // it may not
	h.await("the session has dealt with it", func() bool {
		s, _ := h.j.KFD()
		return s.Enabled || len(h.lost) > 0
	})
	h.closeIfLost()
	if h.s != nil {
		h.resumeNow()
	}
}

func (h *history) closeIfLost() {
	select {
	case <-h.lost:
		if h.s != nil {
			h.closeNow()
		}
	default:
	}
}

func (h *history) closeNow() {
	if err := h.s.Close(); err != nil {
		h.await("the target is released later", func() bool { return h.held() == 0 })
	}
	h.await("the target is free", func() bool { s, _ := h.j.KFD(); return !s.Enabled && h.j.allRun() })
	h.s = nil
}

func (h *history) execNow() {
	h.j.exec()
	h.closeNow()
	h.j.open()
	h.j.enable()
}

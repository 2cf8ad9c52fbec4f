package kmap

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestAllTargetsOfACallAreOneRunlistForEachGPU(t *testing.T) {
	inWorld(t, driver.KmapProfile, hws, func(w *world) {
		var jobs []*kfdtest.Process
		for range 8 {
			jobs = append(jobs, w.job(gpuA, gpuB))
		}
		sessions := w.attach(jobs...)
		w.wantHeld(false, jobs...)
		before := w.machine.GPU(gpuA)
		for n := 1; n <= 3; n++ {
			w.wantErrors(w.SuspendAll(w.Context(), sessions), make([]error, 8)...)
			w.wantHeld(true, jobs...)
			w.wantErrors(w.SuspendAll(w.Context(), sessions), make([]error, 8)...) // no effect
			w.wantErrors(w.ResumeAll(w.Context(), sessions), make([]error, 8)...)
			w.wantHeld(false, jobs...)
			after := w.machine.GPU(gpuA)
			if unmaps, maps := after.Unmaps-before.Unmaps, after.Maps-before.Maps; unmaps != n || maps != n {
				t.Errorf("%d unmaps and %d maps after %d suspends of 8 processes", unmaps, maps, n)
			}
		}
		for _, s := range sessions {
			w.must(s.Close())
			w.must(s.Close())
		}
		if n := len(w.sessions.All()); n != 0 {
			t.Errorf("%d sessions are left", n)
		}
	})
}

func TestQueueBornWhileItsProcessIsSuspendedDoesNotRun(t *testing.T) {
	inWorld(t, driver.KmapProfile, hws, func(w *world) {
		p := w.job(gpuA)
		s := w.attach(p)[0].(*session)
		changed := func() bool {
			r, err := s.Handle(w.Context())
			w.must(err)
			return r.Changed
		}
		if changed() {
			t.Error("the queues that were there before are reported as new")
		}
		done := false
		w.must(s.Suspend(w.Context(), func() { done = true; w.wantHeld(true, p) }))
		if !done {
			t.Error("the end of the suspension was not reported")
		}
		_, err := p.Main().CreateQueue(fdOf(w, p), gpuB, kfd.QueueTypeComputeAQL)
		w.must(err)
		w.wantHeld(true, p)
		w.must(s.Resume(w.Context()))
		w.wantHeld(false, p)
		if !changed() {
			t.Error("the new queue is not reported")
		}
		w.must(s.Close())
	})
}

// A daemon that hangs holds nothing, and suspends again when it works again.
func TestLeaseEndsWithTheBeats(t *testing.T) {
	inWorld(t, driver.KmapProfile, hws, func(w *world) {
		p, q, idle := w.job(gpuA), w.job(gpuB), w.job(gpuA)
		sessions := w.attach(p, q, idle)
		w.wantErrors(w.SuspendAll(w.Context(), sessions[:2]), nil, nil)
		w.beats(time.Minute)
		w.wantHeld(true, p, q)
		time.Sleep(Lease)
		w.wantHeld(false, p, q)
		w.Beat()
		synctest.Wait()
		for i, want := range []mechanism.Running{mechanism.Lapsed, mechanism.Lapsed, mechanism.NotRunning} {
			s := sessions[i].(*session)
			if len(s.Events()) > 0 != (want == mechanism.Lapsed) {
				t.Errorf("session %d has %d events", i, len(s.Events()))
			}
			if r, err := s.Handle(w.Context()); r.Running != want || err != nil {
				t.Errorf("session %d: running %v, error %v", i, r.Running, err)
			}
			if r, err := s.Handle(w.Context()); r.Running != mechanism.NotRunning || err != nil {
				t.Errorf("session %d reports it twice: %v, %v", i, r.Running, err)
			}
		}
		w.wantErrors(w.SuspendAll(w.Context(), sessions[:2]), nil, nil)
		w.wantHeld(true, p, q)
		time.Sleep(2 * Lease)
		w.must(sessions[0].Suspend(w.Context(), nil)) // the first call after the lapse is about one of them
		w.wantHeld(true, p)
		w.wantHeld(false, q)
		for i, want := range []mechanism.Running{mechanism.NotRunning, mechanism.Lapsed} {
			if r, _ := sessions[i].(*session).Handle(w.Context()); r.Running != want {
				t.Errorf("session %d: running %v after a suspend of the first, want %v", i, r.Running, want)
			}
		}
		for _, s := range sessions {
			w.must(s.Close())
		}
	})
}

// A suspension that takes longer than the lease is made again, or fails.
func TestGPUThatTakesLongerThanTheLease(t *testing.T) {
	slow := func(gpu gpreempt.GPUID, errno unix.Errno) kfdtest.Fault {
		return kfdtest.Fault{Op: "KMAP_SET", Stage: kfdtest.Hardware, Step: driver.StepUnmap, GPU: gpu, Hold: true, Errno: errno}
	}
	for name, tc := range map[string]struct {
		faults []kfdtest.Fault
		takes  time.Duration
		after  time.Duration // until the next call
		want   [2]error      // of a process on each GPU
		times  int           // the first GPU suspends
	}{
		"fast":                  {times: 1},
		"longer":                {faults: []kfdtest.Fault{slow(gpuA, 0)}, takes: Lease + time.Second, after: 1, times: 2},
		"shorter":               {faults: []kfdtest.Fault{slow(gpuA, 0)}, takes: Lease - time.Millisecond, times: 1},
		"shorter, renewed late": {faults: []kfdtest.Fault{slow(gpuA, 0)}, takes: Lease - 1, after: 2, times: 2},
		"the other GPU hangs": {
			faults: []kfdtest.Fault{slow(gpuB, unix.ETIME)}, takes: 9 * time.Second, after: 1, want: [2]error{nil, unix.EIO}, times: 2,
		},
		"longer each time": {
			faults: []kfdtest.Fault{slow(gpuA, 0), slow(gpuA, 0)}, takes: Lease + time.Second, after: 1, want: [2]error{errSlow, errSlow}, times: 2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, driver.KmapProfile, hws, func(w *world) {
				jobs := []*kfdtest.Process{w.job(gpuA), w.job(gpuB)}
				sessions := w.attach(jobs...)
				before := w.machine.GPU(gpuA).Unmaps
				for _, f := range tc.faults {
					hang := w.machine.Inject(f)
					go func() {
						<-hang.Reached()
						time.Sleep(tc.takes)
						hang.Release()
					}()
				}
				w.machine.Inject(kfdtest.Fault{Op: "KMAP_SET", Nth: 2, Do: func() { time.Sleep(tc.after) }})
				w.wantErrors(w.SuspendAll(w.Context(), sessions), tc.want[:]...)
				for range 5 {
					for i, p := range jobs {
						w.wantHeld(tc.want[i] == nil, p)
					}
					w.beats(BeatEvery)
				}
				if n := w.machine.GPU(gpuA).Unmaps - before; n != tc.times {
					t.Errorf("%d suspensions of the first GPU, want %d", n, tc.times)
				}
			})
		})
	}
}

// A process that cannot be released hides no end of another, and is not kept suspended.
func TestProcessThatCannotBeReleased(t *testing.T) {
	for name, suspend := range map[string]func(w *world, s mechanism.Session){
		"after a failure": func(w *world, s mechanism.Session) {
			hardware := w.machine.FailGPU("KMAP_SET", gpuB, unix.ETIME)
			w.machine.Inject(kfdtest.Fault{Op: "KMAP_SET", Nth: 2, Errno: unix.ENOMEM})
			w.wantErrors([]error{s.Suspend(w.Context(), nil)}, unix.EIO)
			hardware.Remove()
		},
		"in a resume": func(w *world, s mechanism.Session) {
			w.must(s.Suspend(w.Context(), nil))
			w.machine.Inject(kfdtest.Fault{Op: "KMAP_SET", Errno: unix.ENOMEM})
			w.wantErrors([]error{s.Resume(w.Context())}, unix.ENOMEM)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, driver.KmapProfile, hws, func(w *world) {
				other, stuck := w.job(gpuA), w.job(gpuB)
				sessions := w.attach(other, stuck)
				w.must(sessions[0].Suspend(w.Context(), nil))
				suspend(w, sessions[1])
				other.Kill()
				w.beats(2 * BeatEvery)
				if _, err := sessions[0].(*session).Handle(w.Context()); !errors.Is(err, mechanism.ErrGone) {
					t.Errorf("error %v of a process that has exited", err)
				}
				for id, q := range stuck.Queues() {
					if !q.Held {
						t.Errorf("queue %d of the process that cannot be released is not held", id)
					}
				}
				w.beats(Lease)
				w.wantHeld(false, stuck)
				for _, s := range sessions {
					w.must(s.Close())
				}
			})
		})
	}
}

func TestTargetThatEndsOrReplacesItsProgramIsReported(t *testing.T) {
	for name, tc := range map[string]struct {
		end  func(*kfdtest.Process)
		want error
	}{
		"exit": {(*kfdtest.Process).Kill, mechanism.ErrGone},
		"exec": {(*kfdtest.Process).Exec, mechanism.ErrReplaced},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, driver.KmapProfile, hws, func(w *world) {
				p, other := w.job(gpuA), w.job(gpuA)
				sessions := w.attach(p, other)
				w.wantErrors(w.SuspendAll(w.Context(), sessions), nil, nil)
				tc.end(p)
				if !p.Dead() {
					w.queues(p, gpuA) // of the new program
				}
				w.wantHeld(false, p)
				w.beats(Lease)
				if r, err := sessions[0].(*session).Handle(w.Context()); r.Running != mechanism.NotRunning || !errors.Is(err, tc.want) {
					t.Errorf("running %v, error %v, want %v", r.Running, err, tc.want)
				}
				if r, err := sessions[1].(*session).Handle(w.Context()); r.Running != mechanism.NotRunning || err != nil {
					t.Errorf("the other: running %v, error %v", r.Running, err)
				}
				w.wantHeld(true, other)
				w.wantHeld(false, p)
				for _, s := range sessions {
					w.must(s.Close())
				}
				w.wantHeld(false, other)
			})
		})
	}
}

func TestFailureOfOneTargetHarmsNoOtherOfItsCall(t *testing.T) {
	for name, tc := range map[string]struct {
		harm func(w *world, p *kfdtest.Process)
		want error
		gpus []gpreempt.GPUID
	}{
		"gone":     {func(_ *world, p *kfdtest.Process) { p.Kill() }, mechanism.ErrGone, nil},
		"replaced": {func(_ *world, p *kfdtest.Process) { p.Exec() }, mechanism.ErrReplaced, nil},
		"hardware": {func(w *world, _ *kfdtest.Process) { w.machine.FailGPU("KMAP_SET", gpuB, unix.ETIME) }, unix.EIO, []gpreempt.GPUID{gpuB}},
		"another program": {func(w *world, p *kfdtest.Process) {
			k, err := kfd.OpenKmapWith(w.daemon.Main(), kfd.KmapPath)
			w.must(err)
			fd, err := w.daemon.Main().PidfdOpen(p.PID())
			w.must(err)
			_, err = k.Set([]kfd.KmapTarget{{PIDFD: fd, Limit: 5}}, time.Minute, 0)
			w.must(err)
		}, unix.EBUSY, nil},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, driver.KmapProfile, hws, func(w *world) {
				good, bad, last := w.job(gpuA), w.job(gpuA, gpuB), w.job(gpuA)
				sessions := w.attach(good, bad, last)
				tc.harm(w, bad)
				errs := w.SuspendAll(w.Context(), sessions)
				w.wantErrors(errs, nil, tc.want, nil)
				hardware, _ := errors.AsType[*mechanism.HardwareError](errs[1])
				if (hardware == nil) != (tc.gpus == nil) || hardware != nil && !cmp.Equal(tc.gpus, hardware.GPUs) {
					t.Errorf("hardware error %v, want GPUs %v", hardware, tc.gpus)
				}
				w.wantHeld(true, good, last)
				for id, q := range bad.Queues() {
					if q.Held {
						t.Errorf("queue %d of the target that failed is held", id)
					}
				}
				w.wantErrors(w.ResumeAll(w.Context(), sessions[:1]), nil)
			})
		})
	}
}

// No other target shows which of the GPUs works.
func TestOnlyTheGPUThatFailedIsNamed(t *testing.T) {
	inWorld(t, driver.KmapProfile, hws, func(w *world) {
		s := w.attach(w.job(gpuA, gpuB))[0]
		w.machine.FailGPU("KMAP_SET", gpuB, unix.ETIME)
		err := s.Suspend(w.Context(), nil)
		hardware, is := errors.AsType[*mechanism.HardwareError](err)
		if !is || !cmp.Equal(hardware.GPUs, []gpreempt.GPUID{gpuB}) {
			t.Errorf("got %v, want GPU %v", err, gpuB)
		}
	})
}

func TestSuspensionWhoseCallerHasGivenUpIsUndone(t *testing.T) {
	inWorld(t, driver.KmapProfile, hws, func(w *world) {
		p, q := w.job(gpuA), w.job(gpuA)
		sessions := w.attach(p, q)
		gaveUp := errors.New("gave up")
		ctx, cancel := context.WithCancelCause(w.Context())
		w.machine.Inject(kfdtest.Fault{Op: "KMAP_SET", Do: func() { cancel(gaveUp) }})
		w.wantErrors(w.SuspendAll(ctx, sessions), gaveUp, gaveUp)
		w.wantHeld(false, p, q)
		calls := len(w.machine.Calls())
		w.wantErrors(w.SuspendAll(ctx, sessions), gaveUp, gaveUp)
		if n := len(w.machine.Calls()) - calls; n != 0 {
			t.Errorf("%d calls after the caller has given up", n)
		}
	})
}

func TestProbeSaysWhatToDo(t *testing.T) {
	for name, tc := range map[string]struct {
		profile string
		gfx     uint32
		prepare func(w *world)
		want    mechanism.Evidence
	}{
		"usable": {driver.KmapProfile, hws, func(*world) {}, mechanism.Evidence{Check: "kfd_kmap", Found: "ABI 1.0", OK: true}},
		"missing": {"6.12", hws, func(*world) {}, mechanism.Evidence{
			Check: "kfd_kmap", Found: (&kfd.Error{Op: "open /dev/kfd_kmap", Errno: unix.ENOENT}).Error(), Remedy: remedies[kfd.KmapMissing],
		}},
		"denied": {driver.KmapProfile, hws, func(w *world) { w.daemon.SetCaps() }, mechanism.Evidence{
			Check: "kfd_kmap", Found: (&kfd.Error{Op: "open /dev/kfd_kmap", Errno: unix.EPERM}).Error(), Remedy: remedies[kfd.KmapDenied],
		}},
		"something else": {driver.KmapProfile, hws, func(w *world) { w.machine.Fail("KMAP_INFO", w.daemon, unix.ENOTTY, true) }, mechanism.Evidence{
			Check: "kfd_kmap", Found: (&kfd.Error{Op: "KMAP_INFO", Errno: unix.ENOTTY}).Error(), Remedy: remedies[kfd.KmapForeign],
		}},
		"MES": {driver.KmapProfile, mes, func(*world) {}, mechanism.Evidence{
			Check: "runlist", Found: "GPU 1000 (first) has none: its firmware is MES, or does not schedule",
			Remedy: "let another mechanism hold the process: name one after kmap in the config key mechanisms",
		}},
		"exited": {driver.KmapProfile, hws, func(w *world) { clear(w.cfg.Host.(*pidfds).all) }, mechanism.Evidence{Check: "process", Found: "it has exited"}},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, tc.profile, tc.gfx, func(w *world) {
				p := w.job(gpuA)
				tc.prepare(w)
				before := len(w.daemon.FDs())
				c := w.Probe(w.Context(), p.Key())
				if c.Usable() != tc.want.OK {
					t.Errorf("usable: %v", c.Usable())
				}
				if diff := cmp.Diff(tc.want, c.Evidence[len(c.Evidence)-1]); diff != "" {
					t.Errorf("evidence (-want +got):\n%s", diff)
				}
				if n := len(w.daemon.FDs()) - before; n > 1 {
					t.Errorf("%d descriptors are left open", n)
				}
				w.wantHeld(false, p)
			})
		})
	}
}

// A child of the daemon that has its handle holds nothing for longer than the lease, and a
// program that the daemon becomes has none.
func TestHandleDoesNotOutliveTheDaemon(t *testing.T) {
	for name, tc := range map[string]struct {
		end  func(w *world)
		held time.Duration
	}{
		"kill":           {func(w *world) { w.daemon.Kill() }, 0},
		"exec":           {func(w *world) { w.daemon.Exec() }, 0},
		"fork, then die": {func(w *world) { w.daemon.Fork(); w.daemon.Kill() }, Lease},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, driver.KmapProfile, hws, func(w *world) {
				p := w.job(gpuA, gpuB)
				w.wantErrors(w.SuspendAll(w.Context(), w.attach(p)), nil)
				w.wantHeld(true, p)
				tc.end(w)
				time.Sleep(tc.held)
				w.wantHeld(false, p)
			})
		})
	}
}

// A call for the processes of one GPU does not return: those of another are suspended, resumed and kept
// suspended, also by a batch with one of the first.
func TestACallThatHangsHoldsUpTheProcessesOfItsGPUsOnly(t *testing.T) {
	inWorld(t, driver.KmapProfile, hws, func(w *world) {
		hung, first, second := w.job(gpuB), w.job(gpuA), w.job(gpuA)
		w.gpus = map[gpreempt.ProcessKey][]gpreempt.GPU{hung.Key(): {{ID: gpuB}}}
		sessions := w.attach(hung, first, second)
		w.wantErrors(w.SuspendAll(w.Context(), sessions), nil, nil, nil)
		hangs, release := make(chan struct{}), make(chan struct{})
		w.before = func(targets int) {
			if targets == 1 {
				close(hangs)
				<-release
			}
		}
		results := make([]chan error, 3)
		for i := range results {
			results[i] = make(chan error, 1)
		}
		go w.ResumeEach(w.Context(), sessions, func(i int, err error) { results[i] <- err })
		testutil.Receive(t, hangs, "the call")
		for i := range 2 {
			w.must(testutil.Receive(t, results[i+1], "the result for a process of the other GPU"))
		}
		w.wantHeld(false, first, second)
		w.wantErrors(w.SuspendAll(w.Context(), sessions[1:]), nil, nil)
		w.beats(2 * Lease)
		w.wantHeld(true, first, second)
		close(release)
		w.must(testutil.Receive(t, results[0], "the end of the call"))
		w.wantHeld(false, hung)
	})
}

package kfdtest_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The drivers whose SUSPEND_QUEUES flushes the TLB of later GPUs.
var flushing = []string{"6.12.117", "7.2", "7.3"}

// TestSuspendCrashesWithoutALaterVM holds when suspend_queues uses the VM of a GPU: on those
// after the first with a suspended queue, in the driver's order, and not before.
func TestSuspendCrashesWithoutALaterVM(t *testing.T) {
	for name, tc := range map[string]struct {
		own       bool // the only VM is that of the queue's GPU
		queue     gpreempt.GPUID
		suspended int
		crashes   bool
	}{
		"queue on the first GPU, VM there only": {true, gpuA, 1, true},
		"queue on the last GPU, VM there only":  {true, gpuB, 1, false},
		"VM on both":                            {false, gpuA, 1, false},
		"nothing suspended":                     {true, gpuA, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, profile := range driver.Profiles() {
				for _, gfx := range []uint32{hws, single, mes} {
					stageOf(t, kfdtest.Config{Profile: profile, OwnVMs: tc.own}, gfx, func(s *scene) {
						ids := s.suspendable(tc.queue)
						s.suspend(ids[:tc.suspended]...)
						crashes := tc.crashes && slices.Contains(flushing, profile)
						if got := len(s.oopses) > 0; got != crashes {
							s.Errorf("%s, GFX %d: crashes: %v, want %v: %q", profile, gfx, got, crashes, s.oopses)
						}
						s.oopses = nil
					})
				}
			}
		})
	}
}

func TestVMsAreListedInTheDriversOrder(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		s.acquire(gpuB)
		one, _ := s.job.KFD()
		s.acquire(gpuA)
		both, _ := s.job.KFD()
		got := [][]gpreempt.GPUID{one.VMs, both.VMs}
		if diff := cmp.Diff([][]gpreempt.GPUID{{gpuB}, {gpuA, gpuB}}, got); diff != "" {
			s.Errorf("VMs (-want +got):\n%s", diff)
		}
	})
}

// TestEndOfATargetWritesToItsRefusedDebugger holds when kfd_dbg_trap_disable uses memory that
// the driver has freed: after the end of a debugger that took the right by a refused ENABLE.
func TestEndOfATargetWritesToItsRefusedDebugger(t *testing.T) {
	for name, tc := range map[string]struct {
		refused, exits, corrupts bool
	}{
		"debugger exits":                        {false, true, false},
		"refused debugger stays":                {true, false, false},
		"refused debugger exits":                {true, true, true},
		"nobody refused, and nobody has exited": {false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			onProfiles(t, hws, func(s *scene) {
				s.enable()
				s.must(s.dbg.Main().Detach(s.job.PID()))
				last := s.dbg
				if tc.refused {
					last = s.m.Spawn()
					device := s.open(last)
					_, w, err := last.Main().Pipe(true)
					s.must(err)
					s.must(last.Main().Seize(s.job.PID()))
					_, err = device.Enable(s.job.PID(), enabledMask, w)
					s.want(unix.EALREADY, err)
				}
				if tc.exits {
					last.Kill()
				}
				s.job.Kill()
				if corrupts := len(s.oopses) > 0; corrupts != tc.corrupts {
					s.Errorf("corrupts memory: %v, want %v: %q", corrupts, tc.corrupts, s.oopses)
				}
				s.oopses = nil
			})
		})
	}
}

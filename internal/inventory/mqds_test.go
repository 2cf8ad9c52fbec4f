package inventory_test

import (
	"errors"
	"io/fs"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestDumpsAreReadLessOftenWhileNothingChangesOrReadingIsSlow(t *testing.T) {
	for name, test := range map[string]struct {
		slow     time.Duration
		min, max int
	}{"fast": {0, 20, 27}, "slow": {2 * time.Second, 4, 9}, "late": {time.Minute, 2, 2}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFakeHost(t)
				w.start(7, 0)
				w.put(mqdsFile, "Process 7 PASID 7:\n"+mqd(0x7f0000100000, 0, 7))
				w.with(func() { w.slow[mqdsFile] = test.slow })
				w.run()
				time.Sleep(10 * time.Minute)
				if n := w.readings(); n < test.min || n > test.max {
					t.Errorf("%d readings in 10 quiet minutes, want %d to %d", n, test.min, test.max)
				}
			})
		})
	}
}

func TestDumpsWaitForSuspensionsForALimitedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.put(mqdsFile, "")
		w.with(func() { w.busy = true })
		w.run()
		time.Sleep(1900 * time.Millisecond)
		if n := w.readings(); n != 0 {
			t.Errorf("%d readings while leases are held, want none within 2 s", n)
		}
		time.Sleep(time.Second)
		if n := w.readings(); n != 1 {
			t.Errorf("%d readings after 3 s, want 1", n)
		}
	})
}

func TestDumpsThatHangDoNotDelayScans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.with(func() { w.slow[mqdsFile] = 5 * time.Minute })
		w.run()
		time.Sleep(time.Minute)
		if n := w.readings(); n != 1 {
			t.Errorf("%d readings under way, want 1", n)
		}
		w.create(7, 1)
		time.Sleep(2 * time.Second)
		if got := len(w.rings()); got != 2 {
			t.Errorf("%d queues known, want 2", got)
		}
		w.with(func() { delete(w.slow, mqdsFile) })
		time.Sleep(5 * time.Minute) // until it ends
	})
}

func TestDumpsThatCannotBeReadAreAWarning(t *testing.T) {
	for code, err := range map[string]error{
		"DEBUGFS_MISSING": fs.ErrNotExist, "DEBUGFS_DENIED": fs.ErrPermission, "MQDS_UNREADABLE": errors.New("input/output error"),
	} {
		t.Run(code, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFakeHost(t)
				w.start(7, 0)
				w.put(mqdsFile, "")
				w.with(func() { w.refused[mqdsFile] = err })
				w.run()
				time.Sleep(time.Second)
				got := locked(w, func() []gpreempt.Warning { return w.warnings["mqds"] })
				if len(got) != 1 || got[0].Code != code || got[0].Remedy == "" {
					t.Errorf("warnings %+v, want %s", got, code)
				}
				w.with(func() { delete(w.refused, mqdsFile) })
				time.Sleep(time.Minute)
				if got := locked(w, func() []gpreempt.Warning { return w.warnings["mqds"] }); len(got) != 0 {
					t.Errorf("warnings %+v although it can be read again", got)
				}
			})
		})
	}
}

func TestDumpsAreNotReadWithoutAnInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.with(func() { w.intervals.Debugfs = false })
		w.start(7, 0)
		w.run()
		time.Sleep(5 * time.Minute)
		if n := w.readings(); n != 0 {
			t.Errorf("%d readings, want none", n)
		}
	})
}

func TestCertainInfoOfAQueueStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.put(mqdsFile, "Process 7 PASID 7:\n"+mqd(0x7f0000100000, 0, 7))
		w.run()
		time.Sleep(2 * time.Second)
		// A second one of the same size: the first one is known, which distinguishes them.
		w.create(7, 5)
		w.put(kfdDir+"proc/7/queues/5/size", "4096")
		w.put(mqdsFile, "Process 7 PASID 7:\n"+mqd(0x7f0000200000, 0, 7)+mqd(0x7f0000100000, 0, 7))
		time.Sleep(5 * time.Second)
		if diff := cmp.Diff(map[string]uint64{"7/0": 0x7f0000100000, "7/5": 0x7f0000200000}, w.rings()); diff != "" {
			t.Errorf("rings (-want +got):\n%s", diff)
		}
		w.put(mqdsFile, "")
		time.Sleep(time.Minute)
		if diff := cmp.Diff(map[string]uint64{"7/0": 0x7f0000100000, "7/5": 0x7f0000200000}, w.rings()); diff != "" {
			t.Errorf("rings after a dump without them (-want +got):\n%s", diff)
		}
	})
}

func TestADumpIsNotUsedForALaterProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.put(mqdsFile, "Process 7 PASID 7:\n"+mqd(0x7f0000100000, 0, 7))
		w.with(func() { w.slow[mqdsFile] = time.Second })
		w.run()
		time.Sleep(200 * time.Millisecond) // mqds is being read
		w.put("proc/7/stat", "7 (train) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 999 0 0\n")
		time.Sleep(time.Second)
		if diff := cmp.Diff(map[string]uint64{"7/0": 0}, w.rings()); diff != "" {
			t.Errorf("rings (-want +got):\n%s", diff)
		}
		w.with(func() { delete(w.slow, mqdsFile) })
		time.Sleep(2 * time.Minute)
		if diff := cmp.Diff(map[string]uint64{"7/0": 0x7f0000100000}, w.rings()); diff != "" {
			t.Errorf("rings when it was read again (-want +got):\n%s", diff)
		}
	})
}

func TestADumpWithoutAQueueRemovesNoInfo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		key := w.start(7, 0)
		const ring = 0x7f0000100000
		w.with(func() {
			w.snapshots[key] = map[uint32]gpreempt.QueueInfo{0: {Source: gpreempt.FromSnapshot, RingBase: ring, AQL: true}}
		})
		w.put(mqdsFile, "Process 7 PASID 7:\n"+mqd(ring, 0, 7))
		w.run()
		time.Sleep(5 * time.Second)
		before := w.inventory.QueuesOf(key)[0].Info
		if both := gpreempt.FromSnapshot | gpreempt.FromMQD; before.Source != both || !before.PriorityKnown || before.MQD == 0 {
			t.Fatalf("known at first: %+v", before)
		}
		w.put(mqdsFile, "")
		time.Sleep(time.Minute)
		after := w.inventory.QueuesOf(key)[0].Info
		after.Note = before.Note // it says that the dump does not have it
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("after a dump without it (-before +after):\n%s", diff)
		}
	})
}

// Without Run, one reading has what Run finds, and says what it could not read.
func TestReadOnceKnowsPrioritiesOrSaysWhyNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		key := w.start(7, 0)
		w.put(mqdsFile, "Process 7 PASID 7:\n"+mqd(0x7f0000100000, 0, 7))
		if err := w.ReadOnce(); err != nil {
			t.Fatal(err)
		}
		info := w.inventory.QueuesOf(key)[0].Info
		if !info.PriorityKnown || info.Priority != 7 || info.RingBase != 0x7f0000100000 {
			t.Errorf("the queue: %+v", info)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		key := w.start(7, 0)
		if err := w.ReadOnce(); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("without debugfs: %v", err)
		}
		if queues := w.inventory.QueuesOf(key); len(queues) != 1 || queues[0].Info.PriorityKnown {
			t.Errorf("the queues without debugfs: %+v", queues)
		}
	})
}

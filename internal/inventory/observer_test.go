package inventory_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zaptest"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

const gpu gpreempt.GPUID = 63420

// fakeHost is a host's files, and all that an Observer says and asks of the rest.
type fakeHost struct {
	t *testing.T

	mu    sync.Mutex // guards all below
	files fstest.MapFS
	// opened counts what was opened, slow how long that takes, refused what fails.
	opened  map[string]int
	slow    map[string]time.Duration
	refused map[string]error

	intervals inventory.Intervals
	busy      bool
	snapshots map[gpreempt.ProcessKey]map[uint32]gpreempt.QueueInfo
	warnings  map[string][]gpreempt.Warning
	diffs     []inventory.Diff
	told      []int32
	events    map[gpreempt.GPUID][]kfd.SMIEvent
	smiErr    error
	open      int // event streams

	inventory *inventory.Inventory
	*inventory.Observer
}

const kfdDir = "sys/class/kfd/kfd/"

func newFakeHost(t *testing.T) *fakeHost {
	w := &fakeHost{
		t: t, files: fstest.MapFS{}, opened: map[string]int{}, slow: map[string]time.Duration{}, refused: map[string]error{},
		intervals: inventory.Intervals{Shortest: 50 * time.Millisecond, Longest: time.Second, MQDs: time.Second},
		snapshots: map[gpreempt.ProcessKey]map[uint32]gpreempt.QueueInfo{},
		warnings:  map[string][]gpreempt.Warning{}, events: map[gpreempt.GPUID][]kfd.SMIEvent{},
		inventory: inventory.New(1024),
	}
	w.inventory.SetGPUs([]gpreempt.GPU{{ID: gpu, GFX: 90402, XCCs: 1}})
	w.put(kfdDir+"proc/.keep", "")
	w.Observer = inventory.NewObserver(inventory.Config{
		Root: w, FS: discovery.NewFS(w), Inventory: w.inventory,
		Intervals: func() inventory.Intervals { return locked(w, func() inventory.Intervals { return w.intervals }) },
		Before:    func() {},
		Scanned:   func(d inventory.Diff) { w.with(func() { w.diffs = append(w.diffs, d) }) },
		Told:      func(p discovery.Proc) { w.with(func() { w.told = append(w.told, p.Key.PID) }) },
		Snapshot: func(key gpreempt.ProcessKey) map[uint32]gpreempt.QueueInfo {
			return locked(w, func() map[uint32]gpreempt.QueueInfo { return w.snapshots[key] })
		},
		Busy: func() bool { return locked(w, func() bool { return w.busy }) },
		SMI:  w.openSMI,
		Warn: func(source string, now ...gpreempt.Warning) {
			w.with(func() {
				if w.warnings[source] = now; len(now) == 0 {
					delete(w.warnings, source)
				}
			})
		},
		Now: time.Now,
		Log: zaptest.NewLogger(t),
	})
	return w
}

func (w *fakeHost) with(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func locked[T any](w *fakeHost, f func() T) T {
	w.mu.Lock()
	defer w.mu.Unlock()
	return f()
}

// Open implements fs.FS.
func (w *fakeHost) Open(name string) (fs.File, error) {
	pause := locked(w, func() time.Duration { w.opened[name]++; return w.slow[name] })
	if pause > 0 {
		time.Sleep(pause) // of the bubble: the driver is slow
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.refused[name]; err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return maps.Clone(w.files).Open(name)
}

func (w *fakeHost) put(name, text string) {
	w.with(func() { w.files[name] = &fstest.MapFile{Data: []byte(text)} })
}

func (w *fakeHost) readings() int { return locked(w, func() int { return w.opened[mqdsFile] }) }

// start makes a process with compute queues of 4096 bytes and up, one page more each.
func (w *fakeHost) start(pid int32, queues ...uint32) gpreempt.ProcessKey {
	proc := fmt.Sprintf("proc/%d/", pid)
	w.put(proc+"stat", fmt.Sprintf("%d (train) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0 0\n", pid, 100+pid))
	w.put(proc+"status", fmt.Sprintf("Name:\ttrain\nTgid:\t%d\nTracerPid:\t0\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nNSpid:\t%d\nCapEff:\t0\n", pid, pid))
	w.put(proc+"comm", "train\n")
	w.put(proc+"cmdline", "train\x00")
	w.put(proc+"cgroup", "0::/\n")
	w.put(fmt.Sprintf("%sproc/%d/pasid", kfdDir, pid), "0\n")
	for _, id := range queues {
		w.create(pid, id)
	}
	return gpreempt.ProcessKey{PID: pid, Start: uint64(100 + pid)}
}

func (w *fakeHost) create(pid int32, id uint32) {
	dir := fmt.Sprintf("%sproc/%d/queues/%d/", kfdDir, pid, id)
	w.put(dir+"gpuid", gpu.String())
	w.put(dir+"size", fmt.Sprint(4096*(id+1)))
	w.put(dir+"type", "0")
}

// run runs the observer to the end of the test.
func (w *fakeHost) run() {
	ended := make(chan struct{})
	go func() { defer close(ended); w.Run(w.t.Context()) }()
	w.t.Cleanup(func() {
		<-ended
		if w.open != 0 {
			w.t.Errorf("%d event streams are left open", w.open)
		}
	})
}

const mqdsFile = "sys/kernel/debug/kfd/mqds"

// mqd is the dump of a compute queue with a ring of 4096*(n+1) bytes, n+1 a power of
// two, at an address.
func mqd(ring uint64, n uint32, priority uint32) string {
	var words [512]uint32
	words[0] = 0xC0310800
	words[128] = 0x1000 + n
	words[133], words[134] = 1, priority
	words[136], words[137] = uint32(ring>>8), uint32(ring>>40)
	size := uint32(0)
	for 4<<(size+1) < 4096*(n+1) {
		size++
	}
	words[145] = size
	words[139], words[141] = uint32(ring)+0x80, uint32(ring)+0x38
	words[140], words[142] = uint32(ring>>32), uint32(ring>>32)
	words[181] = 1
	var b strings.Builder
	fmt.Fprintf(&b, "  Compute queue on device %x\n", uint32(gpu))
	for at := 0; at < len(words); at += 8 {
		fmt.Fprintf(&b, "    %08x:", 4*at)
		for _, word := range words[at : at+8] {
			fmt.Fprintf(&b, " %08x", word)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func (w *fakeHost) rings() map[string]uint64 {
	all := map[string]uint64{}
	queues, _ := w.inventory.Queues()
	for _, q := range queues {
		all[fmt.Sprintf("%d/%d", q.Process.PID, q.ID)] = q.Info.RingBase
	}
	return all
}

func TestScansAreFrequentWhileThingsChangeAndRareOtherwise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.run()
		scans := func() int { return locked(w, func() int { return len(w.diffs) }) }
		time.Sleep(time.Minute)
		before := scans()
		time.Sleep(10 * time.Second)
		if n := scans() - before; n < 9 || n > 11 {
			t.Errorf("%d scans in 10 quiet seconds, want about one a second", n)
		}
		w.start(8, 0)
		time.Sleep(210 * time.Millisecond)
		if _, known := w.inventory.Process(gpreempt.ProcessKey{PID: 8}); !known {
			t.Error("a new process is not known after 210 ms")
		}
		before = scans()
		time.Sleep(700 * time.Millisecond)
		if n := scans() - before; n < 2 {
			t.Errorf("%d scans in the 700 ms after a change, want several", n)
		}
	})
}

func TestNewQueuesOfAProcessAreReadAtOnceAndAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		key := w.start(7, 0)
		w.start(8, 0)
		w.run()
		time.Sleep(time.Minute)
		w.create(7, 1)
		w.with(func() { clear(w.opened); w.diffs = nil })
		w.LookAt(key)
		synctest.Wait()
		proc, _ := w.inventory.Process(key)
		diffs := locked(w, func() []inventory.Diff { return w.diffs })
		if len(diffs) != 1 || len(diffs[0].Queues) != 1 {
			t.Fatalf("changes %+v, want one queue", diffs)
		}
		change := diffs[0].Queues[0]
		want := inventory.Diff{
			Changed: []discovery.Proc{proc},
			Queues: []inventory.Change{{Revision: 3, Kind: inventory.Added, At: change.At, Queue: gpreempt.QueueEntry{
				Queue: gpreempt.Queue{Process: key, ID: 1, GPU: gpu, Type: gpreempt.QueueCompute, RingBytes: 8192}, FirstSeen: change.At,
			}}},
		}
		if diff := cmp.Diff(want, diffs[0]); diff != "" {
			t.Errorf("changes (-want +got):\n%s", diff)
		}
		for name, n := range locked(w, func() map[string]int { return maps.Clone(w.opened) }) {
			if strings.HasPrefix(name, "proc/8/") || strings.HasPrefix(name, kfdDir+"proc/8/") {
				t.Errorf("%s of another process is opened %d times", name, n)
			}
		}
	})
}

func TestAProcessThatNoScanFoundIsScanned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.run()
		time.Sleep(time.Minute)
		key := w.start(8, 0)
		w.LookAt(key)
		synctest.Wait()
		if diff := cmp.Diff(map[string]uint64{"7/0": 0, "8/0": 0}, w.rings()); diff != "" {
			t.Errorf("queues (-want +got):\n%s", diff)
		}
	})
}

func TestRingsAreKnownFromDumpsAndSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		key := w.start(7, 0, 1)
		w.put(mqdsFile, "Process 7 PASID 7:\n"+mqd(0x7f0000200000, 1, 11)+mqd(0x7f0000100000, 0, 7))
		w.run()
		time.Sleep(2 * time.Second)
		want := map[string]uint64{"7/0": 0x7f0000100000, "7/1": 0x7f0000200000}
		if diff := cmp.Diff(want, w.rings()); diff != "" {
			t.Errorf("rings (-want +got):\n%s", diff)
		}
		if got := locked(w, func() []int32 { return slices.Clone(w.told) }); !slices.Equal(got, []int32{7}) {
			t.Errorf("told of processes %v, want 7 once", got)
		}
		// A queue born in a held process is known by its snapshot at once.
		info := gpreempt.QueueInfo{Source: gpreempt.FromSnapshot, RingBase: 0x7f0000400000, AQL: true}
		w.with(func() { w.snapshots[key] = map[uint32]gpreempt.QueueInfo{3: info} })
		w.create(7, 3)
		w.LookAt(key)
		synctest.Wait()
		want["7/3"] = 0x7f0000400000
		if diff := cmp.Diff(want, w.rings()); diff != "" {
			t.Errorf("rings (-want +got):\n%s", diff)
		}
	})
}

func TestDumpsAreReadLessOftenWhileNothingChangesOrReadingIsSlow(t *testing.T) {
	for name, test := range map[string]struct {
		slow     time.Duration
		min, max int
	}{"fast": {0, 20, 27}, "slow": {2 * time.Second, 4, 9}} {
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

func TestDumpsWaitForSuspensionsButNotForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.put(mqdsFile, "")
		w.with(func() { w.busy = true })
		w.run()
		time.Sleep(9 * time.Second)
		if n := w.readings(); n != 0 {
			t.Errorf("%d readings while leases are held, want none within 10 times the interval", n)
		}
		time.Sleep(2 * time.Second)
		if n := w.readings(); n != 1 {
			t.Errorf("%d readings after 11 s, want 1", n)
		}
	})
}

func TestDumpsThatHangHoldUpNothing(t *testing.T) {
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
		time.Sleep(5 * time.Minute) // let it come back
	})
}

func TestDumpsThatCannotBeReadAreNamed(t *testing.T) {
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
					t.Errorf("warnings %+v after it can be read again", got)
				}
			})
		})
	}
}

func TestDumpsAreNotReadWhenNotWanted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.with(func() { w.intervals.MQDs = 0 })
		w.start(7, 0)
		w.run()
		time.Sleep(5 * time.Minute)
		if n := w.readings(); n != 0 {
			t.Errorf("%d readings, want none", n)
		}
	})
}

func (w *fakeHost) openSMI(id gpreempt.GPUID) (inventory.Stream, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.smiErr != nil {
		return nil, w.smiErr
	}
	w.open++
	return &stream{w, id}, nil
}

// stream is the events of a GPU of the world.
type stream struct {
	w   *fakeHost
	gpu gpreempt.GPUID
}

func (s *stream) Read() ([]kfd.SMIEvent, error) {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	events := s.w.events[s.gpu]
	delete(s.w.events, s.gpu)
	return events, nil
}

func (s *stream) Close() error { s.w.with(func() { s.w.open-- }); return nil }

func eviction(trigger int) kfd.SMIEvent {
	return kfd.SMIEvent{ID: kfd.SMIQueueEviction, Text: fmt.Sprintf("5123456789012 -4211 %x %d", uint32(gpu), trigger)}
}

func TestEvictionsForLackOfMemoryAreCountedAndNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.run()
		time.Sleep(time.Second)
		if n, told := w.MemoryEvictions(gpu); n != 0 || !told {
			t.Errorf("evictions %d, told %v; want 0, true", n, told)
		}
		w.with(func() {
			w.events[gpu] = []kfd.SMIEvent{eviction(2), eviction(3), {ID: kfd.SMIVMFault, Text: "1:a"}, {ID: kfd.SMIQueueEviction, Text: "nonsense"}, eviction(2)}
		})
		time.Sleep(time.Second)
		if n, _ := w.MemoryEvictions(gpu); n != 2 {
			t.Errorf("%d evictions, want 2", n)
		}
		if got := locked(w, func() []gpreempt.Warning { return w.warnings["memory"] }); len(got) != 1 || got[0].Code != "GPU_MEMORY_SHORT" {
			t.Errorf("warnings %+v, want GPU_MEMORY_SHORT", got)
		}
		time.Sleep(time.Minute)
		if got := locked(w, func() []gpreempt.Warning { return w.warnings["memory"] }); len(got) != 0 {
			t.Errorf("warnings %+v a minute later", got)
		}
	})
}

func TestEventsThatCannotBeOpenedAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.smiErr = errors.New("operation not permitted")
		w.run()
		time.Sleep(time.Second)
		if n, told := w.MemoryEvictions(gpu); n != 0 || told {
			t.Errorf("evictions %d, told %v; want 0, false", n, told)
		}
		if got := locked(w, func() []gpreempt.Warning { return w.warnings["smi"] }); len(got) != 1 || got[0].Code != "SMI_UNAVAILABLE" {
			t.Errorf("warnings %+v, want SMI_UNAVAILABLE", got)
		}
	})
}

func TestSlotsAreReadAgainWhenTheAnswerIsOfBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		const file = "sys/kernel/debug/kfd/hqds"
		w.put(file, "Node 1, gpu_id f7bc:\n Device is stopped\n")
		w.with(func() { w.slow[file] = 100 * time.Millisecond })
		read := func(notBefore time.Time, want int) {
			t.Helper()
			h, err := w.HQDs(t.Context(), notBefore)
			if err != nil {
				t.Fatal(err)
			}
			if n := locked(w, func() int { return w.opened[file] }); n != want || !slices.Equal(h.Stopped, []gpreempt.GPUID{gpu}) {
				t.Errorf("read %d times, want %d; stopped %v", n, want, h.Stopped)
			}
		}
		read(time.Time{}, 1)
		read(time.Time{}, 1)
		read(time.Now(), 2)
		time.Sleep(time.Second)
		read(time.Time{}, 3)
		// One that goes on began before.
		go func() { _, _ = w.HQDs(t.Context(), time.Now()) }()
		synctest.Wait()
		time.Sleep(50 * time.Millisecond)
		read(time.Now(), 5)
	})
}

func TestWhatWasCertainOfAQueueStaysKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.put(mqdsFile, "Process 7 PASID 7:\n"+mqd(0x7f0000100000, 0, 7))
		w.run()
		time.Sleep(2 * time.Second)
		// A second one of the same size: by the first one they are told apart.
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

func TestADumpOfBeforeIsNotOfTheNextProcess(t *testing.T) {
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

func TestADumpWithoutAHeldQueueTakesNothingBack(t *testing.T) {
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
		after.Note = before.Note // it says that the dump lacks it
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("after a dump without it (-before +after):\n%s", diff)
		}
	})
}

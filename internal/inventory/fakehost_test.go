package inventory_test

import (
	"fmt"
	"io/fs"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"go.uber.org/zap/zaptest"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

const gpu gpreempt.GPUID = 63420

// fakeHost is the files of a host, with an Observer and what its functions need.
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
	described []int32
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
		intervals: inventory.Intervals{Shortest: 50 * time.Millisecond, Longest: time.Second, Debugfs: true},
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
		Described: func(p discovery.Proc) { w.with(func() { w.described = append(w.described, p.Key.PID) }) },
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
		<-time.After(pause) // in fake time
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

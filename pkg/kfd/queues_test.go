package kfd

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// marking answers suspend and resume by setting bits on IDs, and returns the number of
// clean ones plus more.
func marking(bits map[uint32]uint32, more int, seen *[][]uint32) ioctlFunc {
	return func(_ Request, arg Pointer) (uintptr, error) {
		var array []uint32
		switch trapOf(arg) {
		case TrapSuspendQueues:
			a := As[TrapSuspendQueuesArgs](arg)
			array = SliceAt[uint32](a.QueueArrayPtr, int(a.NumQueues))
		case TrapResumeQueues:
			a := As[TrapResumeQueuesArgs](arg)
			array = SliceAt[uint32](a.QueueArrayPtr, int(a.NumQueues))
		default:
			return 0, unix.EINVAL
		}
		*seen = append(*seen, slices.Clone(array))
		n := more
		for i, id := range array {
			if array[i] |= bits[id]; array[i] == id {
				n++
			}
		}
		return uintptr(n), nil
	}
}

func TestSuspendTellsEachQueueApart(t *testing.T) {
	var seen [][]uint32
	d := open(t, 17, marking(map[uint32]uint32{
		5: QueueInvalidMask,
		6: QueueErrorMask,
		7: QueueErrorMask | QueueInvalidMask,
	}, 0, &seen))
	ids := []uint32{7, 0, 5, 6, 1023}
	want := []QueueResult{
		{7, QueueHardwareError}, {0, QueueOK}, {5, QueueSkipped}, {6, QueueHardwareError}, {1023, QueueOK},
	}
	for name, call := range map[string]func() ([]QueueResult, error){
		"suspend": func() ([]QueueResult, error) { return d.Suspend(1, ids) },
		"resume":  func() ([]QueueResult, error) { return d.Resume(1, ids) },
	} {
		got, err := call()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestOutcomesNeverLeakIntoTheNextCall(t *testing.T) {
	var seen [][]uint32
	d := open(t, 17, marking(map[uint32]uint32{2: QueueErrorMask, 1: QueueInvalidMask}, 0, &seen))
	ids := []uint32{3, 2, 1}
	for range 2 {
		if _, err := d.Suspend(1, ids); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Resume(1, ids); err != nil {
			t.Fatal(err)
		}
	}
	clean := []uint32{3, 2, 1}
	if diff := cmp.Diff([][]uint32{clean, clean, clean, clean}, seen); diff != "" {
		t.Errorf("ids sent (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(clean, ids); diff != "" {
		t.Errorf("the caller's ids (-want +got):\n%s", diff)
	}
}

func TestIDsNoDriverShouldSee(t *testing.T) {
	var seen [][]uint32
	d := open(t, 17, marking(nil, 0, &seen))
	for name, ids := range map[string][]uint32{
		"too many":          make([]uint32, MaxQueues+1),
		"twice":             {4, 5, 4},
		"marked an error":   {1, 2 | QueueErrorMask},
		"marked as invalid": {QueueInvalidMask},
	} {
		if res, err := d.Suspend(42, ids); !errors.Is(err, unix.EINVAL) || res != nil {
			t.Errorf("suspend, %s: %v, %v; want EINVAL", name, res, err)
		}
		if res, err := d.Resume(42, ids); !errors.Is(err, unix.EINVAL) || res != nil {
			t.Errorf("resume, %s: %v, %v; want EINVAL", name, res, err)
		}
	}
	// Resuming no queue must not resume all queues.
	for _, none := range [][]uint32{nil, {}} {
		if res, err := d.Suspend(42, none); err != nil || len(res) != 0 {
			t.Errorf("suspend of no queue: %v, %v", res, err)
		}
		if res, err := d.Resume(42, none); err != nil || len(res) != 0 {
			t.Errorf("resume of no queue: %v, %v", res, err)
		}
	}
	if len(seen) != 0 {
		t.Errorf("the driver got %v", seen)
	}
	most := make([]uint32, MaxQueues)
	for i := range most {
		most[i] = uint32(i)
	}
	if res, err := d.Suspend(42, most); err != nil || len(res) != MaxQueues {
		t.Errorf("suspend of %d: %d results, %v", MaxQueues, len(res), err)
	}
}

func TestAnswersThatContradictThemselves(t *testing.T) {
	var seen [][]uint32
	// The array was not written back: according to the number one queue is missing.
	d := open(t, 17, marking(nil, -1, &seen))
	if res, err := d.Suspend(42, []uint32{1, 2}); !errors.Is(err, ErrInconsistent) || res != nil {
		t.Errorf("a count too low: %v, %v; want %v", res, err, ErrInconsistent)
	}
	d = open(t, 17, marking(nil, 1, &seen))
	if res, err := d.Resume(42, []uint32{1, 2}); !errors.Is(err, ErrInconsistent) || res != nil {
		t.Errorf("a count too high: %v, %v; want %v", res, err, ErrInconsistent)
	}
	d = open(t, 17, marking(map[uint32]uint32{1: 4}, 1, &seen))
	if res, err := d.Suspend(42, []uint32{1, 2}); !errors.Is(err, ErrInconsistent) || res != nil {
		t.Errorf("another id: %v, %v; want %v", res, err, ErrInconsistent)
	}
}

func TestResumeAllCounts(t *testing.T) {
	d := open(t, 17, func(Request, Pointer) (uintptr, error) { return 12, nil })
	if n, err := d.ResumeAll(42); n != 12 || err != nil {
		t.Errorf("%d, %v; want 12", n, err)
	}
}

// machine has queues that are created between snapshots.
type machine struct {
	queues []QueueSnapshotEntry
	// births are the numbers of queues created before each snapshot.
	births []int
	// filled is the driver's size of an entry, 0 for that of this package.
	filled uint32
	calls  int
}

func (m *machine) ioctl(_ Request, arg Pointer) (uintptr, error) {
	if m.calls < len(m.births) {
		for range m.births[m.calls] {
			m.queues = append(m.queues, QueueSnapshotEntry{
				QueueID: uint32(len(m.queues)), RingSize: 4096, CtxSaveRestoreAreaSize: 99, ExceptionStatus: ECQueueNew.Mask(),
			})
		}
	}
	m.calls++
	a := As[TrapQueueSnapshotArgs](arg)
	filled := a.EntrySize
	if m.filled != 0 {
		filled = min(filled, m.filled)
	}
	room := int(a.NumQueues)
	buf := SliceAt[byte](a.SnapshotBufPtr, room*int(a.EntrySize))
	for i := range m.queues {
		q := &m.queues[len(m.queues)-1-i] // the newest first
		if i == room {
			break
		}
		copy(buf[i*int(a.EntrySize):][:filled], bytesOf(q))
		q.ExceptionStatus &^= a.ExceptionMask
	}
	a.NumQueues, a.EntrySize = uint32(len(m.queues)), filled
	return 0, nil
}

func TestSnapshotGrowsUntilItHasEverything(t *testing.T) {
	m := &machine{births: []int{70, 20}}
	got, err := open(t, 17, m.ioctl).Snapshot(42, ECQueueNew.Mask())
	if err != nil {
		t.Fatal(err)
	}
	// The buffers have space for 64, 86 and 106.
	if len(got) != 90 || m.calls != 3 {
		t.Errorf("%d queues in %d calls, want 90 in 3", len(got), m.calls)
	}
	for i, q := range got {
		want := QueueSnapshotEntry{QueueID: uint32(89 - i), RingSize: 4096, CtxSaveRestoreAreaSize: 99, ExceptionStatus: ECQueueNew.Mask()}
		if diff := cmp.Diff(want, q); diff != "" {
			t.Fatalf("entry %d (-want +got):\n%s", i, diff)
		}
	}
	for _, q := range m.queues {
		if q.ExceptionStatus != 0 {
			t.Errorf("queue %d is still new", q.QueueID)
		}
	}
}

func TestSnapshotThatNeverFitsEnds(t *testing.T) {
	m := &machine{births: []int{100, 100, 100, 100, 100, 100, 100, 100, 100}}
	if got, err := open(t, 17, m.ioctl).Snapshot(42, 0); !errors.Is(err, ErrInconsistent) || m.calls != maxAttempts {
		t.Errorf("%d queues and error %v in %d calls; want %v in %d", len(got), err, m.calls, ErrInconsistent, maxAttempts)
	}
}

func TestShortEntriesLeaveTheRestZero(t *testing.T) {
	m := &machine{births: []int{2}, filled: 56} // without the save area and the reserved field
	got, err := open(t, 17, m.ioctl).Snapshot(42, 0)
	want := []QueueSnapshotEntry{
		{QueueID: 1, RingSize: 4096, ExceptionStatus: ECQueueNew.Mask()},
		{QueueID: 0, RingSize: 4096, ExceptionStatus: ECQueueNew.Mask()},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
}

// A driver before 7.2 fills less of an entry.
func TestDeviceSnapshotOfEachDriver(t *testing.T) {
	gpus := []DeviceInfoEntry{{GPUID: 0x8a31, DebugProp: 1, Capability2: 7}, {GPUID: 5, NumXCC: 8, Capability2: 9}}
	for minor, filled := range map[uint32]uint32{17: 120, 23: 128} {
		d := open(t, minor, func(_ Request, arg Pointer) (uintptr, error) {
			a := As[TrapQueueSnapshotArgs](arg)
			buf := SliceAt[byte](a.SnapshotBufPtr, int(a.NumQueues*a.EntrySize))
			for i := range gpus {
				copy(buf[i*int(a.EntrySize):][:filled], bytesOf(&gpus[i]))
			}
			a.NumQueues, a.EntrySize = uint32(len(gpus)), filled
			return 0, nil
		})
		got, err := d.DeviceSnapshot(42)
		want := slices.Clone(gpus)
		for i := range want {
			if filled < 128 {
				want[i].Capability2 = 0
			}
		}
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("1.%d: error %v (-want +got):\n%s", minor, err, diff)
		}
	}
}

func TestSnapshotsThatCannotBe(t *testing.T) {
	const entrySize = 64
	for name, a := range map[string]struct{ total, filled uint32 }{
		"nothing filled":   {total: 1},
		"more than stride": {total: 1, filled: entrySize + 1},
		"too many":         {total: maxEntries + 1, filled: entrySize},
	} {
		calls := 0
		d := open(t, 17, func(_ Request, arg Pointer) (uintptr, error) {
			calls++
			s := As[TrapQueueSnapshotArgs](arg)
			s.NumQueues, s.EntrySize = a.total, a.filled
			return 0, nil
		})
		if got, err := d.Snapshot(42, 0); !errors.Is(err, ErrInconsistent) || got != nil || calls != 1 {
			t.Errorf("%s: %d queues and error %v in %d calls, want %v", name, len(got), err, calls, ErrInconsistent)
		}
	}
}

func FuzzDecodeEntries(f *testing.F) {
	f.Add(bytes.Repeat([]byte{0xa5}, 130), uint32(2), uint32(40))
	f.Add(make([]byte, 128), uint32(2), uint32(64))
	f.Add(make([]byte, 128), uint32(9), uint32(56))
	f.Add([]byte{}, uint32(1), uint32(0))
	f.Add(make([]byte, 64), uint32(0xffffffff), uint32(65))
	const entrySize = 64
	f.Fuzz(func(t *testing.T, buf []byte, total, filled uint32) {
		entries, err := decodeEntries[QueueSnapshotEntry](buf, int(total), int(filled))
		if err != nil {
			if entries != nil {
				t.Errorf("%d entries and error %v", len(entries), err)
			}
			return
		}
		if want := min(int(total), len(buf)/entrySize); len(entries) != want {
			t.Errorf("%d entries, want %d", len(entries), want)
		}
		for i := range entries {
			b := bytesOf(&entries[i])
			if diff := cmp.Diff(buf[i*entrySize:][:filled], b[:filled]); diff != "" || !allZero(b[filled:]) {
				t.Errorf("entry %d: %x after %d bytes (-want +got):\n%s", i, b[filled:], filled, diff)
			}
		}
	})
}

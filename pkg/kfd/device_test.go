package kfd

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
)

// minors are the interface versions with their own profile.
var minors = []uint32{13, 17, 18, 23}

// sent is a DBG_TRAP call as the driver gets it: 32 bytes, with the pointer in them, if
// any, replaced by zeros, and the memory it points to.
type sent struct {
	Bytes []byte
	IDs   []uint32
	Room  int // size of the buffer in bytes
}

// record copies a DBG_TRAP call.
func record(t *testing.T, req Request, arg Pointer) sent {
	t.Helper()
	if req != ReqDbgTrap {
		t.Fatalf("request %v, want DBG_TRAP", req)
	}
	s := sent{Bytes: slices.Clone(SliceAt[byte](arg, req.Size()))}
	at := 0
	switch trapOf(arg) {
	case TrapEnable:
		a := As[TrapEnableArgs](arg)
		at, s.Room = 16, len(SliceAt[byte](a.RinfoPtr, int(a.RinfoSize)))
	case TrapSuspendQueues:
		a := As[TrapSuspendQueuesArgs](arg)
		at, s.IDs = 16, slices.Clone(SliceAt[uint32](a.QueueArrayPtr, int(a.NumQueues)))
	case TrapResumeQueues:
		a := As[TrapResumeQueuesArgs](arg)
		s.IDs = slices.Clone(SliceAt[uint32](a.QueueArrayPtr, int(a.NumQueues)))
		if at = 8; a.QueueArrayPtr.IsNil() {
			at = 0 // the bytes have the NULL
		}
	case TrapQueryExceptionInfo:
		a := As[TrapQueryExceptionInfoArgs](arg)
		at, s.Room = 8, len(SliceAt[byte](a.InfoPtr, int(a.InfoSize)))
	case TrapGetQueueSnapshot, TrapGetDeviceSnapshot:
		a := As[TrapQueueSnapshotArgs](arg)
		if !a.SnapshotBufPtr.IsNil() {
			at, s.Room = 16, len(SliceAt[byte](a.SnapshotBufPtr, int(a.NumQueues*a.EntrySize)))
		}
	default:
	}
	if at != 0 {
		if allZero(s.Bytes[at : at+8]) {
			t.Errorf("%v has a NULL pointer", trapOf(arg))
		}
		clear(s.Bytes[at : at+8])
	}
	return s
}

func allZero(b []byte) bool { return !slices.ContainsFunc(b, func(c byte) bool { return c != 0 }) }

func TestBytesSent(t *testing.T) {
	const pid = 4242
	calls := []struct {
		name string
		call func(d *Device) error
		want sent
	}{
		{
			"enable",
			func(d *Device) error { _, err := d.Enable(pid, 0x800040000000, 9); return err },
			sent{Bytes: words(pid, 0, 0x40000000, 0x8000, 0, 0, 16, 9), Room: 16},
		},
		{
			"disable",
			func(d *Device) error { return d.Disable(pid) },
			sent{Bytes: words(pid, 1, 0, 0, 0, 0, 0, 0)},
		},
		{
			"send runtime event",
			func(d *Device) error { return d.AnswerRuntime(pid) },
			sent{Bytes: words(pid, 2, 0, 0x8000, 0, 0, 0, 0)},
		},
		{
			"suspend",
			func(d *Device) error { _, err := d.Suspend(pid, []uint32{7, 3}); return err },
			sent{Bytes: words(pid, 6, 0, 0, 0, 0, 2, 1), IDs: []uint32{7, 3}},
		},
		{
			"resume",
			func(d *Device) error { _, err := d.Resume(pid, []uint32{1023, 0}); return err },
			sent{Bytes: words(pid, 7, 0, 0, 2, 0, 0, 0), IDs: []uint32{1023, 0}},
		},
		{
			"resume all",
			func(d *Device) error { _, err := d.ResumeAll(pid); return err },
			sent{Bytes: words(pid, 7, 0, 0, 0, 0, 0, 0)},
		},
		{
			"query debug event",
			func(d *Device) error { _, _, err := d.QueryDebugEvent(pid, ECQueueNew.Mask()); return err },
			sent{Bytes: words(pid, 11, 0x40000000, 0, 0, 0, 0, 0)},
		},
		{
			"query exception info",
			func(d *Device) error { _, err := d.TakeRuntimeInfo(pid); return err },
			sent{Bytes: words(pid, 12, 0, 0, 16, 0, 48, 1), Room: 16},
		},
		{
			"queue snapshot",
			func(d *Device) error { _, err := d.Snapshot(pid, ECQueueNew.Mask()); return err },
			sent{Bytes: words(pid, 13, 0x40000000, 0, 0, 0, 64, 64), Room: 64 * 64},
		},
		{
			"device snapshot",
			func(d *Device) error { _, err := d.DeviceSnapshot(pid); return err },
			sent{Bytes: words(pid, 14, 0, 0, 0, 0, 64, 128), Room: 64 * 128},
		},
		{
			"probe",
			func(d *Device) error { _, err := d.ProbePermissionRule(pid); return err },
			sent{Bytes: words(pid, 13, 0, 0, 0, 0, 0, 64)},
		},
	}
	for _, minor := range minors {
		for _, c := range calls {
			t.Run(fmt.Sprintf("1.%d/%s", minor, c.name), func(t *testing.T) {
				var got []sent
				d := open(t, minor, func(req Request, arg Pointer) (uintptr, error) {
					got = append(got, record(t, req, arg))
					if op := trapOf(arg); op == TrapSuspendQueues || op == TrapResumeQueues {
						return 2, nil
					}
					if op := trapOf(arg); op == TrapGetQueueSnapshot || op == TrapGetDeviceSnapshot {
						As[TrapQueueSnapshotArgs](arg).NumQueues = 0
					}
					return 0, nil
				})
				if err := c.call(d); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff([]sent{c.want}, got, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("sent (-want +got):\n%s", diff)
				}
			})
		}
	}
}

func TestOpenRefusesUnknownInterfaces(t *testing.T) {
	for _, v := range []Version{{Major: 2, Minor: 17}, {Major: 0, Minor: 99}, {Major: 1, Minor: 12}} {
		closed := 0
		sys := closeCounter{ioctlFunc: func(_ Request, arg Pointer) (uintptr, error) {
			a := As[GetVersionArgs](arg)
			a.Major, a.Minor = v.Major, v.Minor
			return 0, nil
		}, closed: &closed}
		if _, err := OpenWith(sys, DevicePath); !errors.Is(err, ErrVersion) {
			t.Errorf("version %v: error %v, want %v", v, err, ErrVersion)
		}
		if closed != 1 {
			t.Errorf("version %v: closed %d times, want once", v, closed)
		}
	}
}

// closeCounter counts closed descriptors.
type closeCounter struct {
	ioctlFunc
	closed *int
}

func (c closeCounter) Close(int) error { *c.closed++; return nil }

func TestOpenErrorsSayWhatToDo(t *testing.T) {
	sys := openFunc(func(path string, flags int) (int, error) {
		if path != DevicePath || flags != unix.O_RDWR|unix.O_CLOEXEC {
			t.Errorf("open %s with flags %#x", path, flags)
		}
		return -1, unix.EACCES
	})
	_, err := OpenWith(sys, DevicePath)
	want := &Error{Op: "open /dev/kfd", Errno: unix.EACCES}
	if diff := cmp.Diff(want, err); diff != "" {
		t.Errorf("error (-want +got):\n%s", diff)
	}
	if err != nil && !strings.Contains(err.Error(), "render") {
		t.Errorf("error %q does not name the group", err)
	}
}

// openFunc opens files; nothing else works.
type openFunc func(path string, flags int) (int, error)

func (f openFunc) Open(path string, flags int) (int, error)   { return f(path, flags) }
func (openFunc) Ioctl(int, Request, Pointer) (uintptr, error) { return 0, unix.EBADF }
func (openFunc) Read(int, []byte) (int, error)                { return 0, unix.EBADF }
func (openFunc) Write(int, []byte) (int, error)               { return 0, unix.EBADF }
func (openFunc) Close(int) error                              { return unix.EBADF }

func TestErrorsKeepTheErrnoAndNameTheTarget(t *testing.T) {
	calls := map[string]struct {
		call func(d *Device) error
		op   string
	}{
		"enable":    {func(d *Device) error { _, err := d.Enable(42, 0, 9); return err }, "DBG_TRAP ENABLE"},
		"disable":   {func(d *Device) error { return d.Disable(42) }, "DBG_TRAP DISABLE"},
		"suspend":   {func(d *Device) error { _, err := d.Suspend(42, []uint32{1}); return err }, "DBG_TRAP SUSPEND_QUEUES"},
		"resume":    {func(d *Device) error { _, err := d.Resume(42, []uint32{1}); return err }, "DBG_TRAP RESUME_QUEUES"},
		"resumeall": {func(d *Device) error { _, err := d.ResumeAll(42); return err }, "DBG_TRAP RESUME_QUEUES"},
		"snapshot":  {func(d *Device) error { _, err := d.Snapshot(42, 1); return err }, "DBG_TRAP GET_QUEUE_SNAPSHOT"},
		"devices":   {func(d *Device) error { _, err := d.DeviceSnapshot(42); return err }, "DBG_TRAP GET_DEVICE_SNAPSHOT"},
		"event":     {func(d *Device) error { _, _, err := d.QueryDebugEvent(42, 1); return err }, "DBG_TRAP QUERY_DEBUG_EVENT"},
		"answer":    {func(d *Device) error { return d.AnswerRuntime(42) }, "DBG_TRAP SEND_RUNTIME_EVENT"},
		"info":      {func(d *Device) error { _, err := d.TakeRuntimeInfo(42); return err }, "DBG_TRAP QUERY_EXCEPTION_INFO"},
	}
	for name, c := range calls {
		t.Run(name, func(t *testing.T) {
			err := c.call(open(t, 17, refuse(unix.ESRCH)))
			if !errors.Is(err, unix.ESRCH) {
				t.Fatalf("error %v is not ESRCH", err)
			}
			got, _ := errors.AsType[*Error](err)
			want := &Error{Op: c.op, PID: 42, Errno: unix.ESRCH}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

func TestErrorTexts(t *testing.T) {
	for want, e := range map[string]Error{
		"DBG_TRAP DISABLE of process 42: no such process: the process has exited or does not use the GPU": {
			Op: trapName(TrapDisable), PID: 42, Errno: unix.ESRCH,
		},
		"DBG_TRAP QUERY_EXCEPTION_INFO of process 42 GPU 7: no data available: the exception is not raised": {
			Op: trapName(TrapQueryExceptionInfo), PID: 42, GPU: 7, Errno: unix.ENODATA,
		},
		"DBG_TRAP ENABLE of process 1: input/output error": {
			Op: trapName(TrapEnable), PID: 1, Errno: unix.EIO,
		},
		"GET_VERSION: no such process": {Op: "GET_VERSION", Errno: unix.ESRCH},
	} {
		if got := e.Error(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

func TestInterruptedCalls(t *testing.T) {
	calls := map[string]struct {
		call  func(d *Device) error
		again bool
	}{
		"version":              {func(d *Device) error { _, err := d.GetVersion(); return err }, true},
		"suspend":              {func(d *Device) error { _, err := d.Suspend(1, []uint32{4, 2}); return err }, true},
		"resume":               {func(d *Device) error { _, err := d.Resume(1, []uint32{4, 2}); return err }, true},
		"resume all":           {func(d *Device) error { _, err := d.ResumeAll(1); return err }, true},
		"snapshot":             {func(d *Device) error { _, err := d.Snapshot(1, 0); return err }, true},
		"device snapshot":      {func(d *Device) error { _, err := d.DeviceSnapshot(1); return err }, true},
		"query":                {func(d *Device) error { _, _, err := d.QueryDebugEvent(1, 0); return err }, true},
		"enable":               {func(d *Device) error { _, err := d.Enable(1, 0, 9); return err }, false},
		"disable":              {func(d *Device) error { return d.Disable(1) }, false},
		"send runtime event":   {func(d *Device) error { return d.AnswerRuntime(1) }, false},
		"query that clears":    {func(d *Device) error { _, _, err := d.QueryDebugEvent(1, 1); return err }, false},
		"info that clears":     {func(d *Device) error { _, err := d.TakeRuntimeInfo(1); return err }, false},
		"snapshot that clears": {func(d *Device) error { _, err := d.Snapshot(1, 1); return err }, false},
		"SMI":                  {func(d *Device) error { _, err := d.OpenSMI(1, 0); return err }, false},
	}
	for name, c := range calls {
		t.Run(name, func(t *testing.T) {
			var first, last sent
			n := 0
			answer := func(req Request, arg Pointer) (uintptr, error) {
				if req == ReqDbgTrap {
					last = record(t, req, arg)
				}
				return uintptr(len(last.IDs)), nil
			}
			cut := interrupted(2, &n, answer)
			d := open(t, 17, func(Request, Pointer) (uintptr, error) { return 0, nil })
			d.handle.sys = ioctlFunc(func(req Request, arg Pointer) (uintptr, error) {
				if n == 0 && req == ReqDbgTrap {
					first = record(t, req, arg)
				}
				return cut(req, arg)
			})
			err := c.call(d)
			if c.again {
				if err != nil && !errors.Is(err, ErrInconsistent) || n != 3 {
					t.Errorf("%d calls and error %v, want 3 and the last one's", n, err)
				}
				if diff := cmp.Diff(first, last); diff != "" {
					t.Errorf("the first call (-) and the last (+) differ:\n%s", diff)
				}
			} else if n != 1 || !errors.Is(err, unix.EINTR) {
				t.Errorf("%d calls and error %v, want 1 and EINTR", n, err)
			}
		})
	}
}

func TestCloseWaitsForNobodyAndTakesNoDescriptorAway(t *testing.T) {
	inside, leave := make(chan struct{}), make(chan struct{})
	closed := 0
	sys := closeCounter{closed: &closed, ioctlFunc: ofVersion(17, func(Request, Pointer) (uintptr, error) {
		close(inside)
		<-leave
		return 0, nil
	})}
	d, err := OpenWith(sys, DevicePath)
	if err != nil {
		t.Fatal(err)
	}
	var calls sync.WaitGroup
	calls.Go(func() {
		if err := d.Disable(42); err != nil {
			t.Error(err)
		}
	})
	<-inside
	for range 2 {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := d.Disable(42); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a call after Close: %v, want %v", err, os.ErrClosed)
	}
	if closed != 0 {
		t.Error("the descriptor was closed during a call")
	}
	close(leave)
	calls.Wait()
	if closed != 1 {
		t.Errorf("closed %d times, want once", closed)
	}
}

func TestDeviceServesManyAtOnce(t *testing.T) {
	var n atomic.Int64
	d := open(t, 23, func(_ Request, arg Pointer) (uintptr, error) {
		n.Add(1)
		ids := As[TrapSuspendQueuesArgs](arg)
		return uintptr(ids.NumQueues), nil
	})
	var calls sync.WaitGroup
	for i := range uint32(8) {
		calls.Go(func() {
			got, err := d.Suspend(int32(i), []uint32{i, i + 1})
			want := []QueueResult{{ID: i}, {ID: i + 1}}
			if diff := cmp.Diff(want, got); diff != "" || err != nil {
				t.Errorf("error %v (-want +got):\n%s", err, diff)
			}
		})
	}
	calls.Wait()
	if n.Load() != 8 {
		t.Errorf("%d calls, want 8", n.Load())
	}
}

func TestKernelIoctl(t *testing.T) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	sys := Kernel()
	if n, err := sys.Write(p[1], []byte("12345")); n != 5 || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	var waiting int32
	if r1, err := sys.Ioctl(p[0], Request(unix.TIOCINQ), PointerTo(&waiting)); r1 != 0 || err != nil || waiting != 5 {
		t.Errorf("TIOCINQ: %d, %v, %d bytes; want 5", r1, err, waiting)
	}
	var b [8]byte
	if n, err := sys.Read(p[0], b[:]); n != 5 || err != nil {
		t.Errorf("read %d, %v", n, err)
	}
	if _, err := sys.Read(p[0], b[:]); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("read of an empty stream: %v, want EAGAIN", err)
	}
	for _, fd := range p {
		if err := sys.Close(fd); err != nil {
			t.Error(err)
		}
	}
	if _, err := sys.Ioctl(-1, ReqGetVersion, PointerTo(&GetVersionArgs{})); !errors.Is(err, unix.EBADF) {
		t.Errorf("ioctl of an invalid descriptor: %v, want EBADF", err)
	}
	if _, err := sys.Open("/dev/null/kfd", unix.O_RDWR); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("open: %v, want ENOTDIR", err)
	}
}

func TestCallsAreCountedWithTheirTimeWhateverComesOfThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, 17, func(Request, Pointer) (uintptr, error) {
			time.Sleep(3 * time.Millisecond) // of the bubble
			return 0, unix.EPERM
		})
		before, took := d.Calls()
		if _, err := d.ResumeAll(7); !errors.Is(err, unix.EPERM) {
			t.Fatal(err)
		}
		if n, all := d.Calls(); n != before+1 || all != took+3*time.Millisecond {
			t.Errorf("%d calls of %v, after %d of %v and one of 3ms", n, all, before, took)
		}
	})
}

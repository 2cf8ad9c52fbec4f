package kfd

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestEnableTellsTheRuntimeState(t *testing.T) {
	want := RuntimeInfo{RDebug: 0x7f0012345678, State: RuntimeBusy, TTMPSetup: 1}
	d := open(t, 17, func(_ Request, arg Pointer) (uintptr, error) {
		*As[RuntimeInfo](As[TrapEnableArgs](arg).RinfoPtr) = want
		return 0, nil
	})
	got, err := d.Enable(42, 0, 9)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
}

func TestDebugEventsAreQueriedUntilNoneIsLeft(t *testing.T) {
	pending := []DebugEvent{
		{Raised: ECQueueNew.Mask(), GPU: 0x8a31, Queue: 3},
		{Raised: ECProcessRuntime.Mask()},
	}
	want := append([]DebugEvent{}, pending...)
	d := open(t, 17, func(_ Request, arg Pointer) (uintptr, error) {
		if len(pending) == 0 {
			return 0, unix.EAGAIN
		}
		a := As[TrapQueryDebugEventArgs](arg)
		a.ExceptionMask, a.GPUID, a.QueueID = pending[0].Raised, uint32(pending[0].GPU), pending[0].Queue
		pending = pending[1:]
		return 0, nil
	})
	var got []DebugEvent
	for {
		ev, ok, err := d.QueryDebugEvent(42, ECQueueNew.Mask())
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		got = append(got, ev)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestRuntimeInfoThatIsTooShort(t *testing.T) {
	for size, whole := range map[uint32]bool{0: false, 12: false, 16: true, 4096: true} {
		d := open(t, 17, func(_ Request, arg Pointer) (uintptr, error) {
			args := As[TrapQueryExceptionInfoArgs](arg)
			*As[RuntimeInfo](args.InfoPtr) = RuntimeInfo{RDebug: 0x7f00, State: RuntimeBusy, TTMPSetup: 1}
			args.InfoSize = size
			return 0, nil
		})
		var want RuntimeInfo
		if whole {
			want = RuntimeInfo{RDebug: 0x7f00, State: RuntimeBusy, TTMPSetup: 1}
		}
		got, err := d.TakeRuntimeInfo(42)
		if diff := cmp.Diff(want, got); diff != "" || errors.Is(err, ErrInconsistent) == whole {
			t.Errorf("%d bytes: error %v (-want +got):\n%s", size, err, diff)
		}
	}
}

func TestPermissionRuleIsProbedByBehaviour(t *testing.T) {
	for _, c := range []struct {
		name  string
		errno unix.Errno
		want  PermissionRule
		fails bool
	}{
		{"answers", 0, PermissionProcess, false},
		{"refused", unix.EPERM, PermissionThread, false},
		{"not enabled", unix.EINVAL, PermissionUnknown, true},
		{"target gone", unix.ESRCH, PermissionUnknown, true},
		{"secondary context", unix.EOPNOTSUPP, PermissionUnknown, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, 17, func(Request, Pointer) (uintptr, error) {
				if c.errno != 0 {
					return 0, c.errno
				}
				return 0, nil
			})
			got, err := d.ProbePermissionRule(42)
			if got != c.want || (err != nil) != c.fails || c.fails && !errors.Is(err, c.errno) {
				t.Errorf("%v, %v; want %v", got, err, c.want)
			}
		})
	}
}

func TestProfiles(t *testing.T) {
	type answer struct{ Profile, Warning string }
	got := map[uint32]answer{}
	want := map[uint32]answer{13: {Profile: "6.5"}, 16: {Profile: "6.5"}, 17: {Profile: "6.12"}, 18: {Profile: "amd-dkms"}, 23: {Profile: "7.2"}}
	for minor, profile := range map[uint32]string{19: "amd-dkms", 22: "amd-dkms", 24: "7.2", 4000000000: "7.2"} {
		want[minor] = answer{profile, fmt.Sprintf("unknown KFD interface 1.%d: using the ABI of %s, which newer drivers have kept so far", minor, profile)}
	}
	for minor := range want {
		profile, warning, err := ProfileFor(Version{1, minor})
		if err != nil {
			t.Errorf("1.%d: %v", minor, err)
		}
		got[minor] = answer{profile, warning}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("profiles (-want +got):\n%s", diff)
	}
}

func TestUnknownMinorIsWarnedOfWhenOpened(t *testing.T) {
	d := open(t, 99, refuse(unix.EINVAL))
	if w := d.Warning(); !strings.Contains(w, "1.99") || !strings.Contains(w, "7.2") {
		t.Errorf("warning %v, want both versions in it", w)
	}
	if d.Version() != (Version{1, 99}) {
		t.Errorf("version %v, want 1.99", d.Version())
	}
	if d := open(t, 17, refuse(unix.EINVAL)); d.Warning() != "" {
		t.Errorf("a known version has the warning %v", d.Warning())
	}
}

func TestExceptionMasks(t *testing.T) {
	for c, want := range map[ExceptionCode]ExceptionMask{
		0: 0, ECQueueNew: 0x40000000, 32: 0x80000000, 36: 0x800000000,
		ECProcessRuntime: 0x800000000000, 49: 0x1000000000000, 64: 1 << 63, 65: 0,
	} {
		if got := c.Mask(); got != want {
			t.Errorf("mask of code %d: %v, want %v", c, got, want)
		}
	}
	if m := Exceptions(ECQueueNew, ECProcessRuntime); m != 0x800040000000 || !m.Has(ECQueueNew) || m.Has(2) || m.Has(0) {
		t.Errorf("the set of two is %v", m)
	}
}

func TestCRIU(t *testing.T) {
	const fd = 77
	var ops []CRIUOp
	sys := fdFunc(func(got int, req Request, arg Pointer) (uintptr, error) {
		if got != fd || req != ReqCRIUOp {
			t.Errorf("request %v on descriptor %d", req, got)
		}
		a := As[CRIUArgs](arg)
		ops = append(ops, a.Op)
		if *a != (CRIUArgs{Op: a.Op}) {
			t.Errorf("%v has more than its operation: %+v", a.Op, *a)
		}
		return 0, nil
	})
	if err := CRIUPause(sys, fd, 42); err != nil {
		t.Error(err)
	}
	if err := CRIUUnpause(sys, fd, 42); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]CRIUOp{CRIUOpProcessInfo, CRIUOpUnpause}, ops); diff != "" {
		t.Errorf("operations (-want +got):\n%s", diff)
	}
}

// Pausing twice cannot be undone, so the caller decides about an interrupted pause.
func TestCRIUIsMadeOnce(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EINTR, unix.EACCES} {
		n := 0
		sys := fdFunc(func(int, Request, Pointer) (uintptr, error) { n++; return 0, errno })
		pause := CRIUPause(sys, 7, 42)
		unpause := CRIUUnpause(sys, 7, 42)
		if n != 2 || !errors.Is(pause, errno) || !errors.Is(unpause, errno) {
			t.Errorf("%d calls, errors %v and %v; want 2 and %v", n, pause, unpause, errno)
		}
		if errno == unix.EACCES && !strings.Contains(pause.Error(), "CAP_CHECKPOINT_RESTORE") {
			t.Errorf("error %q does not name the capability", pause)
		}
	}
}

// fdFunc answers ioctls on any descriptor.
type fdFunc func(fd int, req Request, arg Pointer) (uintptr, error)

func (fdFunc) Open(string, int) (int, error) { return -1, unix.EBADF }
func (fdFunc) Read(int, []byte) (int, error) { return 0, unix.EBADF }
func (fdFunc) Write(int, []byte) (int, error) {
	return 0, unix.EBADF
}
func (fdFunc) Close(int) error { return unix.EBADF }
func (f fdFunc) Ioctl(fd int, req Request, arg Pointer) (uintptr, error) {
	return f(fd, req, arg)
}

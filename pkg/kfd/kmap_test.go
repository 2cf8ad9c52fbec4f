package kfd

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestLayoutOfKmapStructures(t *testing.T) {
	want := map[string][]string{
		"KmapInfoArgs 32": {
			"ABIMajor 0 4", "ABIMinor 4 4", "MaxTargets 8 4", "MinLeaseMS 12 4", "MaxLeaseMS 16 4", "Lapses 20 4", "Limited 24 4", "Pad 28 4",
		},
		"KmapQueue 16": {"GPUID 0 4", "ID 4 4", "State 8 4", "Pad 12 4"},
		"KmapTargetArgs 32": {
			"PIDFD 0 4", "Limit 4 4", "QueuesPtr 8 8", "NumQueues 16 4", "NumHeld 20 4", "Result 24 4", "Pad 28 4",
		},
		"KmapSetArgs 40": {
			"TargetsPtr 0 8", "NumTargets 8 4", "TargetSize 12 4", "LeaseMS 16 4", "Flags 20 4", "Grace 24 4", "Failed 28 4", "Cycles 32 4", "Lapses 36 4",
		},
		"KmapOccupancyArgs 48": {
			"GPUID 0 4", "Flags 4 4", "CPSlots 8 4", "CPMapped 12 4", "CPHeld 16 4", "SDMASlots 20 4", "SDMAMapped 24 4", "SDMAHeld 28 4",
			"OverSubscribed 32 4", "Limited 36 4", "Pad 40 8",
		},
	}
	got := map[string][]string{}
	for _, s := range []reflect.Type{
		reflect.TypeFor[KmapInfoArgs](), reflect.TypeFor[KmapQueue](), reflect.TypeFor[KmapTargetArgs](),
		reflect.TypeFor[KmapSetArgs](), reflect.TypeFor[KmapOccupancyArgs](),
	} {
		key := fmt.Sprintf("%s %d", s.Name(), s.Size())
		for f := range s.Fields() {
			if f.Name != "_" {
				got[key] = append(got[key], fmt.Sprintf("%s %d %d", f.Name, f.Offset, f.Type.Size()))
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kfd_kmap.h (-) and this package (+) differ:\n%s", diff)
	}
}

func TestKmapRequestNumbers(t *testing.T) {
	const readWrite, magic = 3 << 30, 0xEB << 8
	got := map[string]Request{}
	for _, req := range []Request{ReqKmapInfo, ReqKmapSet, ReqKmapOccupancy} {
		got[req.String()] = req
	}
	want := map[string]Request{
		"KMAP_INFO": readWrite | 32<<16 | magic, "KMAP_SET": readWrite | 40<<16 | magic | 1, "KMAP_OCCUPANCY": readWrite | 48<<16 | magic | 2,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kfd_kmap.h (-) and this package (+) differ:\n%s", diff)
	}
}

// kmapOf answers KMAP_INFO with version 1.0, and calls f for other ioctls.
func kmapOf(f ioctlFunc) ioctlFunc {
	return func(req Request, arg Pointer) (uintptr, error) {
		if req == ReqKmapInfo {
			*As[KmapInfoArgs](arg) = KmapInfoArgs{
				ABIMajor: 1, MaxTargets: KmapMaxTargets, MinLeaseMS: KmapMinLeaseMS, MaxLeaseMS: KmapMaxLeaseMS, Lapses: 3, Limited: 2,
			}
			return 0, nil
		}
		return f(req, arg)
	}
}

func openKmap(t *testing.T, f ioctlFunc) *Kmap {
	t.Helper()
	k, err := OpenKmapWith(kmapOf(f), KmapPath)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
	return k
}

// noFile is a Sys where nothing can be opened.
type noFile struct {
	ioctlFunc
	errno unix.Errno
}

func (n noFile) Open(string, int) (int, error) { return -1, n.errno }

func TestProbeTellsWhyTheExtensionCannotBeUsed(t *testing.T) {
	version := func(major, minor uint32) Sys {
		return ioctlFunc(func(_ Request, arg Pointer) (uintptr, error) {
			info := As[KmapInfoArgs](arg)
			info.ABIMajor, info.ABIMinor = major, minor
			return 0, nil
		})
	}
	for name, c := range map[string]struct {
		sys  Sys
		want KmapSupport
		text string
	}{
		"ready":          {version(1, 0), KmapReady, ""},
		"newer minor":    {version(1, 7), KmapReady, ""},
		"no file":        {noFile{errno: unix.ENOENT}, KmapMissing, "the kernel has not the extension"},
		"no device":      {noFile{errno: unix.ENODEV}, KmapMissing, "not loaded"},
		"no driver":      {noFile{errno: unix.ENXIO}, KmapMissing, "not loaded"},
		"mode":           {noFile{errno: unix.EACCES}, KmapDenied, "only root"},
		"capability":     {noFile{errno: unix.EPERM}, KmapDenied, "CAP_SYS_ADMIN"},
		"no descriptors": {noFile{errno: unix.EMFILE}, KmapUnknown, "too many open files"},
		"other file":     {refuse(unix.ENOTTY), KmapForeign, "its ABI is another one"},
		"newer major":    {version(2, 1), KmapForeign, "version 2.1, and 1.x is supported"},
		"major 0":        {version(0, 9), KmapForeign, "version 0.9"},
		"lost right":     {refuse(unix.EPERM), KmapDenied, "CAP_SYS_ADMIN"},
		"no errno":       {ioctlFunc(func(Request, Pointer) (uintptr, error) { return 0, os.ErrInvalid }), KmapUnknown, "invalid argument"},
	} {
		t.Run(name, func(t *testing.T) {
			_, got, err := ProbeKmap(c.sys, KmapPath)
			if got != c.want || (err == nil) != (got == KmapReady) {
				t.Fatalf("got %v, %v; want %v", got, err, c.want)
			}
			if err != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("%q does not say %q", err, c.text)
			}
		})
	}
}

func TestKmapInfo(t *testing.T) {
	want := KmapInfo{
		Version: Version{Major: 1}, MaxTargets: 256, MinLease: 100 * time.Millisecond, MaxLease: time.Minute, Lapses: 3, Limited: 2,
	}
	got, err := openKmap(t, refuse(unix.EBADF)).Info()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestKmapSet compares what is sent with what was asked, and the answer with what the driver
// wrote.
func TestKmapSet(t *testing.T) {
	room := make([]KmapQueue, 3)
	list := []KmapQueue{{GPUID: 7, ID: 0, State: KmapMapped}, {GPUID: 7, ID: 4, State: KmapHeld | KmapEvicted}}
	k := openKmap(t, func(req Request, arg Pointer) (uintptr, error) {
		args := As[KmapSetArgs](arg)
		targets := SliceAt[KmapTargetArgs](args.TargetsPtr, int(args.NumTargets))
		sent := []KmapTargetArgs{
			{PIDFD: 5, Limit: 1, QueuesPtr: PointerToSlice(room), NumQueues: 3},
			{PIDFD: 6, Limit: 0},
			{PIDFD: 9, Limit: KmapNoLimit},
		}
		if req != ReqKmapSet || !slices.Equal(targets, sent) {
			t.Errorf("sent %v with %v, want %v", req, targets, sent)
		}
		want := KmapSetArgs{TargetsPtr: args.TargetsPtr, NumTargets: 3, TargetSize: 32, LeaseMS: 1500, Grace: 4}
		if *args != want {
			t.Errorf("sent %+v, want %+v", *args, want)
		}
		copy(room, list)
		targets[0].NumQueues, targets[0].NumHeld = 2, 1
		targets[1].Result = -int32(unix.EBUSY)
		targets[2].NumQueues, targets[2].NumHeld, targets[2].Result = 5, 0, -int32(unix.EIO)
		args.Failed, args.Cycles, args.Lapses = 2, 1, 6
		return 0, nil
	})
	got, err := k.Set([]KmapTarget{
		{PIDFD: 5, PID: 50, Limit: 1, Queues: room}, {PIDFD: 6, PID: 60}, {PIDFD: 9, Limit: KmapNoLimit},
	}, 1500*time.Millisecond+999*time.Microsecond, 4)
	if err != nil {
		t.Fatal(err)
	}
	want := KmapAnswer{
		Results: []KmapResult{
			{Total: 2, Held: 1, Queues: list},
			{Err: &Error{Op: "KMAP_SET", PID: 60, Errno: unix.EBUSY}},
			{Err: &Error{Op: "KMAP_SET", Errno: unix.EIO}, Total: 5},
		},
		Failed: 2, Cycles: 1, Lapses: 6,
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b *Error) bool { return *a == *b })); diff != "" {
		t.Error(diff)
	}
	const text = "KMAP_SET of process 60: device or resource busy: another program limits the process; end it, or wait until its lease has ended"
	if got.Results[1].Err.Error() != text {
		t.Errorf("got %q, want %q", got.Results[1].Err, text)
	}
}

func TestKmapLeaseBeyondTheFieldIsNotCutOff(t *testing.T) {
	for lease, want := range map[time.Duration]uint32{
		-time.Hour: 0, 0: 0, 99999 * time.Microsecond: 99, time.Minute: 60000, 1 << 62: 1<<32 - 1,
	} {
		var got uint32
		k := openKmap(t, func(_ Request, arg Pointer) (uintptr, error) {
			got = As[KmapSetArgs](arg).LeaseMS
			return 0, nil
		})
		if _, err := k.Set(nil, lease, 0); err != nil || got != want {
			t.Errorf("a lease of %v is sent as %d ms (%v), want %d", lease, got, err, want)
		}
	}
}

func TestKmapSetIsNotRepeated(t *testing.T) {
	calls := 0
	k := openKmap(t, func(Request, Pointer) (uintptr, error) { calls++; return 0, unix.EINTR })
	if _, err := k.Set(nil, time.Second, 0); !errors.Is(err, unix.EINTR) || calls != 1 {
		t.Errorf("%d calls, %v; want one", calls, err)
	}
}

func TestKmapAnswersThatContradictThemselves(t *testing.T) {
	for name, change := range map[string]func(*KmapSetArgs, *KmapTargetArgs){
		"positive result":  func(s *KmapSetArgs, a *KmapTargetArgs) { a.Result, s.Failed = 1, 1 },
		"no errno":         func(s *KmapSetArgs, a *KmapTargetArgs) { a.Result, s.Failed = -4096, 1 },
		"more held":        func(_ *KmapSetArgs, a *KmapTargetArgs) { a.NumHeld = 3 },
		"too many queues":  func(_ *KmapSetArgs, a *KmapTargetArgs) { a.NumQueues = KmapMaxRoom + 1 },
		"uncounted":        func(_ *KmapSetArgs, a *KmapTargetArgs) { a.Result = -int32(unix.EIO) },
		"counted too many": func(s *KmapSetArgs, _ *KmapTargetArgs) { s.Failed = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			k := openKmap(t, func(_ Request, arg Pointer) (uintptr, error) {
				args := As[KmapSetArgs](arg)
				target := &SliceAt[KmapTargetArgs](args.TargetsPtr, 1)[0]
				target.NumQueues = 2
				change(args, target)
				return 0, nil
			})
			if got, err := k.Set([]KmapTarget{{PIDFD: 5}}, time.Second, 0); !errors.Is(err, ErrInconsistent) {
				t.Errorf("got %+v, %v; want %v", got, err, ErrInconsistent)
			}
		})
	}
}

func TestKmapOccupancy(t *testing.T) {
	k := openKmap(t, func(req Request, arg Pointer) (uintptr, error) {
		args := As[KmapOccupancyArgs](arg)
		if want := (KmapOccupancyArgs{GPUID: 7}); req != ReqKmapOccupancy || *args != want {
			t.Errorf("sent %v with %+v, want %+v", req, *args, want)
		}
		args.CPSlots, args.CPMapped, args.CPHeld, args.SDMASlots, args.SDMAMapped, args.SDMAHeld = 24, 30, 2, 16, 3, 1
		args.OverSubscribed, args.Limited = 1, 4
		return 0, nil
	})
	want := KmapOccupancyArgs{
		GPUID:   7,
		CPSlots: 24, CPMapped: 30, CPHeld: 2, SDMASlots: 16, SDMAMapped: 3, SDMAHeld: 1, OverSubscribed: 1, Limited: 4,
	}
	if got, err := k.Occupancy(7); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	k = openKmap(t, refuse(unix.ENODEV))
	if _, err := k.Occupancy(7); err == nil || err.Error() != "KMAP_OCCUPANCY GPU 7: no such device: unknown GPU" {
		t.Errorf("unexpected error %v", err)
	}
}

func TestKmapQueueStateHasWords(t *testing.T) {
	for state, want := range map[KmapQueueState]string{
		0: "idle", KmapMapped: "mapped", KmapHeld | KmapEvicted | KmapSuspended: "held+evicted+suspended", KmapHeld | 0x30: "held+failed+0x20",
	} {
		if state.String() != want {
			t.Errorf("%d is %q, want %q", uint32(state), state, want)
		}
	}
}

// FuzzKmapAnswer has the driver write anything: the answer is an error, or is consistent.
func FuzzKmapAnswer(f *testing.F) {
	f.Add(uint32(2), uint32(1), int32(0), uint32(0))
	f.Add(uint32(9), uint32(9), -int32(unix.EIO), uint32(1))
	f.Add(^uint32(0), ^uint32(0), int32(-1<<31), ^uint32(0))
	f.Fuzz(func(t *testing.T, total, held uint32, result int32, failed uint32) {
		room := make([]KmapQueue, 4)
		array := []KmapTargetArgs{{NumQueues: total, NumHeld: held, Result: result}}
		got, err := kmapAnswer(&KmapSetArgs{Failed: failed}, array, []KmapTarget{{Queues: room}})
		if err != nil {
			if !errors.Is(err, ErrInconsistent) {
				t.Fatal(err)
			}
			return
		}
		r := got.Results[0]
		if r.Held > r.Total || len(r.Queues) > r.Total || (r.Err != nil) != (got.Failed == 1) || (result == 0) != (r.Err == nil) {
			t.Fatalf("%d queues, %d held, result %d, %d failed became %+v", total, held, result, failed, got)
		}
	})
}

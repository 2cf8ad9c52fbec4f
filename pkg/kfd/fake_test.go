package kfd

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"
)

// ioctlFunc is a Sys that answers ioctls. Files open and close, and reads fail.
type ioctlFunc func(req Request, arg Pointer) (uintptr, error)

const fakeFD = 3

func (ioctlFunc) Open(string, int) (int, error)  { return fakeFD, nil }
func (ioctlFunc) Read(int, []byte) (int, error)  { return 0, unix.EBADF }
func (ioctlFunc) Write(int, []byte) (int, error) { return 0, unix.EBADF }
func (ioctlFunc) Close(int) error                { return nil }
func (f ioctlFunc) Ioctl(_ int, req Request, arg Pointer) (uintptr, error) {
	return f(req, arg)
}

// ofVersion answers GET_VERSION, and calls f for other ioctls.
func ofVersion(minor uint32, f ioctlFunc) ioctlFunc {
	return func(req Request, arg Pointer) (uintptr, error) {
		if req == ReqGetVersion {
			v := As[GetVersionArgs](arg)
			v.Major, v.Minor = 1, minor
			return 0, nil
		}
		return f(req, arg)
	}
}

// open returns a device of interface version 1.minor whose ioctls f answers.
func open(t *testing.T, minor uint32, f ioctlFunc) *Device {
	t.Helper()
	d, err := OpenWith(ofVersion(minor, f), DevicePath)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// refuse fails every call with an errno.
func refuse(errno unix.Errno) ioctlFunc {
	return func(Request, Pointer) (uintptr, error) { return 0, errno }
}

// interrupted fails n calls with EINTR and then calls f; *calls counts the calls.
func interrupted(n int, calls *int, f ioctlFunc) ioctlFunc {
	return func(req Request, arg Pointer) (uintptr, error) {
		if *calls++; *calls <= n {
			if req == ReqDbgTrap {
				scribble(arg)
			}
			return 0, unix.EINTR
		}
		return f(req, arg)
	}
}

// scribble overwrites what the driver may write to, as an interrupted call might.
func scribble(arg Pointer) {
	switch trapOf(arg) {
	case TrapSuspendQueues:
		s := As[TrapSuspendQueuesArgs](arg)
		for i := range s.NumQueues {
			SliceAt[uint32](s.QueueArrayPtr, int(s.NumQueues))[i] |= QueueInvalidMask | QueueErrorMask
		}
	case TrapResumeQueues:
		s := As[TrapResumeQueuesArgs](arg)
		for i := range SliceAt[uint32](s.QueueArrayPtr, int(s.NumQueues)) {
			SliceAt[uint32](s.QueueArrayPtr, int(s.NumQueues))[i] |= QueueInvalidMask
		}
	case TrapQueryDebugEvent:
		q := As[TrapQueryDebugEventArgs](arg)
		q.ExceptionMask, q.GPUID, q.QueueID = 1, 2, 3
	case TrapQueryExceptionInfo:
		As[TrapQueryExceptionInfoArgs](arg).InfoSize = 0
	case TrapGetQueueSnapshot, TrapGetDeviceSnapshot:
		s := As[TrapQueueSnapshotArgs](arg)
		s.NumQueues, s.EntrySize = 0, 0
	default:
	}
}

// trapOf returns the operation of a DBG_TRAP call: the same place in every arm.
func trapOf(arg Pointer) TrapOp { return As[TrapDisableArgs](arg).Op }

// words returns 32-bit words in the machine's byte order, as a structure has them in
// memory.
func words(ws ...uint32) []byte {
	var b []byte
	for _, w := range ws {
		b = binary.NativeEndian.AppendUint32(b, w)
	}
	return b
}

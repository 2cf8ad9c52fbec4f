package kfdtest

import (
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The methods below do what a ROCm runtime does, in one call each. Errors are errnos.

// OpenKFD opens the driver.
func (t *Thread) OpenKFD() (fd int, err error) {
	return t.Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC)
}

// StartRuntime opens the driver and enables the runtime, which must precede the first
// queue.
func (t *Thread) StartRuntime() (fd int, err error) {
	if fd, err = t.OpenKFD(); err != nil {
		return fd, err
	}
	return fd, t.RuntimeEnable(fd)
}

// RuntimeEnable is RUNTIME_ENABLE with the mode of a runtime. With a debugger it waits.
func (t *Thread) RuntimeEnable(fd int) error {
	args := kfdabi.RuntimeEnableArgs{RDebug: 0x7f0000001000, ModeMask: kfdabi.RuntimeEnableModeEnable | kfdabi.RuntimeEnableModeTTMPSave}
	_, err := t.Ioctl(fd, kfdabi.ReqRuntimeEnable, kfd.PointerTo(&args))
	return err
}

// RuntimeDisable is RUNTIME_ENABLE without the mode, as at a clean exit. With a debugger
// it waits.
func (t *Thread) RuntimeDisable(fd int) error {
	var args kfdabi.RuntimeEnableArgs
	_, err := t.Ioctl(fd, kfdabi.ReqRuntimeEnable, kfd.PointerTo(&args))
	return err
}

// CreateQueue creates a queue of type kfd.QueueTypeComputeAQL or another, with the
// priority and the percentage of a runtime, and with unmapped addresses.
func (t *Thread) CreateQueue(fd int, gpu gpreempt.GPUID, queueType uint32) (id uint32, err error) {
	t.p.m.mu.Lock()
	t.p.m.inodes++
	ring := uint64(t.p.m.inodes) << 20
	t.p.m.mu.Unlock()
	args := kfdabi.CreateQueueArgs{
		RingBaseAddress: ring, WritePointerAddress: ring + 0x80000, ReadPointerAddress: ring + 0x80008, RingSize: 16384,
		GPUID: uint32(gpu), QueueType: queueType, QueuePercentage: 100, QueuePriority: 7,
		CtxSaveRestoreAddress: ring + 0x90000, CtxSaveRestoreSize: 4096, CtlStackSize: 4096,
	}
	_, err = t.Ioctl(fd, kfdabi.ReqCreateQueue, kfd.PointerTo(&args))
	return args.QueueID, err
}

// DestroyQueue destroys a queue. It waits while the queue is suspended.
func (t *Thread) DestroyQueue(fd int, id uint32) error {
	args := kfdabi.DestroyQueueArgs{QueueID: id}
	_, err := t.Ioctl(fd, kfdabi.ReqDestroyQueue, kfd.PointerTo(&args))
	return err
}

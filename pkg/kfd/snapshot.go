package kfd

import "fmt"

const (
	// firstRoom is the number of entries in the buffer of the first attempt. ROCm creates
	// a few queues for each process and GPU.
	firstRoom = 64
	// spareRoom is for queues created between two attempts.
	spareRoom = 16
	// maxAttempts bounds a race against a target that creates queues continuously.
	maxAttempts = 8
	// maxEntries is more than the largest snapshot: MaxQueues, and a host has fewer GPUs.
	maxEntries = 4 * MaxQueues
)

// Snapshot returns the queues of pid, the newest first, and clears the exceptions in
// clearMask on each of them (pqm_get_queue_snapshot). ExceptionStatus of an entry has the
// exceptions before that. A queue can be suspended after ECQueueNew was cleared.
//
// The list is complete: if the buffer was too small the call is repeated with a larger
// one, and ExceptionStatus includes what the earlier attempts cleared. Fields that the
// driver does not have are zero. With an empty clearMask an interrupted call is repeated;
// otherwise it returns EINTR, and the cleared exceptions are lost. ErrInconsistent reports
// an impossible result, or queues that are created faster than they can be listed. Other
// errors are at [Error].
func (d *Device) Snapshot(pid int32, clearMask ExceptionMask) ([]QueueSnapshotEntry, error) {
	entries, err := list(d, pid, TrapGetQueueSnapshot, clearMask, func(e *QueueSnapshotEntry) (uint32, *ExceptionMask) {
		return e.QueueID, &e.ExceptionStatus
	})
	if err != nil {
		return nil, fmt.Errorf("list the queues of process %d: %w", pid, err)
	}
	return entries, nil
}

// DeviceSnapshot returns the GPU nodes that pid can use, in the driver's order
// (kfd_dbg_trap_device_snapshot). The description of Snapshot applies, without a clearMask.
func (d *Device) DeviceSnapshot(pid int32) ([]DeviceInfoEntry, error) {
	entries, err := list(d, pid, TrapGetDeviceSnapshot, 0, func(e *DeviceInfoEntry) (uint32, *ExceptionMask) {
		return e.GPUID, &e.ExceptionStatus
	})
	if err != nil {
		return nil, fmt.Errorf("list the GPUs of process %d: %w", pid, err)
	}
	return entries, nil
}

// snapshot makes one GET_QUEUE_SNAPSHOT or GET_DEVICE_SNAPSHOT call, whose structures are the
// same, for as many entries as fit buf. It returns the number of entries, including those that
// did not fit, and the bytes that the driver filled in each. If buf is empty they are only counted.
func (d *Device) snapshot(pid int32, op TrapOp, clearMask ExceptionMask, buf []byte, stride int) (total, filled int, err error) {
	var args TrapQueueSnapshotArgs
	err = once(clearMask != 0, func() error {
		args = TrapQueueSnapshotArgs{
			PID: uint32(pid), Op: op, ExceptionMask: clearMask,
			SnapshotBufPtr: PointerToSlice(buf), NumQueues: uint32(len(buf) / stride), EntrySize: uint32(stride),
		}
		_, err := d.trap(pid, op, PointerTo(&args))
		return err
	})
	return int(args.NumQueues), int(args.EntrySize), err
}

// list takes snapshots until one is complete. of returns the id of an entry and its exceptions,
// to which those are added that the earlier snapshots cleared.
func list[T QueueSnapshotEntry | DeviceInfoEntry](
	d *Device, pid int32, op TrapOp, clearMask ExceptionMask, of func(*T) (id uint32, raised *ExceptionMask),
) ([]T, error) {
	stride := len(bytesOf(new(T)))
	cleared := map[uint32]ExceptionMask{}
	room := firstRoom
	for range maxAttempts {
		buf := make([]byte, room*stride)
		total, filled, err := d.snapshot(pid, op, clearMask, buf, stride)
		if err != nil {
			return nil, err
		}
		entries, err := decodeEntries[T](buf, total, filled)
		if err != nil {
			return nil, err
		}
		for i := range entries {
			id, raised := of(&entries[i])
			*raised |= cleared[id]
			cleared[id] = *raised & clearMask
		}
		if total <= room {
			return entries, nil
		}
		room = total + spareRoom
	}
	return nil, fmt.Errorf("%w: the list grew at each of %d attempts", ErrInconsistent, maxAttempts)
}

// decodeEntries returns the entries in buf, of the driver's total, that have one T after the
// other. Bytes of an entry that the driver did not fill are zero.
func decodeEntries[T QueueSnapshotEntry | DeviceInfoEntry](buf []byte, total, filled int) ([]T, error) {
	stride := len(bytesOf(new(T)))
	switch {
	case total > maxEntries:
		return nil, fmt.Errorf("%w: a list of %d entries", ErrInconsistent, total)
	case filled == 0 || filled > stride:
		return nil, fmt.Errorf("%w: it filled %d bytes of %d", ErrInconsistent, filled, stride)
	}
	entries := make([]T, min(total, len(buf)/stride))
	for i := range entries {
		copy(bytesOf(&entries[i]), buf[i*stride:][:filled])
	}
	return entries, nil
}

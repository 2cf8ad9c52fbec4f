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

// queueEntrySize is the bytes from one entry to the next.
var queueEntrySize = uint32(len(bytesOf(new(QueueSnapshotEntry))))

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
	cleared := map[uint32]ExceptionMask{}
	entries, err := grow(func(room int) (buf []byte, a answer, err error) {
		buf = make([]byte, room*int(queueEntrySize))
		err = once(clearMask != 0, func() (err error) {
			a, err = d.queueSnapshot(pid, clearMask, buf)
			return err
		})
		return buf, a, err
	}, queueEntrySize, func(e *QueueSnapshotEntry) {
		cleared[e.QueueID] |= e.ExceptionStatus & clearMask
	})
	if err != nil {
		return nil, fmt.Errorf("list the queues of process %d: %w", pid, err)
	}
	for i := range entries {
		entries[i].ExceptionStatus |= cleared[entries[i].QueueID]
	}
	return entries, nil
}

// queueSnapshot makes one GET_QUEUE_SNAPSHOT call for as many queues as fit buf. If buf is
// empty the queues are only counted.
func (d *Device) queueSnapshot(pid int32, clearMask ExceptionMask, buf []byte) (answer, error) {
	args := TrapQueueSnapshotArgs{
		PID:            uint32(pid),
		Op:             TrapGetQueueSnapshot,
		ExceptionMask:  clearMask,
		SnapshotBufPtr: PointerToSlice(buf),
		NumQueues:      uint32(len(buf)) / queueEntrySize,
		EntrySize:      queueEntrySize,
	}
	_, err := d.trap(pid, TrapGetQueueSnapshot, PointerTo(&args))
	return answer{total: args.NumQueues, filled: args.EntrySize}, err
}

// DeviceSnapshot returns the GPU nodes that pid can use, in the driver's order, and clears
// the exceptions in clearMask on each of them (kfd_dbg_trap_device_snapshot). The
// description of Snapshot applies, by GPUID.
func (d *Device) DeviceSnapshot(pid int32, clearMask ExceptionMask) ([]DeviceInfoEntry, error) {
	stride := d.profile.DeviceInfoSize
	cleared := map[uint32]ExceptionMask{}
	entries, err := grow(func(room int) (buf []byte, a answer, err error) {
		buf = make([]byte, room*int(stride))
		err = once(clearMask != 0, func() error {
			args := TrapDeviceSnapshotArgs{
				PID:            uint32(pid),
				Op:             TrapGetDeviceSnapshot,
				ExceptionMask:  clearMask,
				SnapshotBufPtr: PointerToSlice(buf),
				NumDevices:     uint32(room),
				EntrySize:      stride,
			}
			_, err := d.trap(pid, TrapGetDeviceSnapshot, PointerTo(&args))
			a = answer{total: args.NumDevices, filled: args.EntrySize}
			return err
		})
		return buf, a, err
	}, stride, func(e *DeviceInfoEntry) {
		cleared[e.GPUID] |= e.ExceptionStatus & clearMask
	})
	if err != nil {
		return nil, fmt.Errorf("list the GPUs of process %d: %w", pid, err)
	}
	for i := range entries {
		entries[i].ExceptionStatus |= cleared[entries[i].GPUID]
	}
	return entries, nil
}

// answer is the result of a snapshot call: the number of entries, including those that did
// not fit, and the bytes that the driver filled in each.
type answer struct {
	total  uint32
	filled uint32
}

// grow takes snapshots until one is complete, and calls partial with the entries of the
// others. Entries are stride bytes apart, independent of how many the driver fills.
func grow[T QueueSnapshotEntry | DeviceInfoEntry](
	take func(room int) (buf []byte, a answer, err error), stride uint32, partial func(*T),
) ([]T, error) {
	room := firstRoom
	for range maxAttempts {
		buf, a, err := take(room)
		if err != nil {
			return nil, err
		}
		entries, err := decodeEntries[T](buf, a, stride)
		if err != nil || int(a.total) <= room {
			return entries, err
		}
		for i := range entries {
			partial(&entries[i])
		}
		room = int(a.total) + spareRoom
	}
	return nil, fmt.Errorf("%w: the list grew at each of %d attempts", ErrInconsistent, maxAttempts)
}

// decodeEntries returns the entries in buf. Bytes of an entry that the driver did not fill
// are zero.
func decodeEntries[T QueueSnapshotEntry | DeviceInfoEntry](buf []byte, a answer, stride uint32) ([]T, error) {
	switch {
	case a.total > maxEntries:
		return nil, fmt.Errorf("%w: a list of %d entries", ErrInconsistent, a.total)
	case a.filled == 0 || a.filled > stride:
		return nil, fmt.Errorf("%w: it filled %d bytes of %d", ErrInconsistent, a.filled, stride)
	}
	entries := make([]T, min(int(a.total), len(buf)/int(stride)))
	for i := range entries {
		at := i * int(stride)
		copy(bytesOf(&entries[i]), buf[at:at+int(a.filled)])
	}
	return entries, nil
}

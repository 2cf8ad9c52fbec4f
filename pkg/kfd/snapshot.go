package kfd

import "fmt"

const (
	// firstRoom is the entries the first attempt at a snapshot has room for. ROCm
	// gives a process a handful of queues for each GPU.
	firstRoom = 64
	// spareRoom is left for queues born between two attempts.
	spareRoom = 16
	// maxAttempts bounds a race against a target that makes queues all the time.
	maxAttempts = 8
	// maxEntries is more than there can be: MaxQueues, and a host has fewer GPUs.
	maxEntries = 4 * MaxQueues
)

// The bytes from one entry to the next.
var queueEntrySize = uint32(len(bytesOf(new(QueueSnapshotEntry))))

// Snapshot lists the queues of pid, the newest first, and clears the exceptions
// in clearMask on each of them (pqm_get_queue_snapshot). ExceptionStatus of an entry
// has what was raised before. Clearing ECQueueNew is what makes a queue
// suspendable.
//
// The list is whole: with too little room the call is made again with more, and
// what the attempts before the last one cleared is in ExceptionStatus too. Fields
// the driver does not have are zero. With clearMask empty an interrupted call is made
// again; otherwise it returns EINTR, and what was cleared is not told.
// ErrInconsistent reports an answer that cannot be, or queues that are born
// faster than they can be listed. Other errors are at [Error].
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

// queueSnapshot makes one GET_QUEUE_SNAPSHOT call with room for what fits buf,
// which may be empty: then the queues are only counted.
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

// DeviceSnapshot lists the GPU nodes pid can see, in the driver's order, and
// clears the exceptions in clearMask on each of them (kfd_dbg_trap_device_snapshot). All
// that is said of Snapshot holds, by GPUID.
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

// answer is what a snapshot call says of the buffer: how many entries there are,
// whether they fitted or not, and how many bytes of each it filled.
type answer struct {
	total  uint32
	filled uint32
}

// grow takes snapshots until one has everything, and shows the entries of those
// that had not to partial. The array advances by stride whatever the driver fills.
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
	return nil, fmt.Errorf("%w: there were more of them at each of %d attempts", ErrInconsistent, maxAttempts)
}

// decodeEntries reads the entries in buf: as many as there are and fit. Bytes of an
// entry that the driver did not fill are zero.
func decodeEntries[T QueueSnapshotEntry | DeviceInfoEntry](buf []byte, a answer, stride uint32) ([]T, error) {
	switch {
	case a.total > maxEntries:
		return nil, fmt.Errorf("%w: it has %d of them", ErrInconsistent, a.total)
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

package kfdemu

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// kmsgPath is the device of the kernel log. The emulated one has only what the emulated driver
// prints, from the time at which it is opened. Opens without O_NONBLOCK are not intercepted.
const kmsgPath = "/dev/kmsg"

// kmsg is the kernel log. A reader has one end of a socket, because a read of that returns one
// record, as the device does. A socket has no position: lseek is ESPIPE.
type kmsg struct {
	mu      sync.Mutex // guards all below
	seq     uint64
	readers []int
}

// open returns the end of a new reader. The caller closes it once the program has its own.
func (k *kmsg) open(flags uint64) (int, error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("make an emulated kernel log: %w", err)
	}
	if flags&unix.O_NONBLOCK != 0 {
		if err := unix.SetNonblock(ends[1], true); err != nil {
			return -1, errors.Join(err, unix.Close(ends[0]), unix.Close(ends[1]))
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.readers = append(k.readers, ends[0])
	return ends[1], nil
}

// write adds a line of the kernel about a device (dev_err). Readers that have gone are
// forgotten, and one that does not read loses lines.
func (k *kmsg) write(at time.Duration, device, text string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.seq++
	record := fmt.Appendf(nil, "3,%d,%d,-;%s\n SUBSYSTEM=pci\n DEVICE=+pci:%s\n", k.seq, at.Microseconds(), text, device)
	kept := k.readers[:0]
	for _, fd := range k.readers {
		if err := unix.Send(fd, record, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err == nil || errors.Is(err, unix.EAGAIN) {
			kept = append(kept, fd)
		} else {
			_ = unix.Close(fd)
		}
	}
	k.readers = kept
}

func (k *kmsg) close() (err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, fd := range k.readers {
		err = errors.Join(err, unix.Close(fd))
	}
	k.readers = nil
	return err
}

// print is driver.Config.Log.
func (e *Emulator) print(id gpreempt.GPUID, text string) {
	bdf := e.rt.GPUs()[e.files.index(id)].BDF
	// The number of a partition stands where the device has its function.
	slot, _, _ := strings.Cut(bdf, ".")
	prefix := "amdgpu " + slot + ".0: "
	if !strings.HasPrefix(e.cfg.Profile, "7.") {
		prefix += "amdgpu: "
	}
	e.kmsg.write(time.Since(e.began), slot+".0", prefix+text)
	e.report(Event{Kind: EventLog, GPU: id, Text: text})
}

// openKmsg answers an open of the kernel log.
func (e *Emulator) openKmsg(c *served, flags uint64) error {
	program, err := e.kmsg.open(flags)
	if err != nil {
		e.trouble("open "+kmsgPath, err)
		return c.Return(0, unix.ENOMEM)
	}
	fd, err := c.AddFD(program, flags&unix.O_CLOEXEC != 0)
	if err = errors.Join(err, unix.Close(program)); err != nil {
		return err
	}
	return c.Return(int64(fd), 0)
}

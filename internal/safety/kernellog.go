package safety

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// alarmInterval is the shortest time between two alarms of one pattern and GPU. A hang
// repeats its messages for seconds.
const alarmInterval = time.Second

// maxRecord is larger than any record, in bytes: a text of 2 KiB, four bytes for each
// escaped byte, and the dictionary.
const maxRecord = 16 << 10

// Alarm is a line of the kernel log about a GPU that fails.
type Alarm struct {
	// GPU is 0 if the line names no GPU.
	GPU gpreempt.GPUID
	// Pattern is the name of the pattern, Line the text of the record.
	Pattern string
	Line    string
	// Issue is a public report in which such a line was seen; "" for none.
	Issue string
	// Doubt is a public report that this version of the driver prints such lines about GPUs
	// that work; "" for none.
	Doubt string
}

// WatchKernelLog reads the kernel log at path, /dev/kmsg, from its end, and calls alarm
// for each line that matches a pattern: once for every GPU at the address that the line
// names, because partitions share one, or once with GPU 0. Lines about devices that gpus
// does not return are ignored. driver is the version of the amdgpu driver, "" for the
// kernel's own. gpus and alarm are called in the calling goroutine; alarm must not block.
//
// It returns nil when ctx ends, and an error if the log cannot be read: no CAP_SYSLOG, no
// such file, or printk.devkmsg=off. Records that are overwritten before they were read
// are lost.
func WatchKernelLog(ctx context.Context, path, driver string, gpus func() []gpreempt.GPU, alarm func(Alarm)) error {
	f, err := openKernelLog(path)
	if err != nil {
		return fmt.Errorf("watch the kernel log: %w: a failing GPU is noticed only when a suspend fails; "+
			"gpreemptd needs CAP_SYSLOG, and a kernel booted without printk.devkmsg=off", err)
	}
	w := newWatcher(driver, gpus, alarm)
	return follow(ctx, f, w.check)
}

// openKernelLog opens the log at its end. It rejects a file without deadlines: a read
// could not be interrupted.
func openKernelLog(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekEnd); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := f.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("%s is not a kernel log device: %w", path, err), f.Close())
	}
	return f, nil
}

// follow calls f with each record of log until ctx ends. It closes log.
func follow(ctx context.Context, log io.ReadCloser, f func(Record)) (err error) {
	closed := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() { closed <- log.Close() }) // interrupts Read
	defer func() {
		if stop() {
			closed <- log.Close()
		}
		err = errors.Join(err, <-closed)
	}()
	buffer := make([]byte, maxRecord)
	for {
		n, err := log.Read(buffer)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EINTR):
			// EPIPE: the next record was overwritten; the one after it comes next.
			continue
		case err != nil:
			return fmt.Errorf("read the kernel log: %w", err)
		}
		record, err := ParseRecord(buffer[:n])
		if err != nil {
			return fmt.Errorf("read the kernel log: %w", err)
		}
		f(record)
	}
}

// watcher makes alarms of records.
type watcher struct {
	driver string
	gpus   func() []gpreempt.GPU
	alarm  func(Alarm)
	last   map[alarmKey]time.Duration
}

// alarmKey identifies repeated alarms.
type alarmKey struct {
	gpu     gpreempt.GPUID
	pattern string
}

func newWatcher(driver string, gpus func() []gpreempt.GPU, alarm func(Alarm)) *watcher {
	return &watcher{driver: driver, gpus: gpus, alarm: alarm, last: map[alarmKey]time.Duration{}}
}

// check calls alarm if the record matches a pattern.
func (w *watcher) check(r Record) {
	pattern, address := match(r)
	if pattern == nil {
		return
	}
	if device, ok := strings.CutPrefix(r.Device, "+pci:"); ok {
		address = device
	}
	if address == "" {
		w.raise(r, pattern, 0)
		return
	}
	for _, gpu := range w.gpus() {
		if slot(gpu.BDF) == slot(address) {
			w.raise(r, pattern, gpu.ID)
		}
	}
}

// raise calls alarm unless it did for the same pattern and GPU less than alarmInterval
// before. The kernel's clock may differ a little from one CPU to another.
func (w *watcher) raise(r Record, p *Pattern, gpu gpreempt.GPUID) {
	key := alarmKey{gpu, p.Name}
	if last, ok := w.last[key]; ok && (r.Time-last).Abs() < alarmInterval {
		return
	}
	w.last[key] = r.Time
	w.alarm(Alarm{GPU: gpu, Pattern: p.Name, Line: r.Text, Issue: p.Issue, Doubt: p.doubt(w.driver)})
}

// slot returns a PCI address without its function. A GPU is function 0 of its slot, but
// the topology replaces the function by the number of a partition
// (kfd_topology_add_device).
func slot(bdf string) string {
	s, _, _ := strings.Cut(bdf, ".")
	return s
}

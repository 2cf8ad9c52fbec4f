// Package breaker hides how the kernel log tells that a GPU is in trouble.
package breaker

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

// every is how often the same alarm of the same GPU is given at the most. A hang
// repeats its messages for seconds.
const every = time.Second

// maxRecord is more than a record can be, in bytes: a text of 2 KiB, four for
// each byte that is escaped, and the dictionary.
const maxRecord = 16 << 10

// Alarm says that a GPU is in trouble.
type Alarm struct {
	// GPU is 0 when the line names none: it may be any of them.
	GPU gpreempt.GPUID
	// Pattern is the name of the pattern, Line the text of the record.
	Pattern string
	Line    string
	// Issue is a public report in which such a line was seen; "" for none.
	Issue string
}

// Watch reads the kernel log at path, /dev/kmsg, from its end on, and returns an
// alarm for each line that tells of a GPU in trouble: one for every GPU at the
// address it names, as partitions share one, or one for GPU 0. Lines about other
// devices than gpus gives are passed over. gpus and alarm are called by the
// calling goroutine; alarm must not block.
//
// It returns nil when ctx ends. An error tells that the log cannot be read (no
// CAP_SYSLOG, no such file, printk.devkmsg=off) or no more. Records overwritten
// before they were read are lost.
func Watch(ctx context.Context, path string, gpus func() []gpreempt.GPU, alarm func(Alarm)) error {
	f, err := open(path)
	if err != nil {
		return fmt.Errorf("watch the kernel log: %w: a GPU in trouble shows only when a suspension fails; "+
			"gpreemptd needs CAP_SYSLOG, and a kernel booted without printk.devkmsg=off", err)
	}
	w := newWatcher(gpus, alarm)
	return follow(ctx, f, w.see)
}

// open opens the log at its end. A file that cannot be waited on is refused: to
// read it would block for good.
func open(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekEnd); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := f.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("%s is no kernel log device: %w", path, err), f.Close())
	}
	return f, nil
}

// follow returns each record of log to see until ctx ends. It closes log.
func follow(ctx context.Context, log io.ReadCloser, see func(Record)) (err error) {
	closed := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() { closed <- log.Close() }) // wakes the reader
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
		see(record)
	}
}

// watcher makes alarms of records.
type watcher struct {
	gpus  func() []gpreempt.GPU
	alarm func(Alarm)
	last  map[repeat]time.Duration
}

// repeat is what counts as the same alarm.
type repeat struct {
	gpu     gpreempt.GPUID
	pattern string
}

func newWatcher(gpus func() []gpreempt.GPU, alarm func(Alarm)) *watcher {
	return &watcher{gpus: gpus, alarm: alarm, last: map[repeat]time.Duration{}}
}

func (w *watcher) see(r Record) {
	pattern, address := match(r)
	if pattern == nil {
		return
	}
	if device, ok := strings.CutPrefix(r.Device, "+pci:"); ok {
		address = device
	}
	if address == "" {
		w.give(r, pattern, 0)
		return
	}
	for _, gpu := range w.gpus() {
		if slot(gpu.BDF) == slot(address) {
			w.give(r, pattern, gpu.ID)
		}
	}
}

// give returns an alarm unless the same was given less than every before. The
// kernel's clock may step back a little from one CPU to another.
func (w *watcher) give(r Record, p *Pattern, gpu gpreempt.GPUID) {
	key := repeat{gpu, p.Name}
	if last, ok := w.last[key]; ok && (r.Time-last).Abs() < every {
		return
	}
	w.last[key] = r.Time
	w.alarm(Alarm{GPU: gpu, Pattern: p.Name, Line: r.Text, Issue: p.Issue})
}

// slot returns a PCI address without its function. A GPU is function 0 of its slot,
// but the topology writes the number of a partition in its place
// (kfd_topology_add_device).
func slot(bdf string) string {
	s, _, _ := strings.Cut(bdf, ".")
	return s
}

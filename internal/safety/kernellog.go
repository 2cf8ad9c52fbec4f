package safety

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"strings"
	"sync"
	"sync/atomic"
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
	// Reset is the queue that the driver has reset, nil for any other line.
	Reset *Reset
}

// KernelLog makes alarms of the lines of the kernel log. Watch and CatchUp may be called by
// several goroutines at once.
type KernelLog struct {
	path string

	mu     sync.Mutex // guards all below; held while records are read and alarms are made
	watch  *watcher
	buffer []byte

	// file is the log while Watch reads it.
	file atomic.Pointer[os.File]
}

// NewKernelLog returns the kernel log at path, /dev/kmsg. alarm is called for each line that
// matches a pattern: once for every GPU at the address that the line names, because partitions
// share one, or once with GPU 0. Lines about devices that gpus does not return are ignored.
// gpus and alarm are called by one goroutine at a time, that of Watch or of CatchUp; they must
// not block, and not call the KernelLog.
func NewKernelLog(path string, gpus func() []gpreempt.GPU, alarm func(Alarm)) *KernelLog {
	return &KernelLog{path: path, watch: newWatcher("", gpus, alarm), buffer: make([]byte, maxRecord)}
}

// Watch reads the log from its end. driver is the version of the amdgpu driver, "" for the
// kernel's own.
//
// It returns nil when ctx ends, and an error if the log cannot be read: no CAP_SYSLOG, no
// such file, or printk.devkmsg=off. Records that are overwritten before they were read
// are lost.
func (l *KernelLog) Watch(ctx context.Context, driver string) error {
	f, err := openKernelLog(l.path)
	if err != nil {
		return fmt.Errorf("watch the kernel log: %w: a failing GPU is noticed only when a suspend fails; "+
			"gpreemptd needs CAP_SYSLOG, and a kernel booted without printk.devkmsg=off", err)
	}
	l.mu.Lock()
	l.watch.driver = driver
	l.mu.Unlock()
	return l.follow(ctx, f)
}

// CatchUp makes the alarms of all records that are in the log now, and of those that Watch is
// working on. It never waits for a record, and does nothing while the log is not watched. The
// driver's lines about a call are in the log when the call returns.
func (l *KernelLog) CatchUp() {
	f := l.file.Load()
	if f == nil {
		return
	}
	conn, err := f.SyscallConn()
	if err == nil {
		var reading error
		err = conn.Control(func(fd uintptr) { reading = l.drain(fd) })
		err = errors.Join(err, reading)
	}
	if err != nil {
		_ = f.Close() // Watch returns, with an error: it has not ended the log
	}
}

// openKernelLog opens the log at its end. It rejects a file without deadlines: a read
// could not be interrupted.
func openKernelLog(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekEnd); err != nil && !isSocket(f) {
		return nil, errors.Join(err, f.Close())
	}
	if err := f.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("%s is not a kernel log device: %w", path, err), f.Close())
	}
	return f, nil
}

// isSocket reports whether the log is an emulated one, which begins at its end.
func isSocket(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode().Type() == fs.ModeSocket
}

// follow makes alarms of the records of f until ctx ends. It closes f.
func (l *KernelLog) follow(ctx context.Context, f *os.File) error {
	stop := context.AfterFunc(ctx, func() { _ = f.Close() }) // interrupts the wait
	defer func() {
		l.file.Store(nil)
		if stop() {
			_ = f.Close() // it was only read
		}
	}()
	conn, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("read the kernel log: %w", err)
	}
	l.file.Store(f)
	var reading error
	err = conn.Read(func(fd uintptr) bool {
		reading = l.drain(fd)
		return reading != nil
	})
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("read the kernel log: %w", errors.Join(reading, err))
}

// drain reads the log to its present end.
func (l *KernelLog) drain(fd uintptr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return readAll(func(b []byte) (int, error) { return syscall.Read(int(fd), b) }, l.buffer, l.watch.check)
}

// readAll calls f with each record until read returns EAGAIN.
func readAll(read func([]byte) (int, error), buffer []byte, f func(Record)) error {
	for {
		n, err := read(buffer)
		switch {
		case errors.Is(err, syscall.EAGAIN):
			return nil
		case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EINTR):
			// EPIPE: the next record was overwritten; the one after it comes next.
			continue
		case err != nil:
			return err
		case n == 0:
			return io.EOF
		}
		record, err := ParseRecord(buffer[:n])
		if err != nil {
			return err
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

// alarmKey identifies repeated alarms: a reset is the same for one queue of one process only.
type alarmKey struct {
	gpu     gpreempt.GPUID
	pattern string
	reset   Reset
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
	maps.DeleteFunc(w.last, func(_ alarmKey, last time.Duration) bool { return (r.Time - last).Abs() >= alarmInterval })
	a := Alarm{GPU: gpu, Pattern: p.Name, Line: r.Text, Issue: p.Issue, Doubt: p.doubt(w.driver)}
	key := alarmKey{gpu: gpu, pattern: p.Name}
	if reset, ok := parseReset(r.Text); ok && p.Name == PatternQueueReset {
		a.Reset, key.reset = &reset, reset
	}
	if _, repeated := w.last[key]; repeated {
		return
	}
	w.last[key] = r.Time
	w.alarm(a)
}

// slot returns a PCI address without its function. A GPU is function 0 of its slot, but
// the topology replaces the function by the number of a partition
// (kfd_topology_add_device).
func slot(bdf string) string {
	s, _, _ := strings.Cut(bdf, ".")
	return s
}

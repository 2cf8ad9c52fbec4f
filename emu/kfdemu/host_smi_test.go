package kfdemu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// seen is a Task that records the streams it installs.
type seen struct {
	*Task
	stream *driver.SMIStream
}

func (s *seen) Install(stream *driver.SMIStream) int {
	s.stream = stream
	return s.Task.Install(stream)
}

// listener is this process as a program that reads events of the driver.
type listener struct {
	t      *testing.T
	h      *Host
	driver *driver.Driver
	task   *seen
	fd     int
}

func (l *listener) call(during func()) {
	l.task.Begin(nil, nil, nil, func(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) })
	during()
	l.task.End()
}

const gpu = 7

func newListener(t *testing.T) *listener {
	t.Helper()
	l := &listener{t: t}
	driver, err := driver.New(driver.Config{Profile: "6.12", Nodes: []driver.Node{{ID: gpu, GFX: 90402}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	l.driver = driver
	l.h, _ = newHost(t)
	l.task = &seen{Task: taskOf(t, l.h, int32(unix.Getpid()))}
	l.fd, err = l.open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	return l
}

// open is SMI_EVENTS.
func (l *listener) open() (fd int, err error) {
	l.t.Helper()
	args := binary.NativeEndian.AppendUint32(nil, gpu)
	args = append(args, 0, 0, 0, 0)
	addr, err := strconv.ParseUint(fmt.Sprintf("%p", args), 0, 64)
	if err != nil {
		l.t.Fatal(err)
	}
	l.call(func() {
		file, err := l.driver.Open(l.task)
		if err != nil {
			l.t.Fatal(err)
		}
		if _, errno := l.driver.Ioctl(l.task, file, kfd.ReqSMIEvents, l.task.Memory(addr)); errno != 0 {
			l.t.Fatal(errno)
		}
		l.driver.Release(file)
	})
	if fd := int32(binary.NativeEndian.Uint32(args[4:])); fd >= 0 {
		return int(fd), nil
	}
	return -1, syscall.Errno(-int32(binary.NativeEndian.Uint32(args[4:])))
}

func (l *listener) close() {
	if l.fd >= 0 {
		unix.Close(l.fd)
	}
	l.fd = -1
}

func (l *listener) subscribe(ids ...kfd.SMIEventID) {
	l.t.Helper()
	n, err := unix.Write(l.fd, binary.NativeEndian.AppendUint64(nil, uint64(kfd.SMIEvents(ids...))))
	if err != nil || n != 8 {
		l.t.Fatal(n, err)
	}
}

// read returns the available data.
func (l *listener) read() string {
	l.t.Helper()
	b := make([]byte, 1<<16)
	n, err := unix.Read(l.fd, b)
	if errors.Is(err, unix.EAGAIN) {
		return ""
	}
	if err != nil {
		l.t.Fatal(err)
	}
	return string(b[:n])
}

// evict causes an event for every GPU, and another one.
func (l *listener) evict() {
	l.t.Helper()
	if err := l.driver.Evict(l.task.MM(), kfdabi.TriggerUserptr); err != nil {
		l.t.Fatal(err)
	}
	if err := l.driver.Restore(l.task.MM()); err != nil {
		l.t.Fatal(err)
	}
}

func TestEventsOfACallCanBeReadWhenItReturns(t *testing.T) {
	l := newListener(t)
	l.subscribe(kfd.SMIQueueEviction)
	l.call(l.evict)
	if got, want := l.read(), fmt.Sprintf("%x ", int(kfd.SMIQueueEviction)); !strings.HasPrefix(got, want) || strings.Count(got, "\n") != 1 {
		t.Errorf("got %q, want a line that begins with %q", got, want)
	}
	l.subscribe() // to no event
	l.call(l.evict)
	if got := l.read(); got != "" {
		t.Errorf("got %q, which was not asked for", got)
	}
}

func TestEventsOutsideOfCallsAreSentBySweep(t *testing.T) {
	l := newListener(t)
	l.subscribe(kfd.SMIQueueEviction)
	l.h.Sweep()
	l.evict()
	if got := l.read(); got != "" {
		t.Errorf("got %q before anybody looked", got)
	}
	l.h.Sweep()
	if got := l.read(); strings.Count(got, "\n") != 1 {
		t.Errorf("got %q, want a line", got)
	}
}

func TestListenerThatDoesNotReadBlocksNoOther(t *testing.T) {
	l := newListener(t)
	l.subscribe(kfd.SMIQueueEviction, kfd.SMIQueueRestore)
	for range 2000 {
		l.call(l.evict)
	}
	var got strings.Builder
	for {
		text := l.read()
		if text == "" {
			break
		}
		got.WriteString(text)
		l.h.Sweep()
	}
	lines := strings.SplitAfter(got.String(), "\n")
	if len(lines) < 10 || len(lines) > 1000 {
		t.Errorf("%d lines were kept", len(lines)-1)
	}
	for _, line := range lines[:len(lines)-1] {
		if fields := strings.Fields(line); len(fields) != 5 {
			t.Errorf("a broken line: %q", line)
		}
	}
	l.call(l.evict)
	if got := l.read(); strings.Count(got, "\n") != 2 {
		t.Errorf("afterwards got %q, want two lines", got)
	}
}

func TestClosedStreamIsReleased(t *testing.T) {
	l := newListener(t)
	l.subscribe(kfd.SMIQueueEviction)
	l.h.Sweep()
	dup, err := unix.FcntlInt(uintptr(l.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	l.close()
	l.h.Sweep()
	l.fd = dup
	l.call(l.evict)
	if got := l.read(); got == "" {
		t.Error("the stream ended with one of two descriptors of it")
	}
	l.close()
	l.h.Sweep()
	l.evict()
	if l.task.stream.Pending() {
		t.Error("the driver still has events for a stream that is closed")
	}
	if n := len(l.h.openStreams()); n != 0 {
		t.Errorf("%d streams are left", n)
	}
}

func TestStreamEndsWithTheHost(t *testing.T) {
	l := newListener(t)
	l.subscribe(kfd.SMIQueueEviction)
	l.call(l.evict)
	l.h.Close()
	if got := l.read(); strings.Count(got, "\n") != 1 {
		t.Errorf("what was given before is lost: %q", got)
	}
	if n, err := unix.Read(l.fd, make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("read gives %d, %v, want the end", n, err)
	}
}

func TestStreamThatCannotBeInstalled(t *testing.T) {
	l := newListener(t)
	for want, install := range map[syscall.Errno]func(int) (int, error){
		unix.EMFILE: func(int) (int, error) { return -1, fmt.Errorf("no room: %w", unix.EMFILE) },
		unix.EPERM:  func(int) (int, error) { return -1, unix.EPERM },
	} {
		l.task.Begin(nil, nil, nil, install)
		if got := l.task.Install(l.task.stream); got != -int(want) {
			t.Errorf("got %d, want %d", got, -int(want))
		}
		l.task.End()
	}
	if got := l.task.Install(l.task.stream); got != -int(unix.ESRCH) {
		t.Errorf("outside of a call: got %d", got)
	}
	l.close()
	l.h.Sweep()
	if n := len(l.h.openStreams()); n != 0 {
		t.Errorf("%d streams are left", n)
	}
}

package kfdemu

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// fileOf returns the file of a thread's descriptor until the test ends.
func fileOf(t *testing.T, task *Task, fd uint64) *eventFile {
	t.Helper()
	f := task.File(uint32(fd))
	if f == nil {
		t.Fatalf("descriptor %d of thread %d is not found", fd, task.tid)
	}
	t.Cleanup(f.Put)
	return f.(*eventFile)
}

// fill writes dots until the pipe is full, and returns how many. With dropped it stops when
// they are lost.
func fill(t *testing.T, f *eventFile) (n int) {
	t.Helper()
	for !f.WriteDot(nil) {
		if n++; n > 1<<20 {
			t.Fatal("the pipe does not fill")
		}
	}
	return n
}

func TestDotsReachTheProgramsPipe(t *testing.T) {
	for name, flags := range map[string]int{"blocking": 0, "non-blocking": unix.O_NONBLOCK} {
		t.Run(name, func(t *testing.T) {
			h, _ := newHost(t)
			c := startProgram(t, nil)
			fds := c.numbers(0, "pipe %d", flags)
			f := fileOf(t, taskOf(t, h, c.pid), fds[1])
			for range 3 {
				if f.WriteDot(nil) {
					t.Error("an empty pipe is full")
				}
			}
			if n := c.number(0, "read %d 10", fds[0]); n != 3 {
				t.Errorf("%d bytes in the pipe, want 3", n)
			}
		})
	}
}

func TestFullBlockingPipeWakesTheDriver(t *testing.T) {
	h, wakes := newHost(t)
	c := startProgram(t, nil)
	fds := c.numbers(0, "pipe 0")
	f := fileOf(t, taskOf(t, h, c.pid), fds[1])
	if n := fill(t, f); n != 65536 {
		t.Errorf("a new pipe takes %d dots, want 65536", n)
	}
	for range 2 { // the wait can be repeated
		if !f.WriteDot(nil) {
			t.Fatal("a full pipe takes a dot")
		}
		h.Sweep()
		select {
		case <-wakes:
			t.Fatal("woken without room")
		default:
		}
		c.number(0, "read %d 4096", fds[0])
		h.Sweep()
		<-wakes
		fill(t, f)
	}
}

func TestFullNonblockingPipeLosesDots(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	fds := c.numbers(0, "pipe %d", unix.O_NONBLOCK)
	f := fileOf(t, taskOf(t, h, c.pid), fds[1])
	for range 65536 + 10 {
		if f.WriteDot(nil) {
			t.Fatal("a pipe that does not block is waited for")
		}
	}
	if n := c.number(0, "read %d 100000", fds[0]); n != 65536 {
		t.Errorf("%d bytes in the pipe, want 65536", n)
	}
}

// pending returns the threads, or processes, with a pending SIGPIPE.
func pending(t *testing.T, line string, tids ...int32) []bool {
	t.Helper()
	var all []bool
	for _, tid := range tids {
		status, err := os.ReadFile(procPath(tid, "status"))
		if err != nil {
			t.Fatal(err)
		}
		set, err := strconv.ParseUint(string(value(status, line)), 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, set>>(unix.SIGPIPE-1)&1 != 0)
	}
	return all
}

func TestBrokenPipeSignalsTheThreadThatWrites(t *testing.T) {
	h, _ := newHost(t)
	owner, writer := startProgram(t, nil), startProgram(t, nil)
	fds := owner.numbers(0, "pipe 0")
	tid := writer.number(0, "thread")
	writer.ok(tid, "block %d", int(unix.SIGPIPE)) // so that it stays pending
	writer.ok(0, "block %d", int(unix.SIGPIPE))
	f := fileOf(t, taskOf(t, h, owner.pid), fds[1])
	owner.ok(0, "close %d", fds[0])
	if f.WriteDot(nil) {
		t.Error("a broken pipe is full")
	}
	if got := pending(t, "SigPnd", tid, writer.pid); got[0] || got[1] {
		t.Errorf("a worker's write sends a signal: %v", got)
	}
	if f.WriteDot(taskOf(t, h, tid)) {
		t.Error("a broken pipe is full")
	}
	if got := pending(t, "SigPnd", tid, writer.pid); !got[0] || got[1] {
		t.Errorf("signalled are the thread: %v, the main thread: %v", got[0], got[1])
	}
	if got := pending(t, "ShdPnd", writer.pid); got[0] {
		t.Error("the process as a whole is signalled")
	}
}

func TestFilesThatCannotBeWritten(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	task := taskOf(t, h, c.pid)
	path := filepath.Join(t.TempDir(), "file")
	fds := c.numbers(0, "pipe 0")
	for what, fd := range map[string]uint64{
		"an eventfd":             c.numbers(0, "eventfd")[0],
		"the end that reads":     fds[0],
		"a directory":            c.numbers(0, "open / 0")[0],
		"a file opened to read":  c.numbers(0, "open /proc/self/exe 0")[0],
		"a file opened to write": c.numbers(0, "open %s %d", path, unix.O_CREAT|unix.O_WRONLY)[0],
	} {
		f := fileOf(t, task, fd)
		for range 2 {
			if f.WriteDot(task) {
				t.Errorf("%s is full", what)
			}
		}
	}
	if text, err := os.ReadFile(path); err != nil || !bytes.Equal(text, []byte(".")) {
		t.Errorf("the file holds %q, %v: want a dot at its beginning, however many were written", text, err)
	}
	for what, fd := range map[string]uint64{
		"a descriptor that is not open": 1000,
		"minus one":                     0xffffffff,
		"a path without a file":         c.numbers(0, "open / %d", unix.O_PATH)[0],
	} {
		if f := task.File(uint32(fd)); f != nil {
			t.Errorf("%s is %v", what, f)
			f.Put()
		}
	}
	if got := pending(t, "SigPnd", c.pid); got[0] {
		t.Error("the program was signalled")
	}
}

func TestFileStaysOpenUntilPut(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	fds := c.numbers(0, "pipe %d", unix.O_NONBLOCK)
	f := taskOf(t, h, c.pid).File(uint32(fds[1]))
	c.ok(0, "close %d", fds[1])
	if again := c.do(0, "read %d 10", fds[0]); again != unix.EAGAIN.Error() {
		t.Errorf("the program reads %q while the driver has the other end", again)
	}
	f.Put()
	if f.WriteDot(nil) {
		t.Error("a released file is full")
	}
	f.Put() // a second call has no effect
	if n := c.number(0, "read %d 10", fds[0]); n != 0 {
		t.Errorf("%d bytes, want the end", n)
	}
}

func TestThreadWithItsOwnDescriptorTable(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	tid := c.number(0, "thread")
	c.ok(tid, "unshare-files")
	fds := c.numbers(tid, "pipe 0")
	f := taskOf(t, h, tid).File(uint32(fds[1]))
	if f == nil {
		if fd, err := unix.PidfdOpen(int(tid), unix.O_EXCL); errors.Is(err, unix.EINVAL) {
			t.Skip("needs Linux 6.9 (PIDFD_THREAD)")
		} else {
			unix.Close(fd)
		}
		t.Fatal("the thread's own pipe is not found")
	}
	defer f.Put()
	f.WriteDot(nil)
	if n := c.number(tid, "read %d 10", fds[0]); n != 1 {
		t.Errorf("%d bytes, want 1", n)
	}
	if f := taskOf(t, h, c.pid).File(uint32(fds[1])); f != nil {
		t.Error("the main thread has the other thread's pipe")
		f.Put()
	}
}

func TestFilesOfSeveralThreadsAtOnce(t *testing.T) {
	h, wakes := newHost(t)
	c := startProgram(t, nil)
	fds := c.numbers(0, "pipe 0")
	task := taskOf(t, h, c.pid)
	waiting := fileOf(t, task, fds[1])
	fill(t, waiting)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 50 {
				f := task.File(uint32(fds[1]))
				if f == nil || !f.WriteDot(task) {
					t.Error("a full pipe takes a dot, or is not found")
					return
				}
				f.Put()
			}
		})
	}
	all.Wait()
	c.number(0, "read %d 65536", fds[0])
	h.Sweep()
	<-wakes
	if waiting.WriteDot(task) {
		t.Error("an empty pipe is full")
	}
}

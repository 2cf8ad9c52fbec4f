package driver_test

import (
	"encoding/binary"
	"os"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// The driver's rules are tested through package kfdtest. These tests cover what an
// implementation of Task and Memory other than kfdtest's needs.

// task is a thread that is its own process.
type task struct {
	tid         int32
	tracer      driver.Task
	interrupted bool
	others      map[int32]*task
}

func (t *task) TID() int32                      { return t.tid }
func (t *task) Leader() driver.Task             { return t }
func (t *task) MM() driver.MM                   { return t.tid }
func (t *task) Tracer() driver.Task             { return t.tracer }
func (t *task) Interrupted() bool               { return t.interrupted }
func (t *task) Capable(driver.Capability) bool  { return true }
func (t *task) PIDInside() int32                { return t.tid }
func (t *task) Pidfd(int32) (driver.Task, bool) { return nil, false }
func (t *task) Comm() string                    { return "task" }
func (t *task) Install(*driver.SMIStream) int   { return 9 }
func (t *task) File(fd uint32) driver.EventFile { return &file{} }
func (t *task) Find(pid int32) driver.Task {
	if o := t.others[pid]; o != nil {
		return o
	}
	return nil
}

type file struct{ dots int }

func (f *file) WriteDot(driver.Task) bool { f.dots++; return false }
func (f *file) Put()                      {}

// space is memory of another process. Addresses in it are numbers.
type space struct {
	bytes []byte
	at    uint64
}

func (m space) in(n int) bool { return m.at+uint64(n) <= uint64(len(m.bytes)) }

func (m space) Read(p []byte) bool {
	return m.in(len(p)) && copy(p, m.bytes[m.at:]) == len(p)
}

func (m space) Write(p []byte) bool {
	return m.in(len(p)) && copy(m.bytes[m.at:], p) == len(p)
}

func (m space) At(off int) driver.Memory { return space{m.bytes, m.at + uint64(off)} }

func (m space) Pointer(off int) driver.Memory {
	to := binary.NativeEndian.Uint64(m.bytes[m.at+uint64(off):])
	if to == 0 {
		return nil
	}
	return space{m.bytes, to}
}

// words are 32-bit words in memory.
func words(ws ...uint32) []byte {
	var b []byte
	for _, w := range ws {
		b = binary.NativeEndian.AppendUint32(b, w)
	}
	return b
}

func wordsOf(b []byte) []uint32 {
	var ws []uint32
	for ; len(b) >= 4; b = b[4:] {
		ws = append(ws, binary.NativeEndian.Uint32(b))
	}
	return ws
}

func TestArgumentsInAnotherAddressSpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, err := driver.New(driver.Config{Profile: "6.12", Nodes: []driver.Node{{ID: 7, GFX: 90402}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		job := &task{tid: 10}
		dbg := &task{tid: 20, others: map[int32]*task{10: job}}
		job.tracer = dbg
		jobFile, err := d.Open(job)
		if err != nil {
			t.Fatal(err)
		}
		dbgFile, err := d.Open(dbg)
		if err != nil {
			t.Fatal(err)
		}
		call := func(who *task, f *driver.File, req kfd.Request, args ...uint32) (uintptr, []uint32, syscall.Errno) {
			memory := space{bytes: append(words(args...), make([]byte, 256)...)}
			r1, errno := d.Ioctl(who, f, req, memory)
			return r1, wordsOf(memory.bytes), errno
		}
		must := func(errno syscall.Errno) {
			t.Helper()
			if errno != 0 {
				t.Fatal(errno)
			}
		}
		_, _, errno := call(job, jobFile, kfdabi.ReqRuntimeEnable, 1, 0, 1)
		must(errno)
		_, _, errno = call(job, jobFile, kfdabi.ReqCreateQueue, 1<<20, 0, 0, 0, 0, 0, 0, 0, 4096, 7, 2, 100)
		must(errno)
		const id = 10
		_, out, errno := call(dbg, dbgFile, kfd.ReqDbgTrap, id, 0, 0, 0, 64, 0, 16, 5)
		must(errno)
		if diff := cmp.Diff([]uint32{1, 0, 1, 0}, out[16:20]); diff != "" {
			t.Errorf("runtime info (-want +got):\n%s", diff)
		}
		_, out, errno = call(dbg, dbgFile, kfd.ReqDbgTrap, id, 13, 0x40000000, 0, 64, 0, 1, 64)
		must(errno)
		if out[16] != 0x40000000 || out[27] != 7 {
			t.Errorf("snapshot: %x", out[16:32])
		}
		r1, out, errno := call(dbg, dbgFile, kfd.ReqDbgTrap, id, 6, 0, 0, 32, 0, 2, 0, 0, 5)
		must(errno)
		if diff := cmp.Diff([]uint32{0, 5 | kfd.QueueInvalidMask}, out[8:10]); diff != "" || r1 != 1 {
			t.Errorf("%d suspended, array (-want +got):\n%s", r1, diff)
		}
		_, _, errno = call(dbg, dbgFile, kfd.ReqDbgTrap, id, 6, 0, 0, 1<<30, 0, 2, 0)
		if errno != syscall.EFAULT {
			t.Errorf("an unmapped array: %v", errno)
		}

		// A call that a signal ends returns the kernel's internal errno.
		destroyed := make(chan syscall.Errno, 1)
		go func() {
			_, _, errno := call(job, jobFile, kfdabi.ReqDestroyQueue, 0)
			destroyed <- errno
		}()
		synctest.Wait()
		if waiting, interruptible := d.Waiting(job); !waiting || !interruptible {
			t.Error("the call does not wait interruptibly")
		}
		job.interrupted = true
		d.Wake()
		if errno := <-destroyed; errno != driver.ERESTARTSYS {
			t.Errorf("interrupted: %v", errno)
		}
	})
}

func TestUnknownProfileIsAnError(t *testing.T) {
	if _, err := driver.New(driver.Config{Profile: "6.11"}, nil); err == nil {
		t.Error("6.11 is a profile now")
	}
}

func TestDescribeReadsNoMoreThanTheRequestSays(t *testing.T) {
	short := space{bytes: words(10, 6)}
	const req = kfd.Request(3<<30 | 8<<16 | 'K'<<8 | 0x26)
	want := driver.Described{Op: "DBG_TRAP SUSPEND_QUEUES", Target: 10}
	if diff := cmp.Diff(want, driver.Describe(req, short)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := driver.Describe(0x4b7f, nil).Op; got != "request(0x4b7f)" {
		t.Errorf("an unknown request is %q", got)
	}
}

package kfdemu

import (
	"bytes"
	"os"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

func TestFileIDDistinguishesFiles(t *testing.T) {
	c := startProgram(t, nil)
	fds := c.numbers(0, "pipe 0")
	other := c.numbers(0, "pipe 0")
	tid := c.number(0, "thread")
	h, _ := newHost(t)
	f := fileOf(t, taskOf(t, h, c.pid), fds[0])
	at := func(tid int32, fd uint64) FileID {
		id, err := FileIDAt(tid, fd)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	got := []FileID{at(c.pid, fds[0]), at(c.pid, fds[1]), at(tid, fds[0]), at(int32(os.Getpid()), uint64(f.fd))}
	if diff := cmp.Diff([]FileID{got[0], got[0], got[0], got[0]}, got); diff != "" {
		t.Errorf("one pipe (-want +got):\n%s", diff)
	}
	if another := at(c.pid, other[0]); another == got[0] {
		t.Errorf("two pipes are %v and %v", got[0], another)
	}
	if _, err := FileIDAt(c.pid, 1000); err == nil {
		t.Error("a descriptor that is not open has an identity")
	}
}

func TestPIDsOfOtherNamespaces(t *testing.T) {
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	if os.Getuid() != 0 {
		attr = inUserNamespace(unix.CLONE_NEWPID)
	}
	c := startProgram(t, attr)
	h, _ := newHost(t)
	task := taskOf(t, h, c.pid)
	tid := c.number(0, "thread")
	nested := c.number(0, "nest")
	if inside, err := os.ReadFile(procPath(c.pid, "status")); err != nil || len(numbers(inside, "NSpid")) != 2 {
		t.Fatalf("the program is not in a pid namespace right below: %v", err)
	}
	if task.PIDInside() != 1 || task.TID() != c.pid {
		t.Errorf("the first of a namespace is %d there and %d here, want 1 and %d", task.PIDInside(), task.TID(), c.pid)
	}
	if found := task.Find(1); found != driver.Task(task) {
		t.Errorf("its 1 is %v, want itself", found)
	}
	if found := task.Find(1 << 20); found != nil {
		t.Errorf("an id that nobody has is %v", found)
	}
	thread := task.Find(tid)
	if thread == nil || thread.TID() == tid || thread.Leader() != driver.Task(task) {
		t.Fatalf("its thread %d is %v", tid, thread)
	}
	if found := thread.Find(1); found != driver.Task(task) {
		t.Errorf("the thread's 1 is %v, want the leader", found)
	}
	inner := task.Find(nested)
	if inner == nil {
		t.Fatalf("%d, which is in a namespace below, is not found", nested)
	}
	if inner.PIDInside() != 1 || inner.Find(1) != inner || inner == driver.Task(task) {
		t.Errorf("it is %d there, and its 1 is %v", inner.PIDInside(), inner.Find(1))
	}
	// What a kernel without the ioctl would find.
	want := []int32{c.pid, 0, thread.TID(), c.pid, inner.TID(), inner.TID()}
	got := []int32{scan(c.pid, 1), scan(c.pid, 1<<20), scan(c.pid, tid), scan(thread.TID(), 1), scan(c.pid, nested), scan(inner.TID(), 1)}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("looked for (-want +got):\n%s", diff)
	}
}

func TestForeignProcIsRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to start a process in a pid namespace of its own")
	}
	// In a new pid namespace /proc is still that of the old one.
	out := startProgram(t, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}).do(0, "new-host")
	if want := "mount a proc of this namespace"; !bytes.Contains([]byte(out), []byte(want)) {
		t.Errorf("got %q, want %q", out, want)
	}
}

const statusText = `Name:	a\nTgid:	99
State:	S (sleeping)
Tgid:	100
Pid:	101
PPid:	1
TracerPid:	77
Groups:	 
NStgid:	100	5
NSpid:	101	6
CapEff:	0000000000200000
`

func TestStatusLines(t *testing.T) {
	status := []byte(statusText)
	type facts struct {
		Tgid, Tracer, Missing int32
		Inside                []int32
		Admin, Ptrace         bool
	}
	got := facts{
		number(value(status, "Tgid")), number(value(status, "TracerPid")), number(value(status, "NoSuch")),
		numbers(status, "NSpid"), has(status, driver.CapSysAdmin), has(status, driver.CapSysPtrace),
	}
	want := facts{100, 77, 0, []int32{101, 6}, true, false}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestStatFields(t *testing.T) {
	stat := []byte("5 (a) b (c)) S 1 5 5 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 987 3000 400 18446744073709551615 94 95 140736")
	start, err := statField(stat, statStart)
	stack, err2 := statField(stat, statStack)
	if start != 987 || stack != 140736 || err != nil || err2 != nil {
		t.Errorf("got %d, %v and %d, %v, want 987 and 140736", start, err, stack, err2)
	}
	if _, err := statField([]byte("5 (a) S 1"), statStart); err == nil {
		t.Error("a short line has a start time")
	}
}

func FuzzStatus(f *testing.F) {
	f.Add([]byte(statusText), "NSpid")
	f.Add([]byte("\nNSpid:"), "NSpid")
	f.Add([]byte("\nNSpid:\t-1 99999999999"), "NSpid")
	f.Fuzz(func(t *testing.T, status []byte, name string) {
		if v := value(status, name); bytes.Contains(v, []byte("\n")) {
			t.Errorf("a value of two lines: %q", v)
		}
		for _, n := range numbers(status, name) {
			if n < 0 {
				t.Errorf("the id %d", n)
			}
		}
		has(status, 63)
		has(status, 64)
	})
}

func FuzzStat(f *testing.F) {
	f.Add([]byte("5 (a) S 1 2 3"), 4)
	f.Add([]byte(")"), 3)
	f.Add([]byte(""), 3)
	f.Fuzz(func(t *testing.T, stat []byte, n int) {
		if v, err := statField(stat, n); err == nil && n < 3 {
			t.Errorf("field %d, which stands before the name, is %d", n, v)
		}
	})
}

package kfdemu

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// gpreemptKey returns the key of a process's address space.
func gpreemptKey(tb testing.TB, h *Host, pid int32) gpreempt.ProcessKey {
	tb.Helper()
	s := taskOf(tb, h, pid).Space()
	if s == nil {
		tb.Fatalf("process %d has no address space", pid)
	}
	return s.Key()
}

func TestKeyIsPIDAndStartTime(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	text, err := os.ReadFile(procPath(c.pid, "stat"))
	if err != nil {
		t.Fatal(err)
	}
	stat, err := discovery.ParseProcStat(text)
	if err != nil {
		t.Fatal(err)
	}
	want := gpreempt.ProcessKey{PID: c.pid, Start: stat.Start}
	if got := gpreemptKey(t, h, c.pid); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestThreadsShareTheAddressSpace(t *testing.T) {
	h, _ := newHost(t)
	c, other := startProgram(t, nil), startProgram(t, nil)
	tid := c.number(0, "thread")
	leader, thread := taskOf(t, h, c.pid).MM(), taskOf(t, h, tid).MM()
	if leader == nil || leader != thread {
		t.Errorf("the threads of a process have the address spaces %v and %v", leader, thread)
	}
	if mm := taskOf(t, h, other.pid).MM(); mm == leader {
		t.Error("two processes have one address space")
	}
}

func TestExecIsANewAddressSpace(t *testing.T) {
	for _, who := range []string{"main thread", "another thread"} {
		t.Run(who, func(t *testing.T) {
			h, _ := newHost(t)
			c := startProgram(t, nil)
			tid := c.number(0, "thread")
			task := taskOf(t, h, c.pid)
			old := task.Space()
			addr := c.numbers(0, "map %d hello", unix.PROT_READ)[0]
			if ended := h.Sweep(); ended != nil {
				t.Fatalf("%v ended too early", ended)
			}
			by := int32(0)
			if who != "main thread" {
				by = tid
			}
			c.tell(by, "exec")
			c.expect("ready")
			if old.Alive() {
				t.Error("the address space before exec is alive")
			}
			if err := old.ReadAt(make([]byte, 5), addr); !errors.Is(err, ErrGone) {
				t.Errorf("reading it gives %v, want ErrGone", err)
			}
			if err := old.WriteAt(make([]byte, 5), addr); !errors.Is(err, ErrGone) {
				t.Errorf("writing it gives %v, want ErrGone", err)
			}
			fresh := taskOf(t, h, c.pid).Space()
			if fresh == nil || fresh == old || !fresh.Alive() {
				t.Fatalf("after exec the address space is %p, before it was %p", fresh, old)
			}
			if fresh.Key() != old.Key() {
				t.Errorf("the process is %v, and was %v", fresh.Key(), old.Key())
			}
			if diff := cmp.Diff([]bool{true}, same(h.Sweep(), old)); diff != "" {
				t.Errorf("Sweep (-want +got):\n%s", diff)
			}
			if again := h.Sweep(); again != nil {
				t.Errorf("Sweep tells again: %v", again)
			}
		})
	}
}

// same reports for each space whether it is the given one.
func same(spaces []*Space, one *Space) []bool {
	var all []bool
	for _, s := range spaces {
		all = append(all, s == one)
	}
	return all
}

func TestOnlySweepNoticesAnExec(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	old := taskOf(t, h, c.pid).Space()
	c.tell(0, "exec")
	c.expect("ready")
	if diff := cmp.Diff([]bool{true}, same(h.Sweep(), old)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestEndOfAProcessIsReported(t *testing.T) {
	h, _ := newHost(t)
	c, other := startProgram(t, nil), startProgram(t, nil)
	space := taskOf(t, h, c.pid).Space()
	taskOf(t, h, other.pid).Space()
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	until(t, "it is a zombie", func() bool { return !space.Alive() }) // the test has not waited for it
	if diff := cmp.Diff([]bool{true}, same(h.Sweep(), space)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if space.Leader().MM() != nil {
		t.Error("the process that ended has an address space")
	}
	if comm := space.Leader().Comm(); comm == "" {
		t.Error("its name is forgotten")
	}
}

// The memory of a child between vfork and exec is its parent's.
func TestVforkSharesTheAddressSpaceUntilExec(t *testing.T) {
	for _, first := range []string{"parent", "child"} {
		t.Run(first+" is asked first", func(t *testing.T) {
			h, _ := newHost(t)
			c := startProgram(t, nil)
			if first == "parent" {
				taskOf(t, h, c.pid).Space()
			}
			program, lease := leased(t)
			thread := c.number(0, "start %s", program)
			child := childOf(t, c.pid, thread)
			between := taskOf(t, h, child).Space()
			parent := taskOf(t, h, c.pid).Space()
			if between == nil || between != parent {
				t.Errorf("the child has %p, the parent %p", between, parent)
			}
			if between.PID() != c.pid {
				t.Errorf("it is that of process %d, want the parent, %d", between.PID(), c.pid)
			}
			lease() // the exec continues
			until(t, "the child is another program", func() bool {
				s := taskOf(t, h, child).Space()
				return s != nil && s != parent
			})
			if s := taskOf(t, h, c.pid).Space(); s != parent || !s.Alive() {
				t.Errorf("the parent has %p, and had %p", s, parent)
			}
			for _, s := range h.Sweep() {
				if s == parent {
					t.Error("the parent's address space is reported as ended")
				}
			}
		})
	}
}

// leased returns a program that cannot be executed until release is called: a lease of the
// file delays opening it.
func leased(t *testing.T) (path string, release func()) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, text, 0o700); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	if _, err := unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Skipf("needs leases on files, which %s has not: %v", path, err)
	}
	return path, func() {
		if _, err := unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_UNLCK); err != nil {
			t.Error(err)
		}
	}
}

// childOf waits until a thread waits for its new child.
func childOf(t *testing.T, pid, thread int32) (child int32) {
	t.Helper()
	until(t, "there is a child", func() bool {
		processes, err := os.ReadDir("/proc")
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range processes {
			id, err := strconv.ParseInt(p.Name(), 10, 32)
			if err != nil {
				continue
			}
			status, err := os.ReadFile(procPath(int32(id), "status"))
			if err == nil && number(value(status, "PPid")) == pid && state(thread) == 'D' && state(int32(id)) == 'S' {
				child = int32(id)
			}
		}
		return child != 0
	})
	return child
}

func TestMemoryIsReadAndWrittenAsProtected(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	page := uint64(os.Getpagesize())
	task := taskOf(t, h, c.pid)
	open := c.numbers(0, "map %d hello", unix.PROT_READ|unix.PROT_WRITE)[0]
	fixed := c.numbers(0, "map %d hello", unix.PROT_READ)[0]
	closed := c.numbers(0, "map %d hello", unix.PROT_NONE)[0]
	b := make([]byte, 5)
	for _, try := range []struct {
		what        string
		addr        uint64
		read, write bool
	}{
		{"open memory", open, true, true},
		{"its last bytes", open + page - 5, true, true},
		{"across its end", open + page - 3, false, false},
		{"read-only memory", fixed, true, false},
		{"memory without rights", closed, false, false},
		{"no memory", 16, false, false},
		{"no address", 1 << 63, false, false},
	} {
		m := task.Memory(try.addr)
		if got := m.Read(b); got != try.read {
			t.Errorf("%s: Read gives %v", try.what, got)
		} else if got && string(b) != "hello" {
			t.Errorf("%s: read %q", try.what, b)
		}
		if got := m.Write([]byte("hello")); got != try.write {
			t.Errorf("%s: Write gives %v", try.what, got)
		}
		if !m.Read(nil) || !m.Write(nil) {
			t.Errorf("%s: nothing cannot be moved", try.what)
		}
	}
	if m := task.Memory(0); m != nil {
		t.Errorf("NULL is %v", m)
	}
	if !task.Memory(open).At(1).Write([]byte("a")) || c.do(0, "peek %d 5", open) != "hallo" {
		t.Error("At is not so many bytes further on")
	}
}

func TestPointersAreFollowed(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	task := taskOf(t, h, c.pid)
	at := c.numbers(0, "map %d hello", unix.PROT_READ|unix.PROT_WRITE)[0]
	m := task.Memory(at)
	var b [16]byte
	for i := range 8 {
		b[8+i] = byte(at >> (8 * i))
	}
	if !m.Write(b[:]) {
		t.Fatal("cannot write")
	}
	if m.Pointer(0) != nil {
		t.Error("a pointer of zeros is not nil")
	}
	got := make([]byte, 16)
	if p := m.Pointer(8); p == nil || !p.Read(got) || !bytes.Equal(got, b[:]) {
		t.Errorf("behind the pointer is %v, want %v", got, b)
	}
	if p := task.Memory(16).Pointer(0); p == nil || p.Read(got) || p.At(8).Write(got) {
		t.Error("a pointer that cannot be read leads somewhere")
	}
}

func TestFaultErrorHasTheAddress(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	page := uint64(os.Getpagesize())
	space := taskOf(t, h, c.pid).Space()
	at := c.numbers(0, "map %d hello", unix.PROT_READ|unix.PROT_WRITE)[0]
	b := make([]byte, 5)
	if err := space.ReadAt(b, at); err != nil || string(b) != "hello" {
		t.Errorf("read %q, %v", b, err)
	}
	if err := space.WriteAt([]byte("world"), at); err != nil || c.do(0, "peek %d 5", at) != "world" {
		t.Errorf("write: %v", err)
	}
	c.ok(0, "unmap %d", at) // the second page
	for _, try := range []struct{ addr, fault uint64 }{{at + page - 2, at + page}, {16, 16}, {1 << 63, 1 << 63}} {
		for what, err := range map[string]error{"read": space.ReadAt(b, try.addr), "write": space.WriteAt(b, try.addr)} {
			var fault *FaultError
			if !errors.As(err, &fault) || fault.Addr != try.fault || !errors.Is(err, unix.EFAULT) {
				t.Errorf("%s at %#x gives %v, want a fault at %#x", what, try.addr, err, try.fault)
			}
		}
	}
	if err := space.ReadAt(nil, 16); err != nil {
		t.Errorf("reading nothing: %v", err)
	}
}

func TestInaccessibleMemoryIsReported(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to be another user besides")
	}
	c := startProgram(t, nil)
	nobody := startProgram(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}})
	want := fmt.Sprintf("cannot access the memory of process %d: open /proc/%d/mem: permission denied: "+
		"it needs root, or the same user and kernel.yama.ptrace_scope=0; <nil>; <nil>", c.pid, c.pid)
	if got := nobody.do(0, "reach %d", c.pid); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestNilSpaceHasEnded(t *testing.T) {
	var none *Space
	if none.Alive() || !errors.Is(none.ReadAt(make([]byte, 1), 1), ErrGone) || !errors.Is(none.WriteAt(make([]byte, 1), 1), ErrGone) {
		t.Error("a nil Space has not ended")
	}
}

// The memory vanishes in the middle of the reads.
func TestSpaceOfAKilledProcess(t *testing.T) {
	h, _ := newHost(t)
	c := startProgram(t, nil)
	task := taskOf(t, h, c.pid)
	space := task.Space()
	at := c.numbers(0, "map %d hello", unix.PROT_READ|unix.PROT_WRITE)[0]
	m := task.Memory(at)
	c.kill()
	b := make([]byte, 5)
	if m.Read(b) || m.Write(b) {
		t.Error("memory of a process that ended")
	}
	if err := space.ReadAt(b, at); !errors.Is(err, ErrGone) {
		t.Errorf("got %v, want ErrGone", err)
	}
	if mm := task.MM(); mm != nil {
		t.Errorf("it has the address space %v", mm)
	}
	if task.Tracer() != nil || task.Capable(driver.CapSysAdmin) {
		t.Error("it has a tracer or rights")
	}
}

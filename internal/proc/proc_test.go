package proc

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// calls are all ways to ask a handle.
func calls(p *Process) map[string]func() error {
	return map[string]func() error{
		"Check":      p.Check,
		"Stat":       func() error { _, err := p.Stat(); return err },
		"Status":     func() error { _, err := p.Status(); return err },
		"Cgroup":     func() error { _, err := p.Cgroup(); return err },
		"Exe":        func() error { _, err := p.Exe(); return err },
		"Threads":    func() error { _, err := p.Threads(); return err },
		"LiveThread": func() error { _, err := p.LiveThread(); return err },
		"Dir":        func() error { _, err := p.Dir("fd"); return err },
		"Pidfd":      func() error { _, err := p.Pidfd(); return err },
		"Signal":     func() error { return p.Signal(0) },
		"CopyFD":     func() error { _, err := p.CopyFD(0); return err },
	}
}

func TestHandleReadsItsProcess(t *testing.T) {
	p := open(t, gpreempt.ProcessKey{PID: int32(os.Getpid())})
	if same := open(t, p.Key()); same.Key() != p.Key() || p.Key().Start == 0 {
		t.Errorf("keys %v and %v, want the same with a start time", p.Key(), same.Key())
	}
	stat, err := p.Stat()
	if err != nil || stat.PID != p.Key().PID || stat.Start != p.Key().Start {
		t.Errorf("stat %+v, error %v", stat, err)
	}
	status, err := p.Status()
	if want := uint32(os.Geteuid()); err != nil || status.UID != want || status.Process != p.Key().PID {
		t.Errorf("status %+v, error %v; want user %d", status, err, want)
	}
	exe, err := p.Exe()
	if want, _ := os.Readlink("/proc/self/exe"); err != nil || exe != want {
		t.Errorf("program %q, error %v; want %q", exe, err, want)
	}
	cgroup, err := p.Cgroup()
	if want, _ := os.ReadFile("/proc/self/cgroup"); err != nil || string(cgroup) != string(want) {
		t.Errorf("cgroup %q, error %v; want %q", cgroup, err, want)
	}
	threads, err := p.Threads()
	if err != nil || len(threads) == 0 {
		t.Errorf("threads %v, error %v", threads, err)
	}
	if tid, err := p.LiveThread(); err != nil || tid != p.Key().PID {
		t.Errorf("living thread %d, error %v; want the main thread", tid, err)
	}
	dir, err := p.Dir("fd")
	if err != nil {
		t.Fatal(err)
	}
	dir.Close()
	if p.Exited() {
		t.Error("this process has exited")
	}
	if err := p.Signal(0); err != nil {
		t.Error(err)
	}
	if _, err := p.CopyFD(1 << 20); !errors.Is(err, unix.EBADF) && !errors.Is(err, unix.EPERM) {
		t.Errorf("CopyFD of no descriptor gives %v, want %v", err, unix.EBADF)
	}
}

func TestAnotherStartTimeIsAnotherProcess(t *testing.T) {
	key := open(t, gpreempt.ProcessKey{PID: int32(os.Getpid())}).Key()
	key.Start++
	if _, err := Open("/", key); !errors.Is(err, ErrGone) {
		t.Errorf("Open gives %v, want %v", err, ErrGone)
	}
	if err := Check("/", key); !errors.Is(err, ErrGone) {
		t.Errorf("Check gives %v, want %v", err, ErrGone)
	}
}

func TestZombieIsGoneButItsStatCanBeRead(t *testing.T) {
	c := startChild(t)
	p := open(t, c.key)
	c.die()
	for !p.Exited() { // it closes its files before
	}
	stat, err := p.Stat()
	if err != nil || stat.State != 'Z' || stat.Start != c.key.Start {
		t.Errorf("stat %+v, error %v; want that of a zombie", stat, err)
	}
	for name, call := range map[string]func() error{
		"Check":      p.Check,
		"LiveThread": func() error { _, err := p.LiveThread(); return err },
		"Open":       func() error { return Check("/", c.key) },
		"Pidfd":      func() error { _, err := p.Pidfd(); return err },
	} {
		if err := call(); !errors.Is(err, ErrGone) {
			t.Errorf("%s of a zombie gives %v, want %v", name, err, ErrGone)
		}
	}
}

func TestHandleIsGoneWhenItsProcessWasWaitedFor(t *testing.T) {
	c := startChild(t)
	p := open(t, c.key)
	c.end()
	for name, call := range calls(p) {
		if err := call(); !errors.Is(err, ErrGone) {
			t.Errorf("%s gives %v, want %v", name, err, ErrGone)
		}
	}
	if err := Check("/", c.key); !errors.Is(err, ErrGone) {
		t.Errorf("Open gives %v, want %v", err, ErrGone)
	}
}

func TestHandleDoesNotReachTheNextProcessWithThePid(t *testing.T) {
	first := startChild(t)
	p := open(t, first.key)
	first.end()
	second := startAs(t, first.key)
	for name, call := range calls(p) {
		if err := call(); !errors.Is(err, ErrGone) {
			t.Errorf("%s gives %v, want %v", name, err, ErrGone)
		}
	}
	if err := Check("/", first.key); !errors.Is(err, ErrGone) {
		t.Errorf("opening the first process gives %v, want %v", err, ErrGone)
	}
	if err := open(t, second.key).Check(); err != nil {
		t.Errorf("the second process: %v", err)
	}
}

func TestExecReplacesTheProgramOfTheSameProcess(t *testing.T) {
	c := startChild(t)
	p := open(t, c.key)
	p.PinProgram()
	if p.Replaced() {
		t.Error("replaced before execve")
	}
	c.say("exec")
	c.expect("ready")
	if !p.Replaced() {
		if _, err := os.Open("/proc/" + strconv.Itoa(int(c.key.PID)) + "/mem"); errors.Is(err, os.ErrPermission) {
			t.Skipf("needs the right to trace a child: %v", err)
		}
		t.Error("not replaced after execve")
	}
	if err := p.Check(); err != nil {
		t.Errorf("after execve: %v", err)
	}
	p.PinProgram()
	if p.Replaced() {
		t.Error("the new program is replaced")
	}
}

func TestProcessWhoseMainThreadEndedIsAliveWithAnotherThread(t *testing.T) {
	c := startChild(t)
	p := open(t, c.key)
	c.say("end-main-thread")
	c.expect("ending")
	var tid int32
	for tid == 0 || tid == c.key.PID { // until the main thread has got that far
		var err error
		if tid, err = p.LiveThread(); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}

func TestExitingThreadsDoNotCountAsLiving(t *testing.T) {
	const exiting = discovery.FlagExiting
	for name, c := range map[string]struct {
		main    string
		threads map[string]string
		want    int32
	}{
		"main thread":           {main: statLine(7, 'S', 0, 2), want: 7},
		"main is exiting":       {main: statLine(7, 'S', exiting, 2), threads: map[string]string{"7": statLine(7, 'S', exiting, 2), "8": statLine(8, 'R', 0, 2)}, want: 8},
		"main has ended":        {main: statLine(7, 'Z', 0, 2), threads: map[string]string{"7": statLine(7, 'Z', 0, 2), "9": statLine(9, 'D', 0, 2)}, want: 9},
		"all are exiting":       {main: statLine(7, 'Z', 0, 2), threads: map[string]string{"7": statLine(7, 'Z', 0, 2), "9": statLine(9, 'D', exiting, 2)}},
		"none is left":          {main: statLine(7, 'Z', 0, 2), threads: map[string]string{}},
		"one has ended already": {main: statLine(7, 'Z', 0, 2), threads: map[string]string{"8": "", "9": statLine(9, 'S', 0, 2)}, want: 9},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTree(t)
			w.write("7/stat", c.main)
			w.write("7/task/none", "")
			for tid, text := range c.threads {
				if text == "" {
					w.write("7/task/"+tid+"/other", "")
					continue
				}
				w.write("7/task/"+tid+"/stat", text)
			}
			if err := os.Remove(w.root + "/proc/7/task/none"); err != nil {
				t.Fatal(err)
			}
			p, err := Open(w.root, gpreempt.ProcessKey{PID: 7, Start: 9})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			got, err := p.LiveThread()
			if diff := cmp.Diff(c.want, got); diff != "" || (c.want == 0) != errors.Is(err, ErrGone) {
				t.Errorf("living thread (-want +got):\n%s, error %v", diff, err)
			}
		})
	}
}

func TestOddStatIsAnErrorThatNamesTheFile(t *testing.T) {
	w := newTree(t)
	w.write("7/stat", "7 (name) S 1\n")
	_, err := Open(w.root, gpreempt.ProcessKey{PID: 7, Start: 9})
	if err == nil || errors.Is(err, ErrGone) || !strings.Contains(err.Error(), w.root+"/proc/7/stat: ") {
		t.Errorf("error %v, want one that names %s", err, w.root+"/proc/7/stat")
	}
}

package freezer

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// newFake returns a machine with a real process in a cgroup made of plain files, where
// every freeze takes effect at once, and the directory of that cgroup.
func newFake(t *testing.T) (machine, *victim, string) {
	t.Helper()
	v := startVictim(t, nil)
	pid := strconv.Itoa(int(v.key.PID))
	files := maps.Clone(jobHost)
	files["proc/"+pid+"/cgroup"] = files["proc/100/cgroup"]
	files[jobScope+"cgroup.procs"] = pid + "\n"
	root := tree(t, files)
	for _, file := range []string{"stat", "status", "task"} {
		if err := os.Symlink(filepath.Join("/proc", pid, file), filepath.Join(root, "proc", pid, file)); err != nil {
			t.Fatal(err)
		}
	}
	m := newMachine(t)
	m.Mechanism = New(Config{Root: root, Journal: m.journal, Log: zap.NewNop()})
	return m, v, filepath.Join(root, jobScope)
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// block makes every write to a control file fail until unblock restores the file.
func block(t *testing.T, path string) (unblock func()) {
	t.Helper()
	text := read(t, path)
	if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o700)); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		write(t, path, text)
	}
}

// interrupted is a context that calls end and ends once a file holds 1.
type interrupted struct {
	context.Context
	t    *testing.T
	file string
	end  func()
}

func (c *interrupted) Err() error {
	if c.end != nil && read(c.t, c.file) == "1" {
		c.end()
		c.end = nil
	}
	if c.end == nil {
		return context.Canceled
	}
	return nil
}

func TestFreezeThatFailsAndCannotBeUndoneStaysHeld(t *testing.T) {
	for name, undo := range map[string]func(mechanism.Session) error{
		"Resume": func(s mechanism.Session) error { return s.Resume(t.Context()) },
		"Close":  mechanism.Session.Close,
	} {
		t.Run(name, func(t *testing.T) {
			m, v, dir := newFake(t)
			freeze := filepath.Join(dir, "cgroup.freeze")
			write(t, filepath.Join(dir, "cgroup.events"), "populated 1\nfrozen 0\n")
			s := m.attach(t, v.key)
			var unblock func()
			err := s.Suspend(&interrupted{t.Context(), t, freeze, func() { unblock = block(t, freeze) }}, nil)
			if !errors.Is(err, context.Canceled) || !errors.Is(err, unix.EISDIR) {
				t.Fatalf("error %v, want %v and %v", err, context.Canceled, unix.EISDIR)
			}
			noted := map[gpreempt.ProcessKey]string{v.key: "freezer/system.slice/job.scope"}
			for range 2 {
				if err := undo(s); !errors.Is(err, unix.EISDIR) {
					t.Errorf("error %v, want %v", err, unix.EISDIR)
				}
				if diff := cmp.Diff(noted, m.noted(t)); diff != "" {
					t.Errorf("journal while it is frozen (-want +got):\n%s", diff)
				}
			}
			unblock()
			m.undone(t, undo, s, freeze)
		})
	}
}

// undone checks that undo succeeds twice.
func (m machine) undone(t *testing.T, undo func(mechanism.Session) error, s mechanism.Session, freeze string) {
	t.Helper()
	for range 2 {
		if err := undo(s); err != nil {
			t.Error(err)
		}
	}
	if got := read(t, freeze); got != "0" {
		t.Errorf("cgroup.freeze is %s, want 0", got)
	}
	if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
		t.Errorf("journal (-want +got):\n%s", diff)
	}
}

func TestCloseIsRepeatedUntilNothingIsHeld(t *testing.T) {
	m, v, dir := newFake(t)
	freeze := filepath.Join(dir, "cgroup.freeze")
	s := m.attach(t, v.key)
	m.suspend(t, s)
	unblock := block(t, freeze)
	for range 2 {
		if err := s.Close(); !errors.Is(err, unix.EISDIR) {
			t.Errorf("Close: error %v, want %v", err, unix.EISDIR)
		}
	}
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, errClosed) {
		t.Errorf("Suspend: error %v, want %v", err, errClosed)
	}
	if err := s.Resume(t.Context()); !errors.Is(err, unix.EISDIR) {
		t.Errorf("Resume: error %v, want %v", err, unix.EISDIR)
	}
	unblock()
	m.undone(t, mechanism.Session.Close, s, freeze)
}

// The children of a process that has exited are still frozen.
func TestExitIsNotReportedWhileTheChildrenAreFrozen(t *testing.T) {
	m, v, dir := newFake(t)
	freeze := filepath.Join(dir, "cgroup.freeze")
	s := m.attach(t, v.key)
	m.suspend(t, s)
	unblock := block(t, freeze)
	v.kill()
	for _, call := range []func(context.Context) error{func(ctx context.Context) error { return s.Suspend(ctx, nil) }, s.Resume} {
		if err := call(t.Context()); !errors.Is(err, unix.EISDIR) || errors.Is(err, mechanism.ErrGone) {
			t.Errorf("error %v, want %v and not %v", err, unix.EISDIR, mechanism.ErrGone)
		}
	}
	unblock()
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("error %v, want %v", err, mechanism.ErrGone)
	}
	if got := read(t, freeze); got != "0" {
		t.Errorf("cgroup.freeze is %s, want 0", got)
	}
}

func TestProcessWhoseCgroupWasRemovedIsStopped(t *testing.T) {
	m, v, dir := newFake(t)
	remove := func() error { return os.RemoveAll(dir) }
	check := func(err error) {
		t.Helper()
		if !errors.Is(err, errRemoved) || errors.Is(err, mechanism.ErrGone) {
			t.Errorf("error %v, want %v and not %v", err, errRemoved, mechanism.ErrGone)
		}
		if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
			t.Errorf("journal (-want +got):\n%s", diff)
		}
	}
	s := m.attach(t, v.key)
	m.suspend(t, s)
	if err := remove(); err != nil {
		t.Fatal(err)
	}
	check(s.Suspend(t.Context(), nil))
	m.suspend(t, s) // by SIGSTOP
	if got := v.states(t); got != "T" {
		t.Errorf("suspended, its threads are in state %s, want T", got)
	}
	m.resume(t, s)
	v.mustRun(t)

	m, v, dir = newFake(t)
	m.pauses.Store = busyJournal{m.journal, remove}
	check(m.attach(t, v.key).Suspend(t.Context(), nil))
	v.mustRun(t)
}

// The same with cgroups of the kernel.
func TestProcessThatMovesOutOfAFrozenCgroupThatIsRemovedLives(t *testing.T) {
	_, home := newCgroup(t)
	m := newMachine(t)
	v := startVictim(t, home)
	old := filepath.Join(filepath.Dir(home.Name()), filepath.Base(home.Name())+"-old")
	if err := os.Mkdir(old, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(old); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("removing the cgroup again: %v", err)
		}
	})
	pid := strconv.Itoa(int(v.key.PID))
	write(t, filepath.Join(old, "cgroup.procs"), pid)
	s := m.attach(t, v.key)
	m.suspend(t, s)
	setControl(t, home, "cgroup.procs", pid)
	v.mustRun(t)
	if err := os.Remove(old); err != nil {
		t.Fatal(err)
	}
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, errRemoved) || errors.Is(err, mechanism.ErrGone) {
		t.Errorf("error %v, want %v and not %v", err, errRemoved, mechanism.ErrGone)
	}
	m.suspend(t, s)
	if got := frozen(t, home); got != "1" {
		t.Errorf("suspended, frozen is %s", got)
	}
	m.resume(t, s)
	v.mustRun(t)
}

// Only a cgroup that was certainly removed ends its entry.
func TestUndoKeepsTheEntryOfACgroupItCannotSee(t *testing.T) {
	const mountinfo = "proc/self/mountinfo"
	mounted := func(root, point string) string {
		return "35 24 0:30 " + root + " " + point + " rw - cgroup2 cgroup2 rw\n"
	}
	for name, c := range map[string]struct {
		files   map[string]string // "" for none
		id      uint64            // 0 for that of the cgroup
		wantErr bool
		freeze  string
	}{
		"there":                   {freeze: "0"},
		"another by the name":     {id: 1, freeze: "1"},
		"not mounted":             {files: map[string]string{mountinfo: "24 30 0:22 / /sys rw - sysfs sysfs rw\n"}, wantErr: true, freeze: "1"},
		"another part is mounted": {files: map[string]string{mountinfo: mounted("/system", "/sys/fs/cgroup")}, wantErr: true, freeze: "1"},
		"mount is covered":        {files: map[string]string{"sys/fs/cgroup/cgroup.procs": ""}, wantErr: true, freeze: "1"},
		"mount is out of sight":   {files: map[string]string{mountinfo: mounted("/", "/elsewhere")}, wantErr: true, freeze: "1"},
		"removed":                 {files: map[string]string{jobScope: ""}},
	} {
		t.Run(name, func(t *testing.T) {
			root := tree(t, jobHost)
			freeze := filepath.Join(root, jobScope, "cgroup.freeze")
			write(t, freeze, "1")
			info, err := os.Stat(filepath.Dir(freeze))
			if err != nil {
				t.Fatal(err)
			}
			if c.id == 0 {
				c.id = inode(info)
			}
			for file, text := range c.files {
				path := filepath.Join(root, file)
				if text != "" {
					write(t, path, text)
				} else if err := os.RemoveAll(path); err != nil {
					t.Fatal(err)
				}
			}
			m := newMachine(t)
			m.Mechanism = New(Config{Root: root, Journal: m.journal, Log: zap.NewNop()})
			e := mechanism.JournalEntry{Mechanism: "freezer", Target: gpreempt.ProcessKey{PID: 100, Start: 1}, Cgroup: "/system.slice/job.scope", CgroupID: c.id}
			if err := m.journal.Begin(e); err != nil {
				t.Fatal(err)
			}
			if err := m.Undo(t.Context(), e); (err != nil) != c.wantErr || c.wantErr && !errors.Is(err, errUnseen) {
				t.Errorf("error %v, want %v", err, c.wantErr)
			}
			want := map[gpreempt.ProcessKey]string{}
			if c.wantErr {
				want[e.Target] = "freezer" + e.Cgroup
			}
			if diff := cmp.Diff(want, m.noted(t)); diff != "" {
				t.Errorf("journal (-want +got):\n%s", diff)
			}
			if c.freeze != "" && read(t, freeze) != c.freeze {
				t.Errorf("cgroup.freeze is %s, want %s", read(t, freeze), c.freeze)
			}
		})
	}
}

func TestHierarchyThatIsMountedLateIsFound(t *testing.T) {
	root := tree(t, map[string]string{"proc/self/cgroup": ""})
	m := New(Config{Root: root})
	if mnt, err := m.mounted(); err == nil {
		t.Fatalf("found %+v", mnt)
	}
	write(t, filepath.Join(root, "proc/self/mountinfo"), jobHost["proc/self/mountinfo"])
	mnt, err := m.mounted()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(mount{"/", "/sys/fs/cgroup"}, *mnt, cmp.AllowUnexported(mount{})); diff != "" {
		t.Error(diff)
	}
}

package journal

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// Two pauses of one boot.
const testBoot = "b2f1c6de-0d5e-4b05-9a57-3cf0a5b4d1a7"

var (
	stopped = Entry{
		Mechanism: "criu", Target: gpreempt.ProcessKey{PID: 4242, Start: 991},
		At: time.Date(2025, 5, 4, 3, 2, 1, 5, time.UTC), BootID: testBoot,
	}
	frozen = Entry{
		Mechanism: "freezer", Target: gpreempt.ProcessKey{PID: 7, Start: 1 << 40}, Cgroup: "/system.slice/job.scope", CgroupID: 1 << 63,
		At: time.Date(2025, 5, 4, 3, 2, 2, 0, time.UTC), BootID: testBoot,
	}
)

// open opens a journal of testBoot.
func open(t testing.TB, dir string) *Journal {
	t.Helper()
	j, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() }) // a test may have closed it
	j.boot = testBoot
	return j
}

func begin(t testing.TB, j *Journal, entries ...Entry) {
	t.Helper()
	for _, e := range entries {
		if err := j.Begin(e); err != nil {
			t.Fatal(err)
		}
	}
}

// mustHold checks the entries, and that there is an error for each of the files bad.
func mustHold(t testing.TB, j *Journal, want []Entry, bad ...string) {
	t.Helper()
	got, errs := j.Entries()
	slices.SortFunc(got, func(a, b Entry) int { return strings.Compare(a.name(), b.name()) })
	slices.SortFunc(want, func(a, b Entry) int { return strings.Compare(a.name(), b.name()) })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	var gotBad []string
	for _, err := range errs {
		e, ok := errors.AsType[*BadEntry](err)
		if !ok {
			t.Error(err)
			continue
		}
		gotBad = append(gotBad, filepath.Base(e.Path))
	}
	slices.Sort(bad)
	slices.Sort(gotBad)
	if diff := cmp.Diff(bad, gotBad); diff != "" {
		t.Errorf("files passed over (-want +got):\n%s", diff)
	}
}

func files(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestPausesOutliveTheProcessThatMadeThem(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "journal")
	j := open(t, dir)
	begin(t, j, stopped, frozen, stopped)
	mustHold(t, j, []Entry{stopped, frozen})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}

	j = open(t, dir)
	mustHold(t, j, []Entry{stopped, frozen})
	for range 2 { // the second finds nothing to end
		if err := j.End(stopped.Target, stopped.Mechanism); err != nil {
			t.Fatal(err)
		}
		mustHold(t, j, []Entry{frozen})
	}
	if err := j.End(frozen.Target, "criu"); err != nil { // of another mechanism
		t.Fatal(err)
	}
	mustHold(t, j, []Entry{frozen})
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != 0o700 {
		t.Errorf("the directory has mode %v, want 0700", got)
	}
	if info, err = os.Stat(filepath.Join(dir, frozen.name())); err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != 0o600 {
		t.Errorf("an entry has mode %v, want 0600", got)
	}
}

func TestOpenReadsTheBootOfThisMachine(t *testing.T) {
	j, err := Open(t.TempDir() + "/journal")
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	begin(t, j, stopped)
	entries, errs := j.Entries()
	if len(entries) != 1 || len(errs) > 0 || len(entries[0].BootID) != 36 {
		t.Errorf("entries %v, errors %v, want one entry with a boot id of 36 letters", entries, errs)
	}
}

func TestPausesOfAnotherBootAreForgotten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	begin(t, j, stopped)
	j.boot = "0d5e4b05-0000-4000-8000-3cf0a5b4d1a7"
	begin(t, j, frozen)
	want := frozen
	want.BootID = j.boot
	mustHold(t, j, []Entry{want})
	if diff := cmp.Diff([]string{frozen.name()}, files(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestJournalHasOneOwner(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	if _, err := Open(dir); !errors.Is(err, ErrInUse) {
		t.Errorf("error %v, want %v", err, ErrInUse)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	open(t, dir)
}

func TestUnsafeDirectoriesAreRefused(t *testing.T) {
	base := t.TempDir()
	path := func(name string) string { return filepath.Join(base, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(path("real"), 0o700))
	must(os.Symlink("real", path("link")))
	must(os.WriteFile(path("file"), nil, 0o600))
	must(os.Mkdir(path("group"), 0o700))
	must(os.Chmod(path("group"), 0o770))
	must(os.Mkdir(path("world"), 0o700))
	must(os.Chmod(path("world"), 0o702))
	want := map[string]error{
		"link": syscall.ENOTDIR, "file": syscall.ENOTDIR, "file/below": syscall.ENOTDIR,
		"group": ErrUnsafe, "world": ErrUnsafe,
	}
	if os.Geteuid() == 0 {
		must(os.Mkdir(path("other"), 0o700))
		must(os.Chown(path("other"), 4711, -1))
		want["other"] = ErrUnsafe
	} else {
		t.Log("not root: the directory of another user is left out")
	}
	for name, want := range want {
		if _, err := Open(path(name)); !errors.Is(err, want) {
			t.Errorf("%s: error %v, want %v", name, err, want)
		}
	}
	must(os.Chmod(path("real"), 0o755)) // can be read, and no more
	open(t, path("real"))
}

// put writes a file into a journal from outside.
func put(t testing.TB, dir, name string, text []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestFilesThatProveNothingArePassedOver(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	begin(t, j, stopped)
	good := stopped.encode()
	for _, name := range []string{"core", "0-1.criu", "1-0.criu", "01-1.criu", "-1-1.criu", "1-1", "1-1.", "1-1.Criu", "1-1.criu.bak", "99999999999-1.criu"} {
		put(t, dir, name, good)
	}
	put(t, dir, "1-7.others", good)
	if err := os.Chmod(filepath.Join(dir, "1-7.others"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(stopped.name(), filepath.Join(dir, "1-8.link")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "1-9.fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	put(t, dir, "1-6.huge", bytes.Repeat([]byte("x"), maxSize+1))
	if err := os.Mkdir(filepath.Join(dir, "directory"), 0o700); err != nil {
		t.Fatal(err)
	}
	bad := []string{
		"core", "0-1.criu", "1-0.criu", "01-1.criu", "-1-1.criu", "1-1", "1-1.", "1-1.Criu", "1-1.criu.bak", "99999999999-1.criu",
		"1-6.huge", "1-7.others", "1-8.link", "1-9.fifo", "directory",
	}
	for range 2 { // they are left where they are
		mustHold(t, j, []Entry{stopped}, bad...)
	}
}

// byName is what is left of an entry whose text cannot be read.
func byName(e Entry) Entry { return Entry{Mechanism: e.Mechanism, Target: e.Target, NameOnly: true} }

// Whatever became of the text of an entry, the process its name says is in the list,
// once, and nothing else of the text is believed.
func TestDamagedEntryIsKnownByItsName(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	good := frozen.encode()
	damaged := map[string][]byte{
		"no entry at all": []byte("hello\n"), "something behind it": append(bytes.Clone(good), ' '),
		"of another process": stopped.encode(), "zeros": make([]byte, len(good)),
	}
	for n := range good { // written in part, or with a block that never came
		damaged[fmt.Sprintf("ends before byte %d", n)] = good[:n]
		damaged[fmt.Sprintf("zeros from byte %d on", n)] = append(bytes.Clone(good[:n]), make([]byte, len(good)-n)...)
	}
	for bit := range 8 * len(good) {
		text := bytes.Clone(good)
		text[bit/8] ^= 1 << (bit % 8)
		damaged[fmt.Sprintf("bit %d flipped", bit)] = text
	}
	for what, text := range damaged {
		put(t, dir, frozen.name(), text)
		begin(t, j, stopped) // one that is whole
		mustHold(t, j, []Entry{stopped, byName(frozen)}, frozen.name())
		for _, e := range []Entry{stopped, frozen} {
			if err := j.End(e.Target, e.Mechanism); err != nil {
				t.Fatal(err)
			}
		}
		// That of a newer program stays, and is none unless the flip made it one.
		if _, err := os.Stat(filepath.Join(dir, frozen.name())); err == nil {
			if _, err := decode(text); !errors.Is(err, errNewer) {
				t.Errorf("%s: the file is still there after the pause was undone", what)
			}
			if err := os.Remove(filepath.Join(dir, frozen.name())); err != nil {
				t.Fatal(err)
			}
		}
		j.newer.Clear()
		if t.Failed() {
			t.Fatal(what)
		}
	}
	t.Logf("%d damaged entries", len(damaged))
}

func TestEntryOfANewerProgramIsActedOnAndLeftToIt(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	newer := bytes.Replace(frozen.encode(), []byte("pause 1"), []byte("pause 2"), 1)
	for range 2 { // two lives of this program
		j := open(t, dir)
		put(t, dir, frozen.name(), newer)
		mustHold(t, j, []Entry{byName(frozen)}, frozen.name())
		if err := j.End(frozen.Target, frozen.Mechanism); err != nil {
			t.Fatal(err)
		}
		mustHold(t, j, []Entry{byName(frozen)}, frozen.name())
		// A pause of its own is its own.
		begin(t, j, frozen)
		mustHold(t, j, []Entry{frozen})
		if err := j.End(frozen.Target, frozen.Mechanism); err != nil {
			t.Fatal(err)
		}
		mustHold(t, j, nil)
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestErrorsAboutFilesSayWhatToDo(t *testing.T) {
	const byName = "process 7, which its name begins with, is let run again as far as a name tells how: see whether it does, and restart it if not"
	for want, bad := range map[string]*BadEntry{
		"journal of pauses: /run/gpreempt/journal/7-9.criu: it is damaged: it is empty; " + byName: {
			Path: "/run/gpreempt/journal/7-9.criu", Err: errOf(decode(nil)),
		},
		"journal of pauses: /run/gpreempt/journal/7-9.criu: a newer gpreemptd wrote it: its format is 3, and this one reads 1; " + byName +
			"; run the gpreemptd that wrote the file with --cleanup, which removes it": {
			Path: "/run/gpreempt/journal/7-9.criu", Err: errOf(decode([]byte("gpreempt-pause 3 ?"))),
		},
		"journal of pauses: /run/gpreempt/journal/core: it is no entry of this journal: it does not begin with gpreempt-pause; nothing was done about it: remove it": {
			Path: "/run/gpreempt/journal/core", Err: errOf(decode([]byte("core"))),
		},
	} {
		if diff := cmp.Diff(want, bad.Error()); diff != "" {
			t.Error(diff)
		}
	}
}

func errOf(_ Entry, err error) error { return err }

func TestNotesThatCouldNotBeReadLaterAreRefused(t *testing.T) {
	j := open(t, filepath.Join(t.TempDir(), "journal"))
	for name, spoil := range map[string]func(*Entry){
		"mechanism":         func(e *Entry) { e.Mechanism = "../criu" },
		"no mechanism":      func(e *Entry) { e.Mechanism = "" },
		"pid":               func(e *Entry) { e.Target.PID = 0 },
		"start":             func(e *Entry) { e.Target.Start = 0 },
		"cgroup without id": func(e *Entry) { e.CgroupID = 0 },
		"relative cgroup":   func(e *Entry) { e.Cgroup = "a" },
		"cgroup with dots":  func(e *Entry) { e.Cgroup = "/a/../b" },
		"root cgroup":       func(e *Entry) { e.Cgroup = "/" },
		"long cgroup":       func(e *Entry) { e.Cgroup = "/" + strings.Repeat("x", 5000) },
		"bytes":             func(e *Entry) { e.Cgroup = "/\xff" },
		"time":              func(e *Entry) { e.At = e.At.AddDate(9000, 0, 0) },
	} {
		e := frozen
		spoil(&e)
		if err := j.Begin(e); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	mustHold(t, j, nil)
}

// errCrash is what a crashing disk gives from its last step on.
var errCrash = errors.New("the process is dead")

// failing is a disk on which step number left fails with err, and when crash is set
// all after it too, without effect. A write that fails has written a part.
type failing struct {
	disk
	left  int
	err   error
	crash bool
}

func (d *failing) step() error {
	d.left--
	if d.left == 0 || d.left < 0 && d.crash {
		return d.err
	}
	return nil
}

func (d *failing) write(name string, text []byte) error {
	if err := d.step(); err != nil {
		if d.left == 0 {
			_ = d.disk.write(name, text[:len(text)/2])
		}
		return err
	}
	return d.disk.write(name, text)
}

func (d *failing) rename(from, to string) error {
	if err := d.step(); err != nil {
		return err
	}
	return d.disk.rename(from, to)
}

func (d *failing) remove(name string) error {
	if err := d.step(); err != nil {
		return err
	}
	return d.disk.remove(name)
}

func (d *failing) sync() error {
	if err := d.step(); err != nil {
		return err
	}
	return d.disk.sync()
}

func TestFullDiskIsAnErrorAndLeavesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	for step := 1; step <= 2; step++ { // the write, the rename
		j.disk = &failing{disk: j.disk, left: step, err: syscall.ENOSPC}
		if err := j.Begin(stopped); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("step %d: error %v, want %v", step, err, syscall.ENOSPC)
		}
		if got := files(t, dir); got != nil {
			t.Errorf("step %d: files %v are left", step, got)
		}
	}
	j.disk = &failing{disk: j.disk, left: 3, err: syscall.EIO} // the names
	if err := j.Begin(stopped); !errors.Is(err, syscall.EIO) {
		t.Errorf("error %v, want %v", err, syscall.EIO)
	}
}

// Whatever step a process dies at, every process it has paused has a valid entry,
// and nothing is said of any other file.
func TestCrashNeverLeavesAPauseWithoutAnEntry(t *testing.T) {
	base := t.TempDir()
	runs := 0
	rapid.Check(t, func(t *rapid.T) {
		runs++
		dir := filepath.Join(base, fmt.Sprint(runs))
		paused := map[string]Entry{} // in the world
		for range rapid.IntRange(1, 4).Draw(t, "lives") {
			j, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			j.boot = testBoot
			life(t, j, paused)
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			checkAfterCrash(t, dir, paused)
		}
	})
}

// life pauses and resumes until the process dies.
func life(t *rapid.T, j *Journal, paused map[string]Entry) {
	whole := j.disk
	defer func() { j.disk = whole }()
	j.disk = &failing{disk: whole, left: rapid.IntRange(1, 12).Draw(t, "steps"), err: errCrash, crash: true}
	for {
		e := stopped
		e.Target.PID = rapid.Int32Range(1, 3).Draw(t, "pid")
		if _, is := paused[e.name()]; is {
			delete(paused, e.name())
			if errors.Is(j.End(e.Target, e.Mechanism), errCrash) {
				return
			}
			continue
		}
		err := j.Begin(e)
		if err == nil {
			paused[e.name()] = e
		}
		if errors.Is(err, errCrash) {
			return
		}
	}
}

func checkAfterCrash(t *rapid.T, dir string, paused map[string]Entry) {
	j, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	j.boot = testBoot
	entries, errs := j.Entries()
	if len(errs) > 0 {
		t.Fatalf("errors %v after a crash", errs)
	}
	found := map[string]Entry{}
	for _, e := range entries {
		found[e.name()] = e
	}
	for name, e := range paused {
		if diff := cmp.Diff(e, found[name]); diff != "" {
			t.Fatalf("a process is paused and the entry is not right (-want +got):\n%s", diff)
		}
	}
	names, err := j.disk.list()
	if err != nil {
		t.Fatal(err)
	}
	if len(names) != len(entries) {
		t.Fatalf("files %v are left, entries %v", names, entries)
	}
}

func TestDirectoryThatIsRemovedIsAnError(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := j.Begin(stopped); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v, want %v", err, fs.ErrNotExist)
	}
}

func FuzzDecode(f *testing.F) {
	for _, e := range []Entry{stopped, frozen} {
		text := e.encode()
		f.Add(text, false)
		f.Add(text[:40], false)
		f.Add(text[bytes.IndexByte(text, '\n')+1:], true)
	}
	f.Add([]byte(""), false)
	f.Add([]byte("gpreempt-pause 2 crc32c=00000000\n{}"), false)
	f.Add([]byte(`{"mechanism":"criu","pid":7,"start":9,"at":"9999-12-31T23:59:59-05:00","boot_id":"x"}`), true)
	f.Fuzz(func(t *testing.T, text []byte, sealed bool) {
		if sealed { // or nothing but checksums would be tried
			text = seal(text)
		}
		e, err := decode(text)
		if err != nil {
			if (e != Entry{}) {
				t.Errorf("error %v with an entry %v", err, e)
			}
			known := []error{errTorn, errForeign, errNewer}
			if !slices.ContainsFunc(known, func(k error) bool { return errors.Is(err, k) }) {
				t.Errorf("error %v is of no kind", err)
			}
			return
		}
		if err := e.check(); err != nil {
			t.Errorf("what was read cannot be written: %v", err)
		}
		again, err := decode(e.encode())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(e, again); diff != "" {
			t.Error(diff)
		}
	})
}

func BenchmarkBeginEnd(b *testing.B) {
	j := open(b, filepath.Join(b.TempDir(), "journal"))
	for b.Loop() {
		begin(b, j, stopped)
		if err := j.End(stopped.Target, stopped.Mechanism); err != nil {
			b.Fatal(err)
		}
	}
}

package mechanism

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// Two pauses of one boot.
const testBoot = "b2f1c6de-0d5e-4b05-9a57-3cf0a5b4d1a7"

var (
	stopped = JournalEntry{
		Mechanism: "criu", Target: gpreempt.ProcessKey{PID: 4242, Start: 991},
		At: time.Date(2025, 5, 4, 3, 2, 1, 5, time.UTC), BootID: testBoot,
	}
	frozen = JournalEntry{
		Mechanism: "freezer", Target: gpreempt.ProcessKey{PID: 7, Start: 1 << 40}, Cgroup: "/system.slice/job.scope", CgroupID: 1 << 63,
		At: time.Date(2025, 5, 4, 3, 2, 2, 0, time.UTC), BootID: testBoot,
	}
)

// open opens a journal of testBoot.
func open(t testing.TB, dir string) *Journal {
	t.Helper()
	j, err := OpenJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() }) // a test may have closed it
	j.boot = testBoot
	return j
}

func begin(t testing.TB, j *Journal, entries ...JournalEntry) {
	t.Helper()
	for _, e := range entries {
		if err := j.Begin(e); err != nil {
			t.Fatal(err)
		}
	}
}

// mustHold checks the entries, and that there is an error for each of the files bad.
func mustHold(t testing.TB, j *Journal, want []JournalEntry, bad ...string) {
	t.Helper()
	got, errs := j.Entries()
	slices.SortFunc(got, func(a, b JournalEntry) int { return strings.Compare(a.name(), b.name()) })
	slices.SortFunc(want, func(a, b JournalEntry) int { return strings.Compare(a.name(), b.name()) })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	var byName []string
	for _, e := range got {
		if e.NameOnly {
			byName = append(byName, e.name())
		}
	}
	var gotBad, used []string
	for _, err := range errs {
		e, ok := errors.AsType[*BadEntry](err)
		if !ok {
			t.Error(err)
			continue
		}
		gotBad = append(gotBad, filepath.Base(e.Path))
		if e.Used {
			used = append(used, filepath.Base(e.Path))
		}
	}
	slices.Sort(used)
	if diff := cmp.Diff(byName, used); diff != "" {
		t.Errorf("files whose name is used (-want +got):\n%s", diff)
	}
	slices.Sort(bad)
	slices.Sort(gotBad)
	if diff := cmp.Diff(bad, gotBad); diff != "" {
		t.Errorf("ignored files (-want +got):\n%s", diff)
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

func TestEntriesOutliveTheProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "journal")
	j := open(t, dir)
	begin(t, j, stopped, frozen, stopped)
	mustHold(t, j, []JournalEntry{stopped, frozen})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}

	j = open(t, dir)
	mustHold(t, j, []JournalEntry{stopped, frozen})
	for range 2 { // the second finds nothing to end
		if err := j.End(stopped.Target, stopped.Mechanism); err != nil {
			t.Fatal(err)
		}
		mustHold(t, j, []JournalEntry{frozen})
	}
	if err := j.End(frozen.Target, "criu"); err != nil { // of another mechanism
		t.Fatal(err)
	}
	mustHold(t, j, []JournalEntry{frozen})
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
	j, err := OpenJournal(t.TempDir() + "/journal")
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	begin(t, j, stopped)
	entries, errs := j.Entries()
	if len(entries) != 1 || len(errs) > 0 || len(entries[0].BootID) != 36 {
		t.Errorf("entries %v, errors %v, want one entry with a boot id of 36 characters", entries, errs)
	}
}

func TestEntriesOfAnotherBootAreRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	begin(t, j, stopped)
	j.boot = "0d5e4b05-0000-4000-8000-3cf0a5b4d1a7"
	begin(t, j, frozen)
	want := frozen
	want.BootID = j.boot
	mustHold(t, j, []JournalEntry{want})
	if diff := cmp.Diff([]string{frozen.name()}, files(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestJournalHasOneOwner(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	if _, err := OpenJournal(dir); !errors.Is(err, ErrInUse) {
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
		"link": syscall.ENOTDIR, "file": syscall.ENOTDIR, "file/below": ErrUnsafe,
		"group": ErrUnsafe, "world/below": ErrUnsafe, "world": ErrUnsafe,
	}
	if os.Geteuid() == 0 {
		must(os.Mkdir(path("other"), 0o700))
		must(os.Chown(path("other"), 4711, -1))
		want["other"] = ErrUnsafe
	} else {
		t.Log("not root: the directory of another user is not tested")
	}
	for name, want := range want {
		if _, err := OpenJournal(path(name)); !errors.Is(err, want) {
			t.Errorf("%s: error %v, want %v", name, err, want)
		}
	}
	must(os.Chmod(path("real"), 0o755)) // others may read it
	open(t, path("real"))
}

func TestBeginFailsInADirectoryThatWasRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := j.Begin(stopped); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v, want %v", err, fs.ErrNotExist)
	}
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

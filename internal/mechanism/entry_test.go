package mechanism

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

	"github.com/google/go-cmp/cmp"
)

// put writes a file into a journal from outside.
func put(t testing.TB, dir, name string, text []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestForeignFilesAreIgnored(t *testing.T) {
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
	put(t, dir, "1-5.foreign", good)
	foreign, mode := 1, os.FileMode(0o600)
	if os.Geteuid() != 0 { // only root can change the owner
		foreign, mode = os.Geteuid(), 0o666
	}
	if err := errors.Join(os.Chown(filepath.Join(dir, "1-5.foreign"), foreign, -1), os.Chmod(filepath.Join(dir, "1-5.foreign"), mode)); err != nil {
		t.Fatal(err)
	}
	put(t, dir, "1-6.huge", bytes.Repeat([]byte("x"), maxSize+1))
	if err := os.Mkdir(filepath.Join(dir, "directory"), 0o700); err != nil {
		t.Fatal(err)
	}
	bad := []string{
		"core", "0-1.criu", "1-0.criu", "01-1.criu", "-1-1.criu", "1-1", "1-1.", "1-1.Criu", "1-1.criu.bak", "99999999999-1.criu",
		"1-5.foreign", "1-6.huge", "1-7.others", "1-8.link", "1-9.fifo", "directory",
	}
	for range 2 { // and not removed
		mustHold(t, j, []JournalEntry{stopped}, bad...)
	}
}

// byName returns what is known of an entry whose text cannot be read.
func byName(e JournalEntry) JournalEntry {
	return JournalEntry{Mechanism: e.Mechanism, Target: e.Target, NameOnly: true}
}

// An entry with a damaged text is listed once, with the process of its name, and
// nothing of its text is used.
func TestDamagedEntryIsKnownByItsName(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir)
	good := frozen.encode()
	damaged := map[string][]byte{
		"no entry at all": []byte("hello\n"), "something behind it": append(bytes.Clone(good), ' '),
		"of another process": stopped.encode(), "zeros": make([]byte, len(good)),
	}
	for n := range good { // written in part, or without its last blocks
		damaged[fmt.Sprintf("ends before byte %d", n)] = good[:n]
		damaged[fmt.Sprintf("zeros from byte %d on", n)] = append(bytes.Clone(good[:n]), make([]byte, len(good)-n)...)
	}
	for bit := range 8 * len(good) {
		text := bytes.Clone(good)
		text[bit/8] ^= 1 << (bit % 8)
		if _, err := decode(text); err == nil {
			t.Errorf("an entry with bit %d flipped is accepted", bit)
		}
		if bit%9 == 0 { // each file takes a while: a different bit of most bytes
			damaged[fmt.Sprintf("bit %d flipped", bit)] = text
		}
	}
	for what, text := range damaged {
		put(t, dir, frozen.name(), text)
		begin(t, j, stopped) // one that is whole
		mustHold(t, j, []JournalEntry{stopped, byName(frozen)}, frozen.name())
		for _, e := range []JournalEntry{stopped, frozen} {
			if err := j.End(e.Target, e.Mechanism); err != nil {
				t.Fatal(err)
			}
		}
		// The entry of a newer program stays: a flipped bit may make one.
		if _, err := os.Stat(filepath.Join(dir, frozen.name())); err == nil {
			if _, err := decode(text); !errors.Is(err, errNewer) {
				t.Errorf("%s: the file remains after the pause was undone", what)
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

func TestEntryOfANewerProgramIsUsedAndKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	newer := bytes.Replace(frozen.encode(), []byte("pause 1"), []byte("pause 2"), 1)
	for range 2 { // two starts of this program
		j := open(t, dir)
		put(t, dir, frozen.name(), newer)
		mustHold(t, j, []JournalEntry{byName(frozen)}, frozen.name())
		if err := j.End(frozen.Target, frozen.Mechanism); err != nil {
			t.Fatal(err)
		}
		mustHold(t, j, []JournalEntry{byName(frozen)}, frozen.name())
		// It removes an entry that it has replaced.
		begin(t, j, frozen)
		mustHold(t, j, []JournalEntry{frozen})
		if err := j.End(frozen.Target, frozen.Mechanism); err != nil {
			t.Fatal(err)
		}
		mustHold(t, j, nil)
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestErrorsAboutFilesNameTheRemedy(t *testing.T) {
	const byName = "process 7, from the name of the file, is resumed without the details of its pause: check that it runs, and restart it if not"
	for want, bad := range map[string]*BadEntry{
		"journal of pauses: /run/gpreempt/journal/7-9.criu: it is damaged: it is empty; " + byName: {
			Path: "/run/gpreempt/journal/7-9.criu", Err: errOf(decode(nil)), Used: true,
		},
		"journal of pauses: /run/gpreempt/journal/7-9.criu: a newer gpreemptd wrote it: its format is 3, and this version reads 1; " + byName +
			"; run the gpreemptd that wrote the file with --cleanup, which removes it": {
			Path: "/run/gpreempt/journal/7-9.criu", Err: errOf(decode([]byte("gpreempt-pause 3 ?"))), Used: true,
		},
		"journal of pauses: /run/gpreempt/journal/7-9.criu: it is not an entry of this journal: it is not a regular file but p---------; it is ignored, and " +
			"process 7, from its name, is not resumed: check that it runs, and restart it if not; then remove the file": {
			Path: "/run/gpreempt/journal/7-9.criu", Err: fmt.Errorf("%w: it is not a regular file but %v", errForeign, fs.ModeNamedPipe),
		},
		"journal of pauses: /run/gpreempt/journal/core: it is not an entry of this journal: it does not begin with gpreempt-pause; it is ignored: remove it": {
			Path: "/run/gpreempt/journal/core", Err: errOf(decode([]byte("core"))),
		},
	} {
		if diff := cmp.Diff(want, bad.Error()); diff != "" {
			t.Error(diff)
		}
	}
}

func errOf(_ JournalEntry, err error) error { return err }

func TestInvalidEntriesAreRefused(t *testing.T) {
	j := open(t, filepath.Join(t.TempDir(), "journal"))
	for name, invalidate := range map[string]func(*JournalEntry){
		"mechanism":         func(e *JournalEntry) { e.Mechanism = "../criu" },
		"no mechanism":      func(e *JournalEntry) { e.Mechanism = "" },
		"pid":               func(e *JournalEntry) { e.Target.PID = 0 },
		"start":             func(e *JournalEntry) { e.Target.Start = 0 },
		"cgroup without id": func(e *JournalEntry) { e.CgroupID = 0 },
		"relative cgroup":   func(e *JournalEntry) { e.Cgroup = "a" },
		"cgroup with dots":  func(e *JournalEntry) { e.Cgroup = "/a/../b" },
		"root cgroup":       func(e *JournalEntry) { e.Cgroup = "/" },
		"long cgroup":       func(e *JournalEntry) { e.Cgroup = "/" + strings.Repeat("x", 5000) },
		"bytes":             func(e *JournalEntry) { e.Cgroup = "/\xff" },
		"time":              func(e *JournalEntry) { e.At = e.At.AddDate(9000, 0, 0) },
	} {
		e := frozen
		invalidate(&e)
		if err := j.Begin(e); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	mustHold(t, j, nil)
}

func FuzzDecode(f *testing.F) {
	for _, e := range []JournalEntry{stopped, frozen} {
		text := e.encode()
		f.Add(text, false)
		f.Add(text[:40], false)
		f.Add(text[bytes.IndexByte(text, '\n')+1:], true)
	}
	f.Add([]byte(""), false)
	f.Add([]byte("gpreempt-pause 2 crc32c=00000000\n{}"), false)
	f.Add([]byte(`{"mechanism":"criu","pid":7,"start":9,"at":"9999-12-31T23:59:59-05:00","boot_id":"x"}`), true)
	f.Fuzz(func(t *testing.T, text []byte, sealed bool) {
		if sealed { // otherwise the fuzzer only finds wrong checksums
			text = seal(text)
		}
		e, err := decode(text)
		if err != nil {
			if (e != JournalEntry{}) {
				t.Errorf("error %v with an entry %v", err, e)
			}
			known := []error{errTorn, errForeign, errNewer}
			if !slices.ContainsFunc(known, func(k error) bool { return errors.Is(err, k) }) {
				t.Errorf("error %v is of an unknown kind", err)
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

package mechanism

import (
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// errCrash is the error of a crashing disk from its last step on.
var errCrash = errors.New("the process is dead")

// failing is a disk on which step number left fails with err, and if crash is set every
// later step too, without effect. A write that fails has written a part.
type failing struct {
	disk
	left  int
	err   error
	crash bool
	dirty bool // a name may not be on the disk
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
	d.dirty = true
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
	d.dirty = false
	return d.disk.sync()
}

func TestBeginOnAFullDiskFailsAndLeavesNoFile(t *testing.T) {
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
	j.disk = &failing{disk: j.disk, left: 3, err: syscall.EIO} // the sync of the directory
	if err := j.Begin(stopped); !errors.Is(err, syscall.EIO) {
		t.Errorf("error %v, want %v", err, syscall.EIO)
	}
}

// At whichever step a process dies, every process that it has paused has a valid
// entry, and no other file remains.
func TestCrashNeverLeavesAPauseWithoutAnEntry(t *testing.T) {
	base := t.TempDir()
	runs := 0
	rapid.Check(t, func(t *rapid.T) {
		runs++
		dir := filepath.Join(base, fmt.Sprint(runs))
		paused := map[string]JournalEntry{}
		for range rapid.IntRange(1, 4).Draw(t, "starts") {
			j, err := OpenJournal(dir)
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
func life(t *rapid.T, j *Journal, paused map[string]JournalEntry) {
	whole := j.disk
	defer func() { j.disk = whole }()
	d := &failing{disk: whole, left: rapid.IntRange(1, 12).Draw(t, "steps"), err: errCrash, crash: true}
	j.disk = d
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
			if d.dirty {
				t.Fatal("an entry is done before its name is on the disk")
			}
		}
		if errors.Is(err, errCrash) {
			return
		}
	}
}

func checkAfterCrash(t *rapid.T, dir string, paused map[string]JournalEntry) {
	j, err := OpenJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	j.boot = testBoot
	entries, errs := j.Entries()
	if len(errs) > 0 {
		t.Fatalf("errors %v after a crash", errs)
	}
	found := map[string]JournalEntry{}
	for _, e := range entries {
		found[e.name()] = e
	}
	for name, e := range paused {
		if diff := cmp.Diff(e, found[name]); diff != "" {
			t.Fatalf("the entry of a paused process is wrong (-want +got):\n%s", diff)
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

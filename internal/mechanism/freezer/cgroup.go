package freezer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// cgroup is the open directory of a cgroup: what it does never reaches a later cgroup
// with the same name.
type cgroup struct {
	dir *os.Root
	// path is from the root of the hierarchy, id is the inode number.
	path string
	id   uint64
}

// Errors about a cgroup.
var (
	// errRemoved reports that the cgroup was removed: no process was in it then, so it
	// keeps none frozen. A process that was there is elsewhere, or has exited.
	errRemoved = errors.New("it was removed")
	// errUnseen reports that this program cannot see the cgroup, which may exist and be
	// frozen.
	errUnseen = errors.New("this program cannot see it")
)

// openCgroup returns errRemoved only when it finds the hierarchy and the cgroup is not
// in it. Other errors: errUnseen, others.
func (m *Mechanism) openCgroup(path string) (_ *cgroup, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("cgroup %s: %w", path, err)
		}
	}()
	mnt, err := m.mounted()
	if err != nil {
		return nil, err
	}
	below, ok := mnt.below(path)
	if !ok {
		return nil, errUnseen
	}
	top := filepath.Join(m.cfg.Root, mnt.point)
	// Every cgroup has this file. Another file system may cover the hierarchy.
	if _, err := os.Stat(filepath.Join(top, "cgroup.procs")); err != nil {
		return nil, fmt.Errorf("%w: %s is not a cgroup v2 hierarchy: %w", errUnseen, top, err)
	}
	dir, err := os.OpenRoot(filepath.Join(top, below))
	if err != nil {
		return nil, vanished(err)
	}
	info, err := dir.Stat(".")
	if err != nil {
		_ = dir.Close()
		return nil, vanished(err)
	}
	return &cgroup{dir, path, inode(info)}, nil
}

// inode returns the inode number, which every file on Linux has.
func inode(info fs.FileInfo) uint64 { return info.Sys().(*syscall.Stat_t).Ino }

// close loses nothing: what was written to control files took effect at once.
func (g *cgroup) close() { _ = g.dir.Close() }

// vanished returns errRemoved for the errors of a cgroup that was removed.
func vanished(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return errRemoved
	}
	return err
}

func (g *cgroup) read(file string) (string, error) {
	text, err := g.dir.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("cgroup %s: %w", g.path, vanished(err))
	}
	return string(bytes.TrimSpace(text)), nil
}

// write writes a control file.
func (g *cgroup) write(file, text string) error {
	f, err := g.dir.OpenFile(file, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("cgroup %s: %s: %w", g.path, file, vanished(err))
	}
	return nil
}

// set freezes the cgroup by "1", and ends that by "0".
func (g *cgroup) set(value string) error { return g.write("cgroup.freeze", value) }

// thaw ends the freeze; it returns nil for a cgroup that was removed.
func (g *cgroup) thaw() error {
	if err := g.set("0"); !errors.Is(err, errRemoved) {
		return err
	}
	return nil
}

// awaitFrozen returns when all of the cgroup is frozen. The kernel reports a change of
// cgroup.events not twice in 10 ms (cgroup_file_notify, CGROUP_FILE_NOTIFY_MIN_INTV), which a freeze
// soon after a thaw would miss.
func (g *cgroup) awaitFrozen(ctx context.Context) error {
	return await(ctx, func() (string, error) {
		events, err := g.read("cgroup.events")
		if err != nil || flat(events, "frozen") == "1" {
			return "", err
		}
		return "cgroup " + g.path + ": a process in it is in uninterruptible sleep (state D)", nil
	})
}

// flat returns the value of a key in lines of the form "key value", "" for none.
func flat(text, key string) string {
	for line := range strings.Lines(text) {
		if words := strings.Fields(line); len(words) == 2 && words[0] == key {
			return words[1]
		}
	}
	return ""
}

// freeze is the pause of all processes of a cgroup.
type freeze struct {
	*cgroup
	m      *Mechanism
	target gpreempt.ProcessKey
}

func (z *freeze) begun() (bool, error) {
	value, err := z.read("cgroup.freeze")
	return value == "1", err
}

func (z *freeze) begin(ctx context.Context) error {
	if err := z.set("1"); err != nil {
		return err
	}
	if err := z.awaitFrozen(ctx); err != nil {
		return err
	}
	// Another process may have joined it meanwhile.
	why, err := z.m.unfit(z.cgroup, facts{target: z.target.PID, path: z.path})
	switch {
	case err != nil:
		return err
	case why != "":
		return fmt.Errorf("process %v is not suspended: %s, which has just changed: retry", z.target, why)
	}
	return nil
}

func (z *freeze) runs() (bool, error) {
	frozen, err := z.begun()
	return !frozen, err
}

func (z *freeze) undo() error { return z.thaw() }
func (z *freeze) entry() mechanism.JournalEntry {
	return mechanism.JournalEntry{Cgroup: z.path, CgroupID: z.id}
}

package freezer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/journal"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// cgroup is the open directory of a cgroup: another one by its name is not touched.
type cgroup struct {
	dir *os.Root
	// path is that from the root of the hierarchy, id the inode number.
	path string
	id   uint64
}

// What keeps a cgroup from being opened, or used once it is open.
var (
	// errRemoved says that the cgroup is no more: nobody is in it, then, so nobody is
	// frozen by it. A process that was there lives on elsewhere, or has exited.
	errRemoved = errors.New("it was removed")
	// errUnseen says nothing of the cgroup, which may exist and be frozen.
	errUnseen = errors.New("it cannot be seen from here")
)

// openCgroup returns errRemoved only when the hierarchy is there to be seen and the
// cgroup is not in it. Other errors: errUnseen, others.
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
	// Every cgroup has this file. Something else may be mounted over the hierarchy.
	if _, err := os.Stat(filepath.Join(top, "cgroup.procs")); err != nil {
		return nil, fmt.Errorf("%w: is %s the hierarchy? %w", errUnseen, top, err)
	}
	dir, err := os.OpenRoot(filepath.Join(top, below))
	if err != nil {
		return nil, vanished(err)
	}
	info, err := dir.Stat(".")
	if err != nil {
		return nil, errors.Join(vanished(err), dir.Close())
	}
	return &cgroup{dir, path, inode(info)}, nil
}

// inode returns the inode number, which every file of Linux has.
func inode(info fs.FileInfo) uint64 { return info.Sys().(*syscall.Stat_t).Ino }

func (g *cgroup) close() error { return g.dir.Close() }

// vanished returns errRemoved for what a cgroup answers that was removed.
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

// set writes cgroup.freeze.
func (g *cgroup) set(value string) error {
	f, err := g.dir.OpenFile("cgroup.freeze", os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(value)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("cgroup %s: %w", g.path, vanished(err))
	}
	return nil
}

// thaw ends the freeze; that of a cgroup that was removed has ended.
func (g *cgroup) thaw() error {
	if err := g.set("0"); !errors.Is(err, errRemoved) {
		return err
	}
	return nil
}

// awaitFrozen returns when all of the cgroup is frozen. The kernel wakes who polls
// cgroup.events for POLLPRI at a change, but not twice in 10 ms (cgroup_file_notify,
// CGROUP_FILE_NOTIFY_MIN_INTV): a freeze soon after a thaw takes a look too.
func (g *cgroup) awaitFrozen(ctx context.Context) error {
	deadline := time.Now().Add(patience)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	f, err := g.dir.Open("cgroup.events")
	if err != nil {
		return fmt.Errorf("cgroup %s: %w", g.path, vanished(err))
	}
	defer f.Close()
	fds := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
	text := make([]byte, 256)
	for wait := firstLook; ; wait = min(2*wait, lastLook) {
		n, err := unix.Pread(int(f.Fd()), text, 0)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("cgroup %s: %w", g.path, vanished(os.NewSyscallError("read cgroup.events", err)))
		}
		if err == nil && flat(string(text[:n]), "frozen") == "1" {
			return nil
		}
		left := time.Until(deadline)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case left <= 0:
			return fmt.Errorf("cgroup %s is not frozen %v after it was asked for: a process in it is deep in the kernel (state D)", g.path, patience)
		}
		timeout := unix.NsecToTimespec(int64(min(wait, left)))
		if _, err := unix.Ppoll(fds, &timeout, nil); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("cgroup %s: %w", g.path, os.NewSyscallError("poll", err))
		}
	}
}

// flat returns the value of a key in a text of lines "key value", "" for none.
func flat(text, key string) string {
	for line := range strings.Lines(text) {
		if words := strings.Fields(line); len(words) == 2 && words[0] == key {
			return words[1]
		}
	}
	return ""
}

// ownCgroup opens the cgroup that may be frozen to pause the process and what it
// has started; nil and why when there is none.
func (m *Mechanism) ownCgroup(target gpreempt.ProcessKey) (*cgroup, string, error) {
	if mnt, err := m.mounted(); err != nil {
		return nil, "", err
	} else if mnt == nil {
		return nil, "cgroup v2 is not mounted", nil
	}
	f := facts{target: target.PID}
	for file, to := range map[string]*string{procPath(m.cfg.Root, target.PID, "cgroup"): &f.path, filepath.Join(m.cfg.Root, "proc/self/cgroup"): &f.own} {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, "", goneOr(err)
		}
		*to = discovery.CgroupV2Path(text)
	}
	if why := f.unfitByName(); why != "" {
		return nil, why, nil
	}
	g, err := m.openCgroup(f.path)
	if errors.Is(err, errUnseen) || errors.Is(err, errRemoved) {
		return nil, "its cgroup " + f.path + " cannot be seen from here", nil
	} else if err != nil {
		return nil, "", err
	}
	why, err := m.unfit(g, f)
	if err == nil && why == "" {
		return g, "", nil
	}
	if errors.Is(err, errRemoved) {
		why, err = "its cgroup "+f.path+" was removed", nil
	}
	return nil, why, errors.Join(err, g.close())
}

// unfit reads what is in the cgroup and reports what is against freezing it, "" for
// nothing.
func (m *Mechanism) unfit(g *cgroup, f facts) (string, error) {
	procs, err := g.read("cgroup.procs")
	if errors.Is(err, unix.EOPNOTSUPP) { // threaded
		procs, err = "", nil
	}
	if err != nil {
		return "", err
	}
	if f.kind, err = g.read("cgroup.type"); err != nil {
		return "", err
	}
	stat, err := g.read("cgroup.stat")
	if err != nil {
		return "", err
	}
	f.nested = flat(stat, "nr_descendants")
	if f.members, err = parseProcs(procs); err != nil {
		return "", fmt.Errorf("cgroup %s: cgroup.procs: %w", g.path, err)
	}
	f.parents = map[int32]int32{}
	for _, pid := range f.members {
		if err := m.ancestry(pid, f); err != nil {
			return "", err
		}
	}
	return f.unfit(), nil
}

// parseProcs reads cgroup.procs: a pid a line, 0 for a process of another pid
// namespace.
func parseProcs(text string) ([]int32, error) {
	var pids []int32
	for word := range strings.FieldsSeq(text) {
		pid, err := strconv.ParseUint(word, 10, 31)
		if err != nil {
			return nil, err
		}
		pids = append(pids, int32(pid))
	}
	return pids, nil
}

// ancestry fills f.parents for pid and its ancestors up to the target.
func (m *Mechanism) ancestry(pid int32, f facts) error {
	for pid > 0 && pid != f.target {
		if _, known := f.parents[pid]; known {
			return nil
		}
		path := procPath(m.cfg.Root, pid, "status")
		status, err := os.ReadFile(path)
		if err != nil {
			if errors.Is(goneOr(err), mechanism.ErrGone) {
				return nil // it is nobody's child then, as far as is known
			}
			return err
		}
		parent, err := strconv.ParseInt(flat(string(status), "PPid:"), 10, 32)
		if err != nil {
			return fmt.Errorf("%s: the parent: %w", path, err)
		}
		f.parents[pid] = int32(parent)
		pid = int32(parent)
	}
	return nil
}

// facts are what decides whether the cgroup of a process may be frozen.
type facts struct {
	target int32
	// path is the cgroup of the target, own that of this program; "" for none.
	path, own string
	// kind is cgroup.type, nested the number of cgroups below it, as text.
	kind, nested string
	// members are the processes in it; parents has the parent of each and of its
	// ancestors up to the target.
	members []int32
	parents map[int32]int32
}

// unfitByName reports what is against freezing a cgroup as far as its name tells.
func (f facts) unfitByName() string {
	base := path.Base(f.path)
	switch {
	case f.path == "":
		return "it is in no cgroup of version 2"
	case f.path == "/":
		return "it is in the root cgroup"
	case path.Clean(f.path) != f.path || strings.HasPrefix(f.path, "/.."):
		return "its cgroup " + f.path + " cannot be seen from here"
	case f.own == f.path || strings.HasPrefix(f.own, f.path+"/"):
		return "this program is in its cgroup " + f.path
	case strings.HasSuffix(base, ".slice"),
		base == "init.scope",
		strings.HasPrefix(base, "session-") && strings.HasSuffix(base, ".scope"),
		strings.HasPrefix(base, "user@") && strings.HasSuffix(base, ".service"):
		return "its cgroup " + f.path + " is that of a login session or of systemd"
	}
	return ""
}

// unfit reports what is against freezing a cgroup: it must hold the target, what the
// target has started, and nothing else.
func (f facts) unfit() string {
	switch {
	case f.kind != "domain":
		return "its cgroup " + f.path + " is of type " + f.kind
	case f.nested != "0":
		return "its cgroup " + f.path + " has others below it"
	}
	present := false
	for _, pid := range f.members {
		if pid == f.target {
			present = true
		} else if !f.descends(pid) {
			return fmt.Sprintf("process %d in its cgroup %s was not started by it", pid, f.path)
		}
	}
	if !present {
		return "it has left the cgroup " + f.path
	}
	return ""
}

func (f facts) descends(pid int32) bool {
	for range len(f.parents) + 1 { // pids that changed hands could make a ring
		if pid == f.target {
			return true
		}
		pid = f.parents[pid]
	}
	return false
}

// freeze is the pause of all processes of a cgroup.
type freeze struct {
	*cgroup
	m       *Mechanism
	session *session
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
	// Somebody may have moved in meanwhile.
	why, err := z.m.unfit(z.cgroup, facts{target: z.session.target.PID, path: z.path})
	switch {
	case err != nil:
		return err
	case why != "":
		return fmt.Errorf("process %v is not suspended: %s, since a moment ago: try again", z.session.target, why)
	}
	return nil
}

func (z *freeze) undo() error          { return z.thaw() }
func (z *freeze) entry() journal.Entry { return journal.Entry{Cgroup: z.path, CgroupID: z.id} }

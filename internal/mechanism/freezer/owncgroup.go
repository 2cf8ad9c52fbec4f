package freezer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// ownCgroup opens the cgroup that holds the process and its descendants only; nil and
// the reason when that is not so.
func (m *Mechanism) ownCgroup(p *proc.Process) (*cgroup, string, error) {
	if mnt, err := m.mounted(); err != nil {
		return nil, "", err
	} else if mnt == nil {
		return nil, "cgroup v2 is not mounted", nil
	}
	text, err := p.Cgroup()
	if err != nil {
		return nil, "", err
	}
	own, err := os.ReadFile(filepath.Join(m.cfg.Root, "proc/self/cgroup"))
	if err != nil {
		return nil, "", err
	}
	f := facts{target: p.Key().PID, path: discovery.CgroupV2Path(text), own: discovery.CgroupV2Path(own)}
	if why := f.unfitByName(); why != "" {
		return nil, why, nil
	}
	g, err := m.openCgroup(f.path)
	if errors.Is(err, errUnseen) || errors.Is(err, errRemoved) {
		return nil, "this program cannot see its cgroup " + f.path, nil
	} else if err != nil {
		return nil, "", err
	}
	why, err := m.unfit(g, f)
	if err == nil && why == "" {
		return g, "", nil
	}
	g.close()
	if errors.Is(err, errRemoved) {
		why, err = "its cgroup "+f.path+" was removed", nil
	}
	return nil, why, err
}

// unfit reads the members of the cgroup and returns why it must not be frozen, "" if it
// may be.
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
		path := filepath.Join(m.cfg.Root, "proc", strconv.Itoa(int(pid)), "status")
		status, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			return nil // it has exited: its parent is unknown
		} else if err != nil {
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

// facts decide whether the cgroup of a process may be frozen.
type facts struct {
	target int32
	// path is the cgroup of the target and own that of this program; "" for none.
	path, own string
	// kind is cgroup.type, nested the number of cgroups below it, as text.
	kind, nested string
	// members are the processes in it. parents maps each of them, and its ancestors up
	// to the target, to its parent.
	members []int32
	parents map[int32]int32
}

// unfitByName returns why a cgroup must not be frozen, judging by its path alone.
func (f facts) unfitByName() string {
	base := path.Base(f.path)
	switch {
	case f.path == "":
		return "it is in no cgroup of version 2"
	case f.path == "/":
		return "it is in the root cgroup"
	case path.Clean(f.path) != f.path || strings.HasPrefix(f.path, "/.."):
		return "this program cannot see its cgroup " + f.path
	case f.own == f.path || strings.HasPrefix(f.own, f.path+"/"):
		return "this program is in its cgroup " + f.path
	case strings.HasSuffix(base, ".slice"),
		base == "init.scope",
		strings.HasPrefix(base, "session-") && strings.HasSuffix(base, ".scope"),
		strings.HasPrefix(base, "user@") && strings.HasSuffix(base, ".service"):
		return "its cgroup " + f.path + " belongs to a login session or to systemd"
	}
	return ""
}

// unfit returns why a cgroup must not be frozen: it must hold the target and its
// descendants, and nothing else.
func (f facts) unfit() string {
	switch {
	case f.kind != "domain":
		return "its cgroup " + f.path + " is of type " + f.kind
	case f.nested != "0":
		return "its cgroup " + f.path + " has child cgroups"
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
	for range len(f.parents) + 1 { // reused pids could form a cycle
		if pid == f.target {
			return true
		}
		pid = f.parents[pid]
	}
	return false
}

// thawOwn thaws the cgroup that choose would freeze now: it is unknown which cgroup was
// frozen, and this may end the freeze of another program.
func (m *Mechanism) thawOwn(p *proc.Process) error {
	g, _, err := m.ownCgroup(p)
	if err != nil || g == nil {
		return err
	}
	defer g.close()
	return g.thaw()
}

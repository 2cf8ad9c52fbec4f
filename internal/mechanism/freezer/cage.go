package freezer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// cage is the pause of one process, all its threads, in a cgroup of its own that is frozen before
// the process is moved there, and until it has been moved back: it never runs there, so that
// it escapes no limit of its own cgroup. The kernel runs nothing of a process in a frozen cgroup,
// traced or not (JOBCTL_TRAP_FREEZE, do_freezer_trap): a tracer need not be stopped.
//
// The cage is a child of the process's cgroup, which systemd and container runtimes go on to take for
// populated, or of the next one above that root owns: to move a process one must be allowed to write
// to a cgroup that has both places below it (cgroup_procs_write_permission).
type cage struct {
	*cgroup
	m       *Mechanism
	process *proc.Process
	// home is where the process was.
	home string
}

// cageName returns the name of the cage of a process.
func cageName(key gpreempt.ProcessKey) string {
	return fmt.Sprintf("gpreempt-stop-%d-%d", key.PID, key.Start)
}

// place opens the cgroup below which the cage of a process is made.
func (m *Mechanism) place(p *proc.Process) (g *cgroup, home string, err error) {
	text, err := p.Cgroup()
	if err != nil {
		return nil, "", err
	}
	home = discovery.CgroupV2Path(text)
	switch mnt, err := m.mounted(); {
	case err != nil:
		return nil, "", err
	case mnt == nil:
		return nil, "", errors.New("cgroup v2 is not mounted")
	case home == "" || path.Clean(home) != home || strings.HasPrefix(home, "/.."):
		return nil, "", fmt.Errorf("cgroup %q: %w", home, errUnseen)
	}
	if path.Base(home) == cageName(p.Key()) { // left there by a daemon that died, and runs
		home = path.Dir(home)
	}
	for at := home; ; at = path.Dir(at) {
		g, err = m.openCgroup(at)
		if err == nil {
			if g.ofRoot() {
				return g, home, nil
			}
			g.close()
		}
		if at == "/" || err != nil && !errors.Is(err, errRemoved) {
			return nil, "", fmt.Errorf("there is no cgroup of root's from %s upwards: %w", home, err)
		}
	}
}

// ofRoot reports whether only root may move processes there, and a child can be frozen.
func (g *cgroup) ofRoot() bool {
	info, err := g.dir.Stat("cgroup.procs")
	if err != nil || info.Mode().Perm()&0o022 != 0 || info.Sys().(*syscall.Stat_t).Uid != 0 {
		return false
	}
	kind, err := g.read("cgroup.type")
	return errors.Is(err, errRemoved) || err == nil && kind == "domain" // the root cgroup has no type
}

// prepareCage makes the cage of a process, which stays where it is.
func (m *Mechanism) prepareCage(p *proc.Process) (*cage, error) {
	place, home, err := m.place(p)
	if err != nil {
		return nil, err
	}
	defer place.close()
	name := cageName(p.Key())
	if err := place.dir.Mkdir(name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make a cgroup below %s: %w", place.path, err)
	}
	g, err := m.openCgroup(path.Join(place.path, name))
	if err != nil {
		return nil, err
	}
	return &cage{g, m, p, home}, nil
}

func (*cage) begun() (bool, error) { return false, nil }

func (c *cage) begin(ctx context.Context) error {
	if err := c.set("1"); err != nil {
		return err
	}
	if err := c.take(c.process.Key().PID); err != nil {
		return err
	}
	return c.awaitFrozen(ctx)
}

func (c *cage) runs() (bool, error) {
	text, err := c.process.Cgroup()
	if err != nil {
		return false, err
	}
	if discovery.CgroupV2Path(text) != c.path {
		return true, nil
	}
	value, err := c.read("cgroup.freeze")
	return value != "1", err
}

// close also removes a cage that nothing was moved to.
func (c *cage) close() {
	_ = c.m.remove(c.cgroup) // one that stays does no harm: it is used again
	c.cgroup.close()
}

func (c *cage) undo() error { return c.m.runCaged(c.cgroup, c.home) }

func (c *cage) entry() mechanism.JournalEntry {
	return mechanism.JournalEntry{Cgroup: c.path, CgroupID: c.id, Home: c.home}
}

// take moves a process into the cgroup.
func (g *cgroup) take(pid int32) error {
	err := g.write("cgroup.procs", strconv.Itoa(int(pid)))
	if errors.Is(err, unix.ESRCH) {
		return mechanism.ErrGone
	}
	if err != nil {
		return fmt.Errorf("move process %d: %w", pid, err)
	}
	return nil
}

// runCaged has what is in a cage run: in the cgroup home, or in the cage where that is gone or takes no
// process. Then the cage stays until they have ended.
func (m *Mechanism) runCaged(g *cgroup, home string) error {
	text, err := g.read("cgroup.procs")
	if errors.Is(err, errRemoved) {
		return nil
	} else if err != nil {
		return errors.Join(err, g.thaw())
	}
	pids, err := parseProcs(text)
	if err != nil {
		return errors.Join(fmt.Errorf("cgroup %s: cgroup.procs: %w", g.path, err), g.thaw())
	}
	to, err := m.openCgroup(home)
	if err == nil {
		for _, pid := range pids {
			if moving := to.take(pid); moving != nil && !errors.Is(moving, mechanism.ErrGone) {
				err = errors.Join(err, moving)
			}
		}
		to.close()
	}
	if err != nil {
		m.cfg.Log.Warn("a stopped process could not be moved back to its cgroup, and runs in that of gpreemptd", log.Cgroup(g.path), log.Err(err))
	}
	if err := g.thaw(); err != nil {
		return err
	}
	return m.remove(g)
}

// remove removes a cage without processes.
func (m *Mechanism) remove(g *cgroup) error {
	above, err := m.openCgroup(path.Dir(g.path))
	if errors.Is(err, errRemoved) {
		return nil // then the cage is gone, too
	}
	if err != nil {
		return err
	}
	defer above.close()
	if err := above.dir.Remove(path.Base(g.path)); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("remove cgroup %s: %w", g.path, err)
	}
	return nil
}

// emptyUnknown is empty for a process of which it is only known that it may be in a cage.
func (m *Mechanism) emptyUnknown(p *proc.Process) error {
	text, err := p.Cgroup()
	if err != nil {
		return err
	}
	at := discovery.CgroupV2Path(text)
	if path.Base(at) != cageName(p.Key()) {
		return nil
	}
	g, err := m.openCgroup(at)
	if errors.Is(err, errRemoved) {
		return nil
	} else if err != nil {
		return err
	}
	defer g.close()
	return m.runCaged(g, path.Dir(at))
}

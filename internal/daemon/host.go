package daemon

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/mechanism/helper"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// gpusOf returns the GPUs that have queues of a target.
func (d *daemon) gpusOf(key gpreempt.ProcessKey) []gpreempt.GPU {
	proc, ok := d.inventory.Process(key)
	if !ok {
		return nil
	}
	return targets.GPUsWithQueues(d.inventory.GPUs(), proc)
}

// Host is the machine that the daemon works on: the hardware's, or one that a program
// simulates in process.
type Host struct {
	// Simulated names the kind of a simulated machine, such as "mi300x"; "" is a machine
	// whose processes are this kernel's. On a simulated one there are no hazards, no
	// containers and no kernel log, and criu and freezer, which act on processes of this
	// kernel, are not used.
	Simulated string
	// Lock is a file that the daemons of the host have in common, whatever RunDir and whatever
	// container they are in; "" for none.
	Lock string
	// Dir is the host's root directory, where mechanisms keep /proc/PID open.
	Dir string
	// Files, if not nil, is read in place of Dir by everything else.
	Files fs.FS
	// Open opens the driver.
	Open func() (*kfd.Device, error)
	// RM is the driver of NVIDIA. Nil is a host without it.
	RM nvrm.Sys
	// Supervise starts the supervisor of nvchannels; nil starts this program as one.
	Supervise func() (daemon *os.File, cmd *exec.Cmd, err error)
	// Attach starts a thread that traces a process, for dbgtrap. Nil has dbgtrap run in helper
	// processes.
	Attach dbgtrap.Tracer
	// Mechanisms, if not nil, are used in place of those that the config names.
	Mechanisms []mechanism.Mechanism
	// Backlogs reads the pending work of queues of a process; nil reads the memory of this
	// kernel's processes.
	Backlogs ReadBacklogs
	// RunDir is the directory of the instance lock and the journal of pauses, which end with
	// the host. A simulated host has none.
	RunDir string
}

// ReadBacklogs returns the backlogs of queues of one process, index by index.
type ReadBacklogs func(context.Context, gpreempt.ProcessKey, []gpreempt.QueueEntry) ([]inventory.Backlog, error)

// ThisHost returns the host of the calling process. RunDir is the directory of systemd's
// RUNTIME_DIRECTORY, or else that of the default socket.
func ThisHost() Host {
	dir, _, _ := strings.Cut(os.Getenv("RUNTIME_DIRECTORY"), ":")
	return Host{Dir: "/", Lock: hostLock, Open: kfd.Open, RM: nvrm.Kernel(), RunDir: cmp.Or(dir, filepath.Dir(config.Default().Socket))}
}

func (h Host) files() fs.FS {
	if h.Files != nil {
		return h.Files
	}
	return discovery.Host(h.Dir)
}

// openJournal opens the journal, even if no enabled mechanism needs it: an earlier daemon
// may have left processes paused.
func (b *backend) openJournal(ctx context.Context, h Host, log *zap.Logger) {
	dir := journalDir(h.RunDir)
	pauses, unreadable, err := openPauses(ctx, h, b.helpers, log)
	if err != nil {
		b.warn(gpreempt.WarnNoJournal.Warn("the mechanisms criu and freezer cannot be used, and processes they left paused cannot be resumed: " + err.Error()).
			WithRemedy("make " + dir + " a directory that only root can write, then restart gpreemptd"))
		return
	}
	b.pauses = pauses
	for _, err := range unreadable {
		b.warn(gpreempt.WarnJournalUnreadable.Warn(err.Error()))
	}
}

func (b *backend) openDbgtrap(host Host, gpus func(gpreempt.ProcessKey) []gpreempt.GPU, crashes func(gpreempt.GPUID) bool, log *zap.Logger) mechanism.Mechanism {
	device, err := host.Open()
	switch {
	case errors.Is(err, fs.ErrNotExist) && !b.hasDriver(): // findGPUs warns
		b.openErr = err
		return nil
	case err != nil:
		b.openErr = err
		b.warn(gpreempt.WarnKFDClosed.Warn("the mechanism dbgtrap cannot be used: " + err.Error()))
		return nil
	}
	b.device = device
	if w := device.Warning(); w != "" {
		b.warn(gpreempt.WarnKFDUnknown.Warn(w))
	}
	local := dbgtrap.New(dbgtrap.Config{
		Device:  device,
		Attach:  host.Attach,
		Root:    host.Dir,
		Files:   host.files(),
		GPUs:    gpus,
		Crashes: crashes,
		Owns:    b.owns,
		Log:     log.Named("dbgtrap"),
	})
	b.dbgtrap = local
	if host.Attach == nil {
		b.dbgtrap = helper.New(helper.Config{
			Pool: b.helpers, Local: local,
			Safe: func() []gpreempt.GPUID { return b.gpusExcept(crashes) },
		})
	}
	return b.dbgtrap
}

// owns reports whether a process is a part of the daemon.
func (b *backend) owns(pid int32) bool {
	return int(pid) == os.Getpid() || b.helpers.Owns(pid) || b.nvidia != nil && b.nvidia.Owns(pid)
}

// gpusExcept returns the GPUs of the host without some of them.
func (b *backend) gpusExcept(left func(gpreempt.GPUID) bool) []gpreempt.GPUID {
	gpus, err := b.fs.GPUs()
	if err != nil {
		return nil // each may crash
	}
	var ids []gpreempt.GPUID
	for _, g := range gpus {
		if !left(g.ID) {
			ids = append(ids, g.ID)
		}
	}
	return ids
}

// hasDriver reports whether the driver is loaded, even if its device cannot be opened.
func (b *backend) hasDriver() bool {
	_, err := fs.Stat(b.root, "sys/class/kfd")
	return err == nil
}

// assess returns what is known of using a mechanism on a target beyond what the mechanism
// can check itself. A simulated GPU has no hazards.
func (d *daemon) assess(name string, target gpreempt.ProcessKey) targets.Assessment {
	if p := d.backend.pauses; p != nil && p.Orphaned(target) {
		return targets.Assessment{Evidence: mechanism.Evidence{Check: "journal", Found: "still paused by an earlier daemon"}}
	}
	found, _ := d.inventory.Process(target)
	facts, _ := d.registry.Facts(target)
	if e := targets.Obstacle(name, found, facts.Decision); e != nil {
		return targets.Assessment{Evidence: *e}
	}
	if p := d.backend.pauses; p != nil && name == p.Stop.Name() && permittedTracer(target) {
		return targets.Assessment{Evidence: mechanism.Evidence{Check: "tracer", Found: "a debugger of root's traces it"}}
	}
	h := d.hazards.Load()
	if h == nil {
		simulated := d.backend.simulated != ""
		return targets.Assessment{Evidence: mechanism.Evidence{Check: "hazard table", Found: "the GPUs of this host are not known yet", OK: simulated}}
	}
	return h.Assess(name, found, d.inventory.GPUs())
}

// permittedTracer reports whether a debugger of an admin's traces a process: one of root's, of a job
// that is not root's. Other users cannot start one.
func permittedTracer(target gpreempt.ProcessKey) bool {
	p, err := proc.Open("/", target)
	if err != nil {
		return false
	}
	defer p.Close()
	status, err := p.Status()
	tracer, traced := proc.TracerOf("/", status)
	return err == nil && traced && status.UID != 0 && tracer.UID == 0 && !proc.Ours(tracer)
}

// kill ends a process by SIGKILL.
func kill(target gpreempt.ProcessKey) error {
	p, err := proc.OpenWithPidfd("/", target)
	if err != nil {
		return err
	}
	defer p.Close()
	return p.Signal(syscall.SIGKILL)
}

// crashesWithoutVM is dbgtrap.Config.Crashes.
func (d *daemon) crashesWithoutVM(gpu gpreempt.GPUID) bool {
	h := d.hazards.Load()
	return h == nil || h.CrashesWithoutVM(gpu)
}

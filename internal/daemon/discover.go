package daemon

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/container"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
	"github.com/gpreempt/gpreempt/pkg/scheduler/parking"
)

// openObserver creates the observer of the queues.
func (d *daemon) openObserver() {
	cfg := inventory.Config{
		Root:      d.backend.root,
		Dump:      d.backend.dump,
		FS:        d.backend.fs,
		Inventory: d.inventory,
		Intervals: func() inventory.Intervals {
			c := d.config.Load().Discovery
			return inventory.Intervals{Shortest: c.Interval, Longest: c.IdleInterval, Debugfs: c.Debugfs}
		},
		Before:    d.findNewGPUs,
		Scanned:   d.registry.Apply,
		Described: d.registry.QueuesChanged,
		Busy: func() (busy bool) {
			d.runner.View(func(c *scheduler.Core) { busy = c.LeaseCount() > 0 })
			return busy
		},
		Warn: d.warnings.set,
		Now:  time.Now,
		Log:  d.log.Named("observer"),
	}
	if d.backend.dbgtrap != nil {
		cfg.Snapshot = d.snapshot
	}
	if d.backend.device != nil {
		cfg.SMI = d.openSMI
	}
	d.observer = inventory.NewObserver(cfg)
}

// snapshot returns the queues of an attached target as the driver lists them.
func (d *daemon) snapshot(key gpreempt.ProcessKey) map[uint32]gpreempt.QueueInfo {
	if facts, _ := d.registry.Facts(key); facts.Mechanism == "" {
		return nil
	}
	queues, attached := d.backend.dbgtrap.Queues(key)
	if !attached {
		return nil
	}
	infos := make(map[uint32]gpreempt.QueueInfo, len(queues))
	for _, q := range queues {
		infos[q.QueueID] = gpreempt.QueueInfo{
			Source: gpreempt.FromSnapshot, RingBase: q.RingBaseAddress, AQL: q.QueueType == kfd.QueueTypeComputeAQL,
			ReadPointer: q.ReadPointerAddress, WritePointer: q.WritePointerAddress, SaveArea: q.CtxSaveRestoreAddress,
		}
	}
	return infos
}

// openSMI opens the eviction events of a GPU for all processes.
func (d *daemon) openSMI(gpu gpreempt.GPUID) (inventory.Stream, error) {
	stream, err := d.backend.device.OpenSMI(gpu, kfd.SMIEvents(kfd.SMIQueueEviction)|kfd.SMIAllProcesses)
	if err != nil {
		return nil, err
	}
	return stream, nil
}

// runtimeSockets are those of container runtimes. One elsewhere is found by a symbolic link.
var runtimeSockets = []string{
	"/run/containerd/containerd.sock",
	"/run/crio/crio.sock",
	"/run/cri-dockerd.sock",
	"/run/k3s/containerd/containerd.sock",
	"/run/k0s/containerd.sock",
	"/var/snap/microk8s/common/run/containerd.sock",
	"/run/docker.sock",
	"/run/podman/podman.sock",
}

func newContainers(root fs.FS, changed func(id string), logger *zap.Logger) *container.Resolver {
	return container.New(container.Config{
		Sockets: runtimeSockets,
		Cgroup: func(pid int32) (gpreempt.Cgroup, error) {
			text, err := fs.ReadFile(root, fmt.Sprintf("proc/%d/cgroup", pid))
			return discovery.ParseCgroup(text), err
		},
		Changed: changed,
		Log:     logger,
		Now:     time.Now,
	})
}

// container returns what is known of a container.
func (d *daemon) container(at gpreempt.Cgroup) (c gpreempt.Container, known bool) {
	if d.containers == nil {
		return gpreempt.Container{}, true
	}
	return d.containers.Lookup(at)
}

// listWarnings returns the current warnings.
func (d *daemon) listWarnings() []gpreempt.Warning {
	all := d.warnings.list()
	if d.containers != nil {
		all = append(all, d.containers.Warnings()...)
	}
	if d.server != nil {
		all = append(all, d.server.Warnings()...)
	}
	var jobs []scheduler.JobInfo
	var targets []scheduler.TargetInfo
	var floor float64
	d.runner.View(func(c *scheduler.Core) { jobs, floor, targets = c.Jobs(), c.Policy().ShareFloor, c.Targets() })
	used := d.inventory.Occupancy(scheduler.OffGPU(targets))
	by := func(key gpreempt.ProcessKey) string {
		facts, _ := d.registry.Facts(key)
		return facts.Decision.By
	}
	why := func(key gpreempt.ProcessKey) string {
		facts, _ := d.registry.Facts(key)
		return facts.AttachError
	}
	return slices.Concat(all, d.resetWarning(), stuck(targets), offlineOwners(targets, by), cannotSuspend(targets, why), jobsBelowFloor(jobs, floor), slotsLow(d.inventory.GPUs(), used, parking.Spare))
}

// setRules uses other rules, and starts a scan for the facts that they need.
func (d *daemon) setRules(c *classify.Classifier) {
	d.backend.fs.SetEnv(c.Env())
	d.registry.SetRules(c)
	if d.observer != nil { // not the first rules
		d.observer.Rescan()
	}
}

// backlogs reads the pending work of queues of a process.
func (d *daemon) backlogs(ctx context.Context, key gpreempt.ProcessKey, queues []gpreempt.QueueEntry) []inventory.Backlog {
	all, err := d.backend.backlogs(ctx, key, queues)
	if err != nil {
		d.log.Debug("cannot read a backlog", log.Target(key), log.Err(err))
	}
	return all
}

// bystanders returns the GPUs on which a process has no queue and others have some, except
// those whose firmware schedules without a runlist; false for a process that is not known.
func (d *daemon) bystanders(key gpreempt.ProcessKey) ([]gpreempt.GPUID, bool) {
	proc, known := d.inventory.Process(key)
	own := proc.GPUs()
	return slices.DeleteFunc(d.runlists(), func(gpu gpreempt.GPUID) bool { return slices.Contains(own, gpu) }), known
}

// runlists returns the GPUs whose firmware schedules by a runlist, and that have queues.
func (d *daemon) runlists() (gpus []gpreempt.GPUID) {
	used := map[gpreempt.GPUID]bool{}
	queues, _ := d.inventory.Queues()
	for _, q := range queues {
		used[q.GPU] = true
	}
	for _, gpu := range d.inventory.GPUs() {
		if !gpu.MES && used[gpu.ID] {
			gpus = append(gpus, gpu.ID)
		}
	}
	return gpus
}

// countHelperExit counts what the end of a helper costs: as that of every process of the driver,
// a cycle of each runlist (process_termination_cpsch).
func (d *daemon) countHelperExit() {
	for _, gpu := range d.runlists() {
		d.events.Disturbed(gpu, 1)
	}
}

// sinceBreakersClosed returns for how long every breaker has been closed, negative while one is open.
func (d *daemon) sinceBreakersClosed() (t time.Duration) {
	d.runner.View(func(c *scheduler.Core) { t = d.runner.Now() - c.BreakersClose() })
	return t
}

// busy reports whether the queues of a process have work. It is known if one has, or if
// all could be read.
func (d *daemon) busy(ctx context.Context, key gpreempt.ProcessKey) (busy, known bool) {
	backlogs := d.backlogs(ctx, key, d.inventory.QueuesOf(key))
	known = len(backlogs) > 0
	for _, b := range backlogs {
		if b.Value > 0 {
			return true, true
		}
		known = known && b.Known
	}
	return false, known
}

// bootID returns the boot id of this host; "" if it cannot be read.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "" // it is only displayed
	}
	return strings.TrimSpace(string(b))
}

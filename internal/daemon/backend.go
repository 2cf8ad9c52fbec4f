package daemon

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/dumps"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/helper"
	"github.com/gpreempt/gpreempt/internal/mechanism/nvchannels"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// backend is what the daemon uses of its host: files, driver and mechanisms.
type backend struct {
	name string
	// simulated is Host.Simulated.
	simulated string
	// root is the root directory of the host, and fs the reader of its KFD.
	root fs.FS
	fs   *discovery.FS
	// dump reads a file of debugfs in a process of its own; nil reads root.
	dump func(path string) ([]byte, error)
	// mechanisms are those to use, best first.
	mechanisms []mechanism.Mechanism
	backlogs   ReadBacklogs
	warnings   []gpreempt.Warning

	// The driver and the mechanism over it, and the mechanisms whose pauses outlive the
	// daemon; each nil if it could not be opened.
	device  *kfd.Device
	openErr error // why device is nil, if dbgtrap is enabled
	dbgtrap debugger
	pauses  *pauses
	helpers *helper.Pool
	// nvidia and channels, which finds its processes, are nil unless it is enabled and can be used.
	nvidia   *nvchannels.Mechanism
	channels *nvrm.Source
}

// debugger is dbgtrap, in this process or in helpers.
type debugger interface {
	mechanism.Mechanism
	Queues(gpreempt.ProcessKey) ([]kfd.QueueSnapshotEntry, bool)
}

// mechanismNames returns the names of the mechanisms, best first.
func (b *backend) mechanismNames() (names []string) {
	for _, m := range b.mechanisms {
		names = append(names, m.Name())
	}
	return names
}

// calls returns how many calls of the driver were made for targets, and their total time.
func (b *backend) calls() (n int64, took time.Duration) {
	n, took = b.device.Calls()
	if helped, ok := b.dbgtrap.(*helper.Mechanism); ok {
		more, longer := helped.Calls()
		n, took = n+more, took+longer
	}
	return n, took
}

func (b *backend) warn(w gpreempt.Warning) { b.warnings = append(b.warnings, w) }

// openBackend opens the host's KFD and the mechanisms over it. A part that cannot be
// opened is a warning: the daemon observes and classifies without it.
func openBackend(ctx context.Context, h Host, cfg config.Config, gpus func(gpreempt.ProcessKey) []gpreempt.GPU, crashes func(gpreempt.GPUID) bool, countHelperExit func(), sinceBreakersClosed func() time.Duration, log *zap.Logger) *backend {
	root := h.files()
	b := &backend{
		name: "simulated " + h.Simulated, simulated: h.Simulated,
		root: root, fs: discovery.NewFS(root), backlogs: h.Backlogs, mechanisms: h.Mechanisms,
		helpers: helper.NewPool(log.Named("helper"), countHelperExit, sinceBreakersClosed),
	}
	if h.Attach == nil {
		b.fs.Omit(b.owns)
	}
	if h.Simulated == "" && h.Files == nil && h.Dir == "/" {
		b.dump = dumps.New(b.owns, log.Named("dumps")).Read
	}
	if h.Simulated == "" {
		b.name = discovery.Backend(root)
		b.openJournal(ctx, h, log)
	}
	if b.backlogs == nil {
		b.backlogs = inventory.NewBacklogReader().Read
	}
	for _, name := range cfg.Mechanisms {
		switch {
		case h.Mechanisms != nil:
		case name == mechanism.DBGTrap:
			if dbgtrap := b.openDbgtrap(h, gpus, crashes, log); dbgtrap != nil {
				b.mechanisms = append(b.mechanisms, dbgtrap)
			}
		case name == mechanism.NVChannels && b.pauses != nil:
			if b.openNVIDIA(h, log); b.nvidia != nil {
				b.mechanisms = append(b.mechanisms, b.nvidia)
			}
		case b.pauses == nil: // simulated, or openJournal has warned
		case name == mechanism.CRIU:
			b.mechanisms = append(b.mechanisms, b.pauses.CRIU)
		case name == mechanism.Freezer:
			b.mechanisms = append(b.mechanisms, b.pauses.Freezer)
		}
	}
	if b.pauses != nil && len(b.mechanisms) > 0 {
		b.mechanisms = append(b.mechanisms, b.pauses.Stop)
	}
	if len(b.mechanisms) == 0 {
		b.warn(gpreempt.WarnNoMechanism.Warn("no usable mechanism: the daemon observes and classifies, and suspends nothing"))
	}
	return b
}

// lockPath returns where the instance lock is: one for each host whatever the socket,
// since two daemons would contend for the same queues; one for each socket in a
// simulation.
func (o Options) lockPath(socket string) string {
	if o.Host.Simulated != "" {
		return socket + ".lock"
	}
	return filepath.Join(o.Host.RunDir, "gpreemptd.lock")
}

// close closes journal and device. It does not wait for calls that hang.
func (b *backend) close() error {
	var errs []error
	if b.pauses != nil {
		errs = append(errs, b.pauses.Close())
	}
	errs = append(errs, b.helpers.Close())
	if b.nvidia != nil {
		errs = append(errs, b.nvidia.Close())
		b.channels.Close()
	}
	if b.device != nil {
		errs = append(errs, b.device.Close())
	}
	return errors.Join(errs...)
}

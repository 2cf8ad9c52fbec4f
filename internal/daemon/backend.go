package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/backlog"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/mechanism/sim"
	"github.com/gpreempt/gpreempt/internal/peercred"
	"github.com/gpreempt/gpreempt/internal/simserver"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// backend is what lies below the daemon: the KFD of the host, or a simulated
// machine in its place.
type backend struct {
	name string
	// root is the root directory of the machine, and fs the reader of its KFD.
	root fs.FS
	fs   *discovery.FS
	// rungs are the mechanisms, best first.
	rungs []mechanism.Mechanism
	// snapshot returns the queues of a held process by id as the driver tells them; nil
	// when it does not.
	snapshot func(gpreempt.ProcessKey) map[uint32]gpreempt.QueueInfo
	// backlogs reads the work waiting on queues of a process.
	backlogs func(context.Context, gpreempt.ProcessKey, []backlog.Queue) ([]backlog.Backlog, error)
	warnings []gpreempt.Warning

	// Of a host only: the driver and the mechanism over it, and the pauses that
	// outlive the daemon; each nil when it could not be opened.
	device  *kfd.Device
	openErr error // why there is no device, when one was wanted
	dbgtrap *dbgtrap.Mechanism
	pauses  *pauses

	// Of a simulated machine only.
	machine   *gpumodel.Realtime
	simServer *simserver.Server
}

func (b *backend) warn(w gpreempt.Warning) { b.warnings = append(b.warnings, w) }

// SimMachines names the machines --sim knows.
func SimMachines() string {
	var names []string
	for _, spec := range gpumodel.Presets() {
		names = append(names, spec.Name)
	}
	return strings.Join(names, ", ")
}

func openBackend(ctx context.Context, o Options, cfg config.Config, h hooks, log *zap.Logger) (*backend, error) {
	if o.Sim == nil {
		return openHost(ctx, o.machine(), cfg, h, log), nil
	}
	timer, err := hrtimer.New()
	if err != nil {
		return nil, fmt.Errorf("simulated machine: %w", err)
	}
	machine := gpumodel.Start(gpumodel.New(*o.Sim, o.SimGPUs, o.SimSeed), timer)
	mech := o.SimMechanism
	if mech == nil {
		mech = sim.New(machine)
	}
	return &backend{
		name:  "simulated " + o.Sim.Name,
		root:  machine.FS(),
		fs:    discovery.NewFS(machine.FS()),
		rungs: []mechanism.Mechanism{mech},
		backlogs: func(_ context.Context, key gpreempt.ProcessKey, queues []backlog.Queue) ([]backlog.Backlog, error) {
			all := make([]backlog.Backlog, len(queues))
			for n, q := range queues {
				packets, err := machine.QueueBacklog(key, q.ID)
				if err != nil {
					return nil, err
				}
				all[n] = backlog.Backlog{Known: true, Value: packets, Unit: backlog.Packets}
			}
			return all, nil
		},
		snapshot:  machine.Snapshot,
		machine:   machine,
		simServer: simserver.New(machine, identify),
	}, nil
}

// identify tells the simulated machine who calls: the same proof the API uses.
func identify(ctx context.Context) (pid int32, start uint64, uid uint32, done <-chan struct{}, err error) {
	conn, ok := peercred.FromContext(ctx)
	if !ok {
		return 0, 0, 0, nil, errors.New("the caller's identity is not known")
	}
	p := conn.Peer()
	return p.PID, p.Start, p.UID, conn.Done(), nil
}

// lockPath is where the instance lock lies: one for the host's KFD whatever the
// socket, since two daemons would fight over the same queues; one for each socket
// in a simulation.
func (o Options) lockPath(socket string) string {
	if o.Sim != nil {
		return socket + ".lock"
	}
	return filepath.Join(o.machine().run, "gpreemptd.lock")
}

// close releases what was opened; it waits for no call that hangs.
func (b *backend) close() error {
	var errs []error
	if b.pauses != nil {
		errs = append(errs, b.pauses.journal.Close())
	}
	if b.device != nil {
		errs = append(errs, b.device.Close())
	}
	if b.machine != nil {
		b.simServer.Close()
		errs = append(errs, b.machine.Close())
	}
	return errors.Join(errs...)
}

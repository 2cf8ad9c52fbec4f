package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/gpusim"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/internal/peercred"
	"github.com/gpreempt/gpreempt/internal/preempt"
	"github.com/gpreempt/gpreempt/internal/preempt/sim"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/internal/simserver"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// backend is what lies below the daemon: the KFD of the host, or a simulated
// machine in its place.
type backend struct {
	name string
	fs   *discovery.FS
	// rungs are the mechanisms, best first.
	rungs []preempt.Mechanism
	// busy tells whether the queues of a process have work; false, false when that
	// cannot be read.
	busy      func(gpreempt.ProcessKey) (busy, known bool)
	warnings  []server.Warning
	machine   *gpusim.Realtime
	simServer *simserver.Server
}

// SimMachines names the machines --sim knows.
func SimMachines() string {
	var names []string
	for _, spec := range gpusim.Presets() {
		names = append(names, spec.Name)
	}
	return strings.Join(names, ", ")
}

func openBackend(o Options) (*backend, error) {
	if o.Sim == nil {
		return hostBackend(), nil
	}
	if err := o.Sim.Validate(o.SimGPUs); err != nil {
		return nil, fmt.Errorf("simulated machine: %w", err)
	}
	timer, err := hrtimer.New()
	if err != nil {
		return nil, fmt.Errorf("simulated machine: %w", err)
	}
	machine := gpusim.Start(gpusim.New(*o.Sim, o.SimGPUs, o.SimSeed), timer)
	return &backend{
		name:  "simulated " + o.Sim.Name,
		fs:    discovery.NewFS(machine.FS()),
		rungs: []preempt.Mechanism{sim.New(machine)},
		busy: func(key gpreempt.ProcessKey) (bool, bool) {
			b, err := machine.Backlog(key)
			return b.Packets > 0, err == nil
		},
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

// hostBackend watches the KFD of the host. This version has no mechanism for it:
// it shows and classifies, and suspends nothing.
func hostBackend() *backend {
	return &backend{
		name: "kfd",
		fs:   discovery.NewFS(os.DirFS("/")),
		busy: func(gpreempt.ProcessKey) (bool, bool) { return false, false },
		warnings: []server.Warning{{
			Code: "NO_MECHANISM", Severity: "error",
			Text:   "this version has no way to suspend queues on hardware: it watches and classifies, and leaves everything running",
			Remedy: "use it to see and to write rules; gpreemptd serve --sim mi300x shows the whole on a simulated GPU",
		}},
	}
}

// lockPath is where the instance lock lies: one for the host's KFD whatever the
// socket, since two daemons would fight over the same queues; one for each socket
// in a simulation.
func (b *backend) lockPath(socket string) string {
	if b.machine != nil {
		return socket + ".lock"
	}
	return filepath.Join(filepath.Dir(config.Default().Socket), "gpreemptd.lock")
}

func (b *backend) close() error {
	if b.machine == nil {
		return nil
	}
	b.simServer.Close()
	return b.machine.Close()
}

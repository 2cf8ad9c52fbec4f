package daemon

import (
	"context"
	"net"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func (d *daemon) serveMetrics(ctx context.Context, l net.Listener) {
	events.ServeMetrics(ctx, l, events.MetricsHandler(events.MetricsConfig{
		Snapshot: d.scrape,
		Alive:    func() { d.runner.View(func(*scheduler.Core) {}) },
		Ready:    d.ready.Load,
	}), d.log.Named("metrics"))
}

// scrape returns the values of the metrics.
func (d *daemon) scrape() events.MetricsSnapshot {
	s := events.MetricsSnapshot{
		Version: api.VersionString(), Backend: d.backend.name,
		GPUs: d.inventory.GPUs(), Sources: d.observer.Sources(), Processes: len(d.inventory.Processes()),
		Queues: map[gpreempt.GPUID]int{}, Warnings: d.listWarnings(),
		Mechanisms: d.backend.mechanismNames(),
	}
	all, _ := d.inventory.Queues()
	for _, q := range all {
		s.Queues[q.GPU]++
	}
	if d.backend.device != nil {
		s.DriverCalls, s.DriverTime = d.backend.calls()
	}
	var targets []scheduler.TargetInfo
	d.runner.View(func(c *scheduler.Core) {
		targets, s.Leases, s.States = c.Targets(), c.Leases(), c.GPUs()
		s.Jobs = c.Jobs()
		s.Floor, s.Cap, s.FloorUse, s.Draining = c.Policy().ShareFloor, c.Policy().ShareCap, c.FloorUse(), c.Draining()
		s.Log, s.Now = d.events, d.runner.Now()
	})
	s.Used = d.inventory.Occupancy(scheduler.OffGPU(targets))
	for _, t := range targets {
		state, _ := d.sessions.State(t.Key)
		s.Targets = append(s.Targets, events.Target{Class: t.Class, State: t.State, Mechanism: state.Choice.Mechanism})
	}
	return s
}

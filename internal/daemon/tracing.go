package daemon

import (
	"context"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/otlp"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// openTracing makes the exporter of traces; nil when the config has none.
func (d *daemon) openTracing(ctx context.Context, t config.Tracing) (*otlp.Exporter, error) {
	if t.Endpoint == "" {
		return nil, nil //nolint:nilnil // there is none
	}
	return otlp.New(ctx, otlp.Config{
		Endpoint: t.Endpoint, Events: d.events, Version: api.VersionString(), Backend: d.backend.name,
		Now:     func() scheduler.Time { return d.runner.Now() },
		LeaseID: d.leaseID,
		Lost: func(err error) {
			if err == nil {
				d.warnings.set("tracing")
				return
			}
			d.warnings.set("tracing", gpreempt.WarnTracesLost.Warn("traces to "+t.Endpoint+": "+err.Error()))
		},
	})
}

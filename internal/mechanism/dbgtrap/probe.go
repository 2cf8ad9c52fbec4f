package dbgtrap

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Probe implements mechanism.Mechanism. It reads files and makes no call to the
// driver. What is not known, and what prevents Attach on the whole host, prevents nothing here: Attach
// finds out.
func (m *Mechanism) Probe(_ context.Context, target gpreempt.ProcessKey) mechanism.Capability {
	p, err := proc.Open(m.cfg.Root, target)
	if errors.Is(err, mechanism.ErrGone) {
		return mechanism.Capability{Evidence: []mechanism.Evidence{{Check: "process", Found: "it has exited"}}}
	}
	if err != nil {
		return mechanism.Capability{Evidence: []mechanism.Evidence{{Check: "process", Found: err.Error()}}}
	}
	defer p.Close()
	evidence := []mechanism.Evidence{
		{Check: "process", Found: "it lives", OK: true},
		m.probeFirmware(target),
		m.probeVMs(target),
		m.probeTracer(p),
	}
	return mechanism.Capability{
		Evidence:      slices.DeleteFunc(evidence, func(e mechanism.Evidence) bool { return e.Check == "" }),
		ReportsBirths: true,
	}
}

// probeFirmware looks at what ROCm asks for before it enables its runtime for
// debugging: firmware that can be debugged, on every GPU.
func (m *Mechanism) probeFirmware(target gpreempt.ProcessKey) mechanism.Evidence {
	e := mechanism.Evidence{Check: "debug firmware", Found: "on all its GPUs", OK: true}
	gpus := m.cfg.GPUs(target)
	if len(gpus) == 0 {
		e.Found = "no GPU has a queue of it yet"
	}
	var without []string
	for _, gpu := range gpus {
		if !gpu.DebugFirmware {
			without = append(without, fmt.Sprintf("%v (%s)", gpu.ID, gpu.Name))
		}
	}
	if len(without) > 0 {
		e.Found, e.OK = "none on GPU "+strings.Join(without, ", "), false
		e.Remedy = "update the GPU firmware (linux-firmware, or AMD's package), or let another mechanism hold the process"
	}
	return e
}

func (m *Mechanism) probeTracer(p *proc.Process) mechanism.Evidence {
	e := mechanism.Evidence{Check: "tracer", Found: "none", OK: true}
	status, err := p.Status()
	if err != nil {
		return mechanism.Evidence{}
	}
	tracer, traced := proc.TracerOf(m.cfg.Root, status)
	if !traced {
		return e
	}
	if m.cfg.Owns(tracer.Process) {
		e.Found = "this daemon"
		return e
	}
	e.OK, e.Reason = false, gpreempt.ReasonResisted
	e.Found, e.Remedy = proc.Traced(tracer)
	return e
}

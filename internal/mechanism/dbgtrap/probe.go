package dbgtrap

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
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
	if status.Tracer == 0 {
		return e
	}
	by := fmt.Sprintf("thread %d", status.Tracer)
	if tracer, err := proc.Status(m.cfg.Root, strconv.Itoa(int(status.Tracer))); err == nil {
		if m.cfg.Owns(tracer.Process) {
			e.Found = "this daemon"
			return e
		}
		by = fmt.Sprintf("process %d (%s)", tracer.Process, tracer.Name)
	}
	e.Found, e.OK, e.Reason = by+" traces it", false, gpreempt.ReasonResisted
	e.Remedy = "end that debugger or tracer; a process has one at a time"
	return e
}

package dbgtrap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Probe implements mechanism.Mechanism. It reads files and makes no call to the
// driver. What is not known prevents nothing: Attach finds out.
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
		m.probeInterface(),
		m.probeScheduler(),
		m.probeFirmware(target),
		m.probeVMs(target),
		m.probeTracer(p),
		m.probeYama(),
		m.probeRight(),
	}
	return mechanism.Capability{
		Evidence:      slices.DeleteFunc(evidence, func(e mechanism.Evidence) bool { return e.Check == "" }),
		ReportsBirths: true,
	}
}

func (m *Mechanism) probeInterface() mechanism.Evidence {
	d := m.cfg.Device
	e := mechanism.Evidence{Check: "KFD interface", Found: fmt.Sprintf("%v has DBG_TRAP", d.Version()), OK: true}
	if w := d.Warning(); w != "" {
		e.Found += "; " + w
	}
	return e
}

// noHWS is sched_policy without the hardware scheduler (KFD_SCHED_POLICY_NO_HWS):
// every DBG_TRAP call is refused then.
const noHWS = "2"

func (m *Mechanism) probeScheduler() mechanism.Evidence {
	policy, err := m.read("sys/module/amdgpu/parameters/sched_policy")
	switch {
	case err != nil:
		return mechanism.Evidence{}
	case policy == noHWS:
		return mechanism.Evidence{
			Check: "hardware scheduler", Found: "it is turned off: amdgpu.sched_policy is 2",
			Remedy: "load amdgpu without sched_policy=2",
		}
	}
	return mechanism.Evidence{Check: "hardware scheduler", Found: "in use", OK: true}
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
	if tracer, ok := m.status(strconv.Itoa(int(status.Tracer))); ok {
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

// status reads the status of a process or thread; false when it is not available.
func (m *Mechanism) status(name string) (discovery.ProcStatus, bool) {
	text, err := m.read(filepath.Join("proc", name, "status"))
	if err != nil {
		return discovery.ProcStatus{}, false
	}
	status, err := discovery.ParseProcStatus([]byte(text))
	return status, err == nil
}

// noTracing is Yama's scope in which nobody may trace.
const noTracing = "3"

func (m *Mechanism) probeYama() mechanism.Evidence {
	scope, err := m.read("proc/sys/kernel/yama/ptrace_scope")
	switch {
	case err != nil:
		return mechanism.Evidence{}
	case scope == noTracing:
		return mechanism.Evidence{
			Check: "Yama", Found: "kernel.yama.ptrace_scope is 3, which forbids tracing to everyone, root included",
			Remedy: "set it to 2 or less in /etc/sysctl.d and reboot; 3 cannot be undone at run time",
		}
	}
	return mechanism.Evidence{Check: "Yama", Found: "kernel.yama.ptrace_scope is " + scope, OK: true}
}

func (m *Mechanism) probeRight() mechanism.Evidence {
	e := mechanism.Evidence{Check: "CAP_SYS_PTRACE", Found: "the daemon has it", OK: true}
	status, ok := m.status("self")
	if !ok {
		return mechanism.Evidence{}
	}
	if status.Capabilities&(1<<unix.CAP_SYS_PTRACE) == 0 {
		e.Found, e.OK = "the daemon lacks it", false
		e.Remedy = "run it as root, or add CAP_SYS_PTRACE to its unit (CapabilityBoundingSet, AmbientCapabilities) or container"
	}
	return e
}

func (m *Mechanism) read(path string) (string, error) {
	text, err := os.ReadFile(filepath.Join(m.cfg.Root, path))
	return strings.TrimSpace(string(text)), err
}

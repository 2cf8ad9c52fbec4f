package accept

import (
	"context"
	"fmt"
	"os/exec"
	"time"

	"github.com/gpreempt/gpreempt/accept/workload"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// stage is a part of the acceptance: what it must show is fixed in its criteria.
type stage struct {
	name     string
	criteria string
	limit    time.Duration
	// need returns why the stage cannot run here; "" if it can.
	need func(*bench) string
	run  func(context.Context, *result) error
}

// What the criteria allow.
const (
	// mostLatency is the longest SUSPEND or RESUME of 100: the default max_wait.
	mostLatency = 20 * time.Millisecond
	// leastRate is the least rate of a held process, as a share of that of one that is not.
	leastRate = 0.95
	// controls is the number of negative controls, which must all notice within mostWindow.
	controls   = 20
	mostWindow = 10 * time.Second
	// repeats is how often a measurement is made again, with new processes.
	repeats = 3
)

// stages returns the stages in order, from harmless to harsh.
func stages() []stage {
	all := []stage{
		{
			"fingerprint", "kernel, driver, firmware and topology of the GPU can be read", time.Minute, nil, fingerprint,
		},
		{
			"conformance", "the driver agrees with every expectation of the table for such a host", 20 * time.Minute, nil, conform,
		},
		{
			"attach", "ENABLE and DISABLE of a process with queues succeed, repeatedly; the heartbeat goes on after each", 5 * time.Minute, nil, attachments,
		},
		{
			"heartbeat", fmt.Sprintf("10^4 cycles: no packet completes for a time while the queues are suspended, and some of each queue do after RESUME; "+
				"SUSPEND left out %d times is noticed every time in that time", controls), 30 * time.Minute, nil,
			func(ctx context.Context, r *result) error { return r.heartbeat(ctx, workload.Config{Queues: 2}) },
		},
		{
			"endless-kernel", "as heartbeat, with a kernel that never ends and counts in host memory", 30 * time.Minute, waves,
			func(ctx context.Context, r *result) error {
				return r.heartbeat(ctx, workload.Config{Queues: 1, Kernel: true, Groups: r.b.gpu.CUs})
			},
		},
		{
			"copies", "copies to the GPU and back across cycles have the right checksum; a corrupted byte is noticed", 15 * time.Minute, nil,
			func(ctx context.Context, r *result) error { return copies(ctx, r, 0) },
		},
	}
	var late []stage
	for _, k := range workload.Kernels {
		s := stage{
			k.Stage, "values in " + k.Storage + " survive every SUSPEND of their kernel, in every lane; a corrupted word is noticed",
			15 * time.Minute, waves, func(ctx context.Context, r *result) error { return r.waves(ctx, k.Name, "", k.Rounds) },
		}
		if k.Late {
			late = append(late, s)
		} else {
			all = append(all, s)
		}
	}
	all = append(all, []stage{
		{
			"xnack", "vector registers survive with XNACK off and on", 15 * time.Minute, waves, xnack,
		},
		{
			"peer-copies", "as copies, through the memory of another GPU", 15 * time.Minute, func(b *bench) string {
				if len(b.gpus) < 2 {
					return "it needs two GPUs"
				}
				return ""
			},
			func(ctx context.Context, r *result) error { return copies(ctx, r, r.peer()) },
		},
		{
			"latency", fmt.Sprintf("the 99th percentile of SUSPEND and of RESUME is at most %v, with up to 16 queues, 4 processes and 16 workgroups on each CU (not judged "+
				"without hardware); ENABLE and DISABLE are measured", mostLatency),
			30 * time.Minute, nil, latency,
		},
		{
			"online-gap", fmt.Sprintf("no cycle of another process interrupts a process for longer than %v in 99 of 100 (not judged without hardware); a gap of a "+
				"process that is suspended itself is measured", mostLatency),
			15 * time.Minute, nil, gaps,
		},
		{
			"grace", "SUSPEND and the gap of another process are measured with the grace periods 1, 100 and 1000, and the last two are compared (there is no limit)",
			15 * time.Minute, nil, gracePeriods,
		},
		{
			"held", fmt.Sprintf("a process that is held and not suspended launches at least %.0f %% as many packets a second (not judged without hardware)", 100*leastRate),
			10 * time.Minute, nil, held,
		},
		{
			"birth", "a queue created during a suspension does not run after the next SUSPEND, and runs after RESUME", 5 * time.Minute, nil, birth,
		},
		{
			"destroy", "destroying a suspended queue succeeds no later than after RESUME, and the other queues go on", 5 * time.Minute, nil, destroy,
		},
		{
			"register", "SUSPEND succeeds while the process registers a large part of the host's memory, and the heartbeat goes on", 15 * time.Minute, nil, register,
		},
		{
			"exit", "a suspended process that exits, executes a program or is killed leaves no process of the driver behind, and the next process runs", 10 * time.Minute, nil, deaths,
		},
		{
			"holder-killed", "when the process that suspended a job is killed, the job goes on", 5 * time.Minute, nil, holderKilled,
		},
	}...)
	all = append(all, late...)
	return append(all, []stage{
		{
			"debugtrap", "a kernel with llvm.debugtrap ends before, while and after its process is held; whether the driver reports a debugger to its trap handler is recorded, " +
				"and is the same after as before; without a trap handler nothing is trapped",
			10 * time.Minute, waves, debugtraps,
		},
		{
			"cpx", fmt.Sprintf("while a process on one partition is suspended, one on a neighbour goes on, and no cycle interrupts it for longer than %v in 99 of 100 "+
				"(not judged without hardware); that the neighbour is suspended itself is noticed", mostLatency),
			time.Hour, unpartitioned, partitions,
		},
		{
			"pytorch", "deterministic training has the same bits after 1,000 suspensions as without any; one more step has others", 2 * time.Hour, executes, pytorch,
		},
		{
			"profiler", "as pytorch, with the suspended training under " + profiler + " --kernel-trace, whose trace has a kernel for every step at least", 2 * time.Hour,
			func(b *bench) string {
				if _, err := exec.LookPath(profiler); err != nil && executes(b) == "" {
					return "no " + profiler + " on PATH: install ROCm's rocprofiler-sdk"
				}
				return executes(b)
			},
			profiled,
		},
		{
			"faults", "the driver reports the same memory fault to a process that is held and to one that is not, SUSPEND and RESUME succeed after it, and the " +
				"process leaves nothing behind; a read of mapped memory is no fault",
			10 * time.Minute, waves, faults,
		},
		{
			"soak", "as heartbeat, for as long as --soak says", 7 * 24 * time.Hour, func(b *bench) string {
				if b.cfg.Soak == 0 {
					return "--soak was not given"
				}
				return ""
			},
			func(ctx context.Context, r *result) error {
				return r.cycleFor(ctx, workload.Config{Queues: 4, Copiers: 1}, r.b.cfg.Soak)
			},
		},
	}...)
}

// executes is the need of a GPU that executes code.
func executes(b *bench) string {
	if b.machine() != hardware {
		return "it needs a GPU that executes code: this is " + b.machine()
	}
	return ""
}

// waves is the need of kernels of the acceptance.
func waves(b *bench) string {
	if why := executes(b); why != "" || workload.HasCode(b.gpu.GFX) {
		return why
	}
	return "there is no code object for " + gpreempt.GFXName(b.gpu.GFX)
}

package safety

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// The environment variables that time-outs depend on: of PyTorch, in ProcessGroupNCCL.hpp and
// .cpp, and of DeepSpeed, in deepspeed/constants.py.
const (
	envWorldSize  = "WORLD_SIZE"
	envHeartbeat  = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
	envMonitoring = "TORCH_NCCL_ENABLE_MONITORING"
	envHandling   = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
	envDeepSpeed  = "DEEPSPEED_TIMEOUT"
)

// timeoutEnv are the variables that the check of time-outs reads.
var timeoutEnv = []string{envWorldSize, envHeartbeat, envMonitoring, envHandling, envDeepSpeed}

// A suspension that begins in the middle of a collective is followed by the least run of the
// policy, and by another one: a time-out below two of them can expire although the job progressed between.
const suspensionsInATimeout = 2

// Defaults of PyTorch, in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp and .cpp.
const (
	defaultHeartbeat  = 480 * time.Second
	defaultCollective = 10 * time.Minute
)

// timeout is a time-out of a process that a suspension can make expire.
type timeout struct {
	what   string
	after  time.Duration
	remedy string
}

// timeouts returns the time-outs of a process that its environment shows.
// Those that the program sets by itself cannot be seen.
func timeouts(env map[string]string) (all []timeout) {
	number := func(name string, unit, unset time.Duration) time.Duration {
		v, err := strconv.ParseInt(env[name], 10, 32)
		if err != nil || v <= 0 {
			return unset
		}
		return time.Duration(v) * unit
	}
	if ranks := number(envWorldSize, 1, 0); ranks > 1 {
		if m := env[envMonitoring]; m != "0" {
			all = append(all, timeout{
				envHeartbeat, number(envHeartbeat, time.Second, defaultHeartbeat),
				"set " + envHeartbeat + " to more in the environment of the job",
			})
		}
		switch set := number(envDeepSpeed, time.Minute, 0); {
		case env[envHandling] == "0": // a collective that takes too long is only logged
		case set > 0:
			all = append(all, timeout{envDeepSpeed, set, "set " + envDeepSpeed + " to more minutes in the environment of the job"})
		default:
			all = append(all, timeout{
				"the default time-out of collectives", defaultCollective,
				"have the program pass a longer timeout to init_process_group (whether it does cannot be seen)",
			})
		}
	}
	return all
}

// timeOuts compares the time-outs of offline processes with the longest suspension.
func (h *host) timeOuts() finding {
	longest := h.cfg.MaxSuspend
	if h.seenErr != nil {
		return unread(h.seenErr)
	}
	var found, remedies []string
	looked, unknown := 0, 0
	for _, p := range h.reports {
		i := slices.IndexFunc(h.seen, func(s discovery.Proc) bool { return s.Key.PID == p.GetPid() })
		if !p.GetOffline() || i < 0 {
			continue
		}
		if looked++; unreadMemory(h.seen[i]) {
			unknown++
		}
		for _, t := range timeouts(h.seen[i].Env) {
			if t.after >= suspensionsInATimeout*longest {
				continue
			}
			found = append(found, fmt.Sprintf("%s of %s (%s)", t.what, named(p), seconds(t.after)))
			if !slices.Contains(remedies, t.remedy) {
				remedies = append(remedies, t.remedy)
			}
		}
	}
	switch {
	case len(found) > 0:
		return warn(strings.Join(remedies, "; ")+"; or set policy.max_suspend to at most half of the time-out: see docs/kubernetes.md",
			"two suspensions (2 × max_suspend = %s) outlast %s", seconds(suspensionsInATimeout*longest), listed(found))
	case looked == 0:
		return ok("no offline process")
	case unknown > 0:
		return warn("run gpctl doctor again; if it remains, this process may not read them", "the environments of %d of %s are not known", unknown, plural(looked, "offline process"))
	}
	return ok("%s: none that the environment shows is shorter than 2 × max_suspend = %s", plural(looked, "offline process"), seconds(suspensionsInATimeout*longest))
}

// seconds returns a duration in seconds, the unit of most of the variables.
func seconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'g', -1, 64) + " s" }

// named returns how a process is named in findings.
func named(p *gpreemptv1.DiagnosedProcess) string {
	return fmt.Sprintf("%s (pid %d)", p.GetComm(), p.GetPid())
}

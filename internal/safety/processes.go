package safety

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// daemonName is the command name of the daemon.
const daemonName = proc.Name + "d"

func (h *host) daemon() finding {
	if h.seenErr != nil {
		return unread(h.seenErr)
	}
	var others []string
	for _, s := range h.daemons {
		others = append(others, strconv.Itoa(int(s.Process)))
	}
	switch {
	case len(others) > 1, len(others) == 1 && h.cfg.ByDaemon:
		return fail("run one gpreemptd on the host, with the host's /run: two would suspend and resume the same queues",
			"another gpreemptd has the driver open: pid %s", strings.Join(others, ", "))
	case h.cfg.ByDaemon:
		return ok("this one, pid %d, and no other", h.self.Process)
	case len(others) == 1:
		return ok("gpreemptd runs, pid %s", others[0])
	}
	return warn("systemctl enable --now gpreemptd", "gpreemptd is not running, or does not use the driver: nothing is suspended by it")
}

func (h *host) processes() finding {
	if h.seenErr != nil {
		return fail("check that this process may read /"+sysKFD+"/proc", "%v", h.seenErr)
	}
	queues := 0
	for _, p := range h.seen {
		queues += len(p.Queues)
	}
	said := fmt.Sprintf("%s with %s", plural(len(h.seen), "process"), plural(queues, "queue"))
	var stuck []string
	for _, p := range h.reports {
		if p.GetOffline() && p.GetMechanism() == "" {
			stuck = append(stuck, fmt.Sprintf("%s (pid %d)", p.GetComm(), p.GetPid()))
		}
	}
	switch {
	case len(stuck) > 0:
		return warn("see gpctl target explain PID, or the list of processes below",
			"%s; no mechanism can suspend %s", said, strings.Join(stuck, ", "))
	case len(h.unseen) > 0 && !h.cfg.ByDaemon && !h.has("CAP_SYS_PTRACE"):
		return ok("%s; without CAP_SYS_PTRACE %s about them cannot be read", said, plural(len(h.unseen), "fact"))
	case len(h.unseen) > 0:
		return warn("allow this process to read these files", "%s; %s", said, strings.Join(h.unseen, "; "))
	}
	return ok("%s", said)
}

// jobs looks for offline processes of a user on different GPUs that have no common job: if
// they are ranks of one, they wait for each other while one of them is suspended.
func (h *host) jobs() finding {
	if h.cfg.Processes == nil && !h.cfg.ByDaemon {
		return skip("only a daemon that runs knows them")
	}
	size := map[string]int{} // of jobs
	for _, p := range h.reports {
		if p.GetOffline() && p.GetJob() != "" {
			size[p.GetJob()]++
		}
	}
	alone := map[uint32][]discovery.Proc{} // by user
	for _, p := range h.reports {
		if !p.GetOffline() || p.GetJob() != "" && (!p.GetJobIsLocal() || size[p.GetJob()] > 1) {
			continue
		}
		if i := slices.IndexFunc(h.seen, func(s discovery.Proc) bool { return s.Key.PID == p.GetPid() }); i >= 0 {
			alone[h.seen[i].UID] = append(alone[h.seen[i].UID], h.seen[i])
		}
	}
	var found []string
	for _, uid := range slices.Sorted(maps.Keys(alone)) {
		var pids []string
		var used []gpreempt.GPUID
		for _, p := range alone[uid] {
			// Processes on the same GPU are suspended for the same leases.
			gpus := p.GPUs()
			if len(gpus) > 0 && !slices.ContainsFunc(gpus, func(id gpreempt.GPUID) bool { return slices.Contains(used, id) }) {
				pids, used = append(pids, strconv.Itoa(int(p.Key.PID))), append(used, gpus...)
			}
		}
		if len(pids) > 1 {
			found = append(found, fmt.Sprintf("uid %d has offline processes on different GPUs without a common job: pid %s", uid, listed(pids)))
		}
	}
	switch {
	case len(found) > 0:
		return warn("ignore this if they are independent; ranks of a job need GPREEMPT_JOB in their environment, with one value, or a rule in jobs of the config file: else they wait for each other",
			"%s", listed(found))
	case len(size) == 0:
		return ok("none")
	}
	return ok("%s", plural(len(size), "job"))
}

// listed joins the first few of a list and counts the others.
func listed(texts []string) string {
	const most = 8
	if more := len(texts) - most; more > 0 {
		return strings.Join(texts[:most], ", ") + fmt.Sprintf(" and %d more", more)
	}
	return strings.Join(texts, ", ")
}

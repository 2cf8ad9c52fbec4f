package safety

import (
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// daemonName is the command name of the daemon.
const daemonName = "gpreemptd"

// running returns the process that holds the instance lock; 0 if none does.
func (h *host) running() (int32, error) {
	path := strings.TrimPrefix(h.cfg.Lock, "/")
	text, err := h.text(path)
	if err != nil {
		if absent(err) {
			err = nil
		}
		return 0, err
	}
	info, err := fs.Stat(h.cfg.Root, path)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.ParseInt(text, 10, 32)
	st, isFile := info.Sys().(*syscall.Stat_t)
	if err != nil || !isFile {
		return 0, nil //nolint:nilerr // no pid in it: no daemon has held it
	}
	locks, err := h.read("proc/locks")
	if err != nil || !holdsFlock(locks, st.Ino, int32(pid)) {
		return 0, err
	}
	return int32(pid), nil
}

func (h *host) daemon() finding {
	holder, err := h.running()
	if err != nil {
		return unread(err)
	}
	var others []string
	for _, proc := range h.seen {
		// Another diagnosis has the driver open for a short time, and suspends nothing.
		words := strings.Fields(proc.Cmdline)
		diagnosis := len(words) > 1 && words[1] == "diagnose"
		if proc.Comm == daemonName && proc.UID == 0 && proc.Key.PID != holder && !diagnosis {
			others = append(others, strconv.Itoa(int(proc.Key.PID)))
		}
	}
	switch {
	case len(others) > 0:
		return fail("run one gpreemptd on the host, with the host's /run: two would suspend and resume the same queues",
			"gpreemptd has the driver open without the lock %s: pid %s", h.cfg.Lock, strings.Join(others, ", "))
	case h.cfg.ByDaemon:
		return ok("this one, pid %d, and no other", h.self.Process)
	case holder != 0:
		return ok("gpreemptd runs, pid %d", holder)
	}
	return warn("systemctl enable --now gpreemptd", "gpreemptd is not running: nothing is suspended")
}

func (h *host) processes() finding {
	if h.seenErr != nil {
		return fail("check that this process may read /"+sysKFD+"/proc", "%v", h.seenErr)
	}
	queues := 0
	for _, proc := range h.seen {
		queues += len(proc.Queues)
	}
	said := fmt.Sprintf("%s with %s", plural(len(h.seen), "process"), plural(queues, "queue"))
	var stuck []string
	for _, proc := range h.reports {
		if proc.GetOffline() && proc.GetMechanism() == "" {
			stuck = append(stuck, fmt.Sprintf("%s (pid %d)", proc.GetComm(), proc.GetPid()))
		}
	}
	without := h.withoutVM()
	switch {
	case len(without) > 0:
		return warn("allow these processes the render node of every GPU, or deny them the GPU by the device cgroup; or add criu to the config key mechanisms",
			"%s; %s: no VM is known of %s: SUSPEND_QUEUES could crash the kernel, and dbgtrap is not used", said, gpreempt.ReasonGPUWithoutVM, strings.Join(without, ", "))
	case len(stuck) > 0:
		return warn("see gpctl target explain PID, or the list of processes below",
			"%s; no mechanism can suspend %s", said, strings.Join(stuck, ", "))
	case len(h.unseen) > 0:
		return warn("allow this process to read these files", "%s; %s", said, strings.Join(h.unseen, "; "))
	}
	return ok("%s", said)
}

// jobs looks for offline processes of a user on different GPUs that have no common job: if
// they are ranks of one, they wait for each other while one of them is suspended.
func (h *host) jobs() finding {
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
		for _, proc := range alone[uid] {
			// Processes on the same GPU are suspended for the same leases.
			gpus := proc.GPUs()
			if len(gpus) > 0 && !slices.ContainsFunc(gpus, func(id gpreempt.GPUID) bool { return slices.Contains(used, id) }) {
				pids, used = append(pids, strconv.Itoa(int(proc.Key.PID))), append(used, gpus...)
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

// withoutVM returns the processes for which SUSPEND_QUEUES could crash the kernel, see
// GPUWithoutVM.
func (h *host) withoutVM() (found []string) {
	for _, proc := range h.seen {
		gpus, err := discovery.ProcessGPUs(h.cfg.Root, proc.Key.PID)
		if err != nil {
			continue // it has exited
		}
		for _, id := range discovery.WithoutVM(h.cfg.Root, proc.Key.PID, discovery.GPUsAfter(gpus, proc.GPUs())) {
			found = append(found, fmt.Sprintf("%s (pid %d) on GPU %v", proc.Comm, proc.Key.PID, id))
		}
	}
	return found
}

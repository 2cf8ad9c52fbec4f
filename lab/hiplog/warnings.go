package hiplog

import "fmt"

// warnings returns the warnings about a log.
func warnings(a *Analysis) []Warning {
	w := []Warning{}
	add := func(code, next, format string, args ...any) {
		w = append(w, Warning{Code: code, Text: fmt.Sprintf(format, args...), Next: next})
	}
	if a.Truncated {
		add("truncated", "", "the compressed data end early: the end of the log is missing")
	}
	unknown := a.UnknownLines > 0
	if unknown {
		add("unknown", "report them: the runtime is of a version whose log is not known",
			"%s in a form that is not known: queues and packets may be missing", areOrIs(a.UnknownLines, "line"))
	}
	if a.Records == 0 {
		return w
	}
	var dispatches, launches, indexed, odd, reused, old, created uint64
	capped := false
	for i := range a.Processes {
		p := &a.Processes[i]
		dispatches += p.Dispatches
		launches += p.Launches.Total
		capped = capped || p.Launches.Others > 0
	}
	for i := range a.Queues {
		q := &a.Queues[i]
		odd += q.OddIndices
		capped = capped || q.Kernels.Others > 0
		if q.WriteIndex != nil {
			indexed++
		}
		if q.Creations > 0 {
			created++
		}
		if q.Creations > 1 {
			reused++
		}
		if q.HWq == 0 {
			old++
		}
	}
	if dispatches == 0 && !unknown {
		add("no_dispatches", "AMD_LOG_LEVEL=4 writes them, on the newest ROCm AMD_LOG_LEVEL=5, with 0x8 in AMD_LOG_MASK",
			"no dispatch lines: the log does not show the work of the queues")
	}
	if len(a.PIDs) == 0 {
		add("no_pids", "ROCm newer than 4.5 writes them with AMD_LOG_LEVEL=4 or more", "no process ids: queues of different processes cannot be distinguished")
	}
	if created == 0 && !unknown {
		add("no_creations", "log from the program's start, with AMD_LOG_LEVEL=3 or more (5 on the newest ROCm) and 0x10 in AMD_LOG_MASK",
			"no lines about the creation of queues: their sizes and priorities are unknown")
	}
	if dispatches > 0 && launches == 0 {
		add("no_kernel_names", "add 0x80 to AMD_LOG_MASK", "no kernel names: kernels are identified by the address of their code")
	}
	if dispatches > 0 && indexed == 0 {
		add("no_indices", "ROCm 6.2 or newer prints them", "dispatch lines have no rptr and wptr: backlogs are unknown")
	}
	if old > 0 {
		add("unjoined", "ROCm 6.2 or newer prints both",
			"%s identified by the hsa_queue_t only: ROCm 6.1 and older print it at the creation of a queue and the ring at its use, "+
				"so the two cannot be joined", areOrIs(old, "queue"))
	}
	if reused > 0 {
		add("reused", "", "%s of several queues one after another; the figures include all of them", areOrIs(reused, "ring"))
	}
	if odd > 0 {
		add("odd_indices", "", "backlogs omit %s with invalid indices", count(odd, "packet"))
	}
	if capped {
		add("kernels_capped", "", "too many kernels to count separately: the rest is counted as others")
	}
	if a.Untracked > 0 {
		add("untracked", "", "%s of queues or processes beyond the first %d, included in the totals only", areOrIs(a.Untracked, "record"), maxQueues)
	}
	if a.TornLines > 0 {
		add("torn", "AMD_LOG_LEVEL_FILE writes the log to a separate file",
			"concurrent writers damaged %s: records may be missing", count(a.TornLines, "line"))
	}
	if a.CutLines > 0 {
		add("cut", "", "only the first %d KiB were read of %s", maxLine>>10, count(a.CutLines, "line"))
	}
	if a.NULBytes > 0 {
		add("holes", "", "%s skipped: the file was truncated while it was written, and its beginning is missing", areOrIs(a.NULBytes, "NUL byte"))
	}
	return w
}

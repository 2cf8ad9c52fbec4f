package hiplog

import "fmt"

// warnings says what a reader of the analysis has to know of its log.
func warnings(a *Analysis) []Warning {
	w := []Warning{}
	add := func(code, next, format string, args ...any) {
		w = append(w, Warning{Code: code, Text: fmt.Sprintf(format, args...), Next: next})
	}
	if a.Truncated {
		add("truncated", "", "the compressed data end early: the end of the log is missing")
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
	if dispatches == 0 {
		add("no_dispatches", "AMD_LOG_LEVEL=4 writes them, on the newest ROCm AMD_LOG_LEVEL=5, with 0x8 in AMD_LOG_MASK",
			"no dispatch lines: what the queues did is not in this log")
	}
	if len(a.PIDs) == 0 {
		add("no_pids", "AMD_LOG_LEVEL=4 or more writes them", "no process ids: queues of different processes cannot be told apart")
	}
	if created == 0 {
		add("no_creations", "log from the program's start, with AMD_LOG_LEVEL=3 or more (5 on the newest ROCm) and 0x10 in AMD_LOG_MASK",
			"no lines about the creation of queues: their sizes and priorities are unknown")
	}
	if dispatches > 0 && launches == 0 {
		add("no_kernel_names", "put 0x80 into AMD_LOG_MASK", "no kernel names: kernels are told by the address of their code")
	}
	if dispatches > 0 && indexed == 0 {
		add("no_indices", "ROCm 6.2 or newer prints them", "dispatch lines have no rptr and wptr: backlogs are unknown")
	}
	if old > 0 {
		add("unjoined", "ROCm 6.2 or newer prints both",
			"%s known by the hsa_queue_t only: ROCm 6.1 and older print it where a queue is created and the ring where it is used, "+
				"so the two cannot be joined", areOrIs(old, "queue"))
	}
	if reused > 0 {
		add("reused", "", "%s of several queues one after the other, and the figures are of all of them", areOrIs(reused, "ring"))
	}
	if odd > 0 {
		add("odd_indices", "", "backlogs leave out %s whose indices are no distance in the ring", count(odd, "packet"))
	}
	if capped {
		add("kernels_capped", "", "so many kernels that not all are told apart: the rest is counted as others")
	}
	if a.Untracked > 0 {
		add("untracked", "", "%s of queues or processes beyond the first %d and in no figure but the totals", areOrIs(a.Untracked, "record"), maxQueues)
	}
	if a.TornLines > 0 {
		add("torn", "AMD_LOG_LEVEL_FILE gives the log a file of its own",
			"others wrote at the same time and tore %s: records may be missing", count(a.TornLines, "line"))
	}
	if a.CutLines > 0 {
		add("cut", "", "only the first %d KiB were read of %s", maxLine>>10, count(a.CutLines, "line"))
	}
	if a.NULBytes > 0 {
		add("holes", "", "%s passed over: the file was cut short while it was written, and its beginning is missing", areOrIs(a.NULBytes, "NUL byte"))
	}
	return w
}

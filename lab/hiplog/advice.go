package hiplog

import "fmt"

// Strategy is how two workloads can share a GPU.
type Strategy string

// The strategies.
const (
	// StreamPriority: the online workload requests HIP streams with high priority.
	StreamPriority Strategy = "stream_priority"
	// SuspendResume: gpreempt suspends the offline workload while the online one works, or
	// they alternate.
	SuspendResume Strategy = "suspend_resume"
	// Undetermined: the logs are not sufficient.
	Undetermined Strategy = "undetermined"
)

// Advice is the strategy that the logs suggest. It is based on host-side log lines only,
// without measurements on a GPU.
type Advice struct {
	Strategy Strategy `json:"strategy"`
	Text     string   `json:"text"`
	Reasons  []string `json:"reasons"`
	// Limits are what the logs do not show, or what the strategy cannot do.
	Limits []string `json:"limits"`
}

// deepBacklog is the number of pending packets from which a queue counts as contended.
const deepBacklog = 100

// advise chooses the strategy: for separate queues without contention priorities may be
// sufficient; shared or contended queues need suspension.
func advise(c *Comparison) Advice {
	a := Advice{Reasons: []string{}, Limits: []string{}}
	reason := func(format string, args ...any) { a.Reasons = append(a.Reasons, fmt.Sprintf(format, args...)) }
	limit := func(format string, args ...any) { a.Limits = append(a.Limits, fmt.Sprintf(format, args...)) }

	deepest, side := deepest(c)
	switch {
	case len(c.A.Queues) == 0 || len(c.B.Queues) == 0:
		a.Strategy = Undetermined
		a.Text = "undetermined: one of the logs has no queue"
		reason("A has %s, B has %s", count(len(c.A.Queues), "hardware queue"), count(len(c.B.Queues), "hardware queue"))
		limit("%s", Hint)
		return a
	case c.Common > 0:
		a.Strategy = SuspendResume
		a.Text = "suspend and resume with gpreempt, or alternate the two: a priority belongs to a queue, so it cannot separate streams that share one"
		reason("%s used by both logs", areOrIs(c.Common, "hardware queue"))
		limit("queues are shared within one process only, and gpreempt suspends a process with all its queues: first run the two as separate " +
			"processes, or allow the process more queues with GPU_MAX_HW_QUEUES")
		return a
	case c.Unknown > 0:
		a.Strategy = Undetermined
		a.Text = "undetermined: the logs do not show whether the two share queues"
		reason("%s at the same address in both logs: %s", areOrIs(c.Unknown, "ring"), undecided(c))
		limit("%s", Hint)
		return a
	case deepest >= deepBacklog:
		a.Strategy = SuspendResume
		a.Text = "suspend and resume the offline one with gpreempt, or alternate the two: the queues are separate, but contended"
		reason("in %s, up to %d packets were pending in a queue: the GPU is busy, and a priority does not interrupt running kernels",
			side, deepest)
	default:
		a.Strategy = StreamPriority
		a.Text = "stream priorities may be sufficient: create the online streams with hipStreamCreateWithPriority and -1 (high), the others with 0 (normal)"
		if c.A.MaxBacklog != nil && c.B.MaxBacklog != nil {
			reason("the queues are not contended: at most %d packets were pending", deepest)
		} else {
			limit("the logs do not show whether the queues are contended: that needs dispatch lines with rptr and wptr")
		}
		limit("a priority orders pending work; it does not interrupt a running kernel. For long kernels, or if the online latency is still too " +
			"high, suspend and resume with gpreempt")
	}
	reason("no hardware queue is in both logs")
	if c.Coincidences > 0 {
		limit("%s at the same address in both logs by coincidence", areOrIs(c.Coincidences, "ring"))
	}
	if n := withoutRing(c); n > 0 {
		limit("%s not compared: ROCm 6.1 and older do not print the addresses of their rings", areOrIs(n, "queue"))
	}
	if c.OverlapMicros == 0 {
		limit("the logs do not overlap in time: they do not show how the two affect each other")
	}
	limit("the logs do not contain GPUs: on different GPUs the two do not affect each other's kernels")
	return a
}

// deepest returns the largest backlog and its log.
func deepest(c *Comparison) (packets uint64, side string) {
	side = "A"
	if c.A.MaxBacklog != nil {
		packets = c.A.MaxBacklog.Packets
	}
	if c.B.MaxBacklog != nil && c.B.MaxBacklog.Packets > packets {
		packets, side = c.B.MaxBacklog.Packets, "B"
	}
	return packets, side
}

// withoutRing counts the queues with an unknown ring.
func withoutRing(c *Comparison) int {
	n := 0
	for _, s := range []*Side{&c.A, &c.B} {
		for i := range s.Queues {
			if s.Queues[i].HWq == 0 {
				n++
			}
		}
	}
	return n
}

// undecided returns the reason of the first undecided match.
func undecided(c *Comparison) string {
	for i := range c.Matches {
		if c.Matches[i].Verdict == Undecided {
			return c.Matches[i].Why
		}
	}
	return ""
}

func count[N ~int | ~uint64](n N, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

func areOrIs[N ~int | ~uint64](n N, thing string) string {
	if n == 1 {
		return count(n, thing) + " is"
	}
	return count(n, thing) + " are"
}

package hiplog

import "fmt"

// Strategy is how two workloads can share a GPU.
type Strategy string

// The strategies.
const (
	// StreamPriority: the online one asks HIP for streams of high priority.
	StreamPriority Strategy = "stream_priority"
	// SuspendResume: gpreempt suspends the offline one while the online one works, or
	// they take turns.
	SuspendResume Strategy = "suspend_resume"
	// Undetermined: the logs do not tell enough.
	Undetermined Strategy = "undetermined"
)

// Advice says which strategy the logs speak for. It is drawn from host-side log
// lines alone: nothing was measured on a GPU.
type Advice struct {
	Strategy Strategy `json:"strategy"`
	Text     string   `json:"text"`
	Reasons  []string `json:"reasons"`
	// Limits are what the logs cannot tell, or what the strategy cannot do.
	Limits []string `json:"limits"`
}

// deepBacklog is the number of waiting packets from which a queue is taken to be
// contended: fewer are a queue that keeps up.
const deepBacklog = 100

// advise chooses: queues of their own, which keep up, may do with priorities;
// shared or contended ones need to be suspended.
func advise(c *Comparison) Advice {
	a := Advice{Reasons: []string{}, Limits: []string{}}
	reason := func(format string, args ...any) { a.Reasons = append(a.Reasons, fmt.Sprintf(format, args...)) }
	limit := func(format string, args ...any) { a.Limits = append(a.Limits, fmt.Sprintf(format, args...)) }

	deepest, side := deepest(c)
	switch {
	case len(c.A.Queues) == 0 || len(c.B.Queues) == 0:
		a.Strategy = Undetermined
		a.Text = "the logs do not tell: one of them names no queue"
		reason("A names %s, B names %s", count(len(c.A.Queues), "hardware queue"), count(len(c.B.Queues), "hardware queue"))
		limit("%s", Hint)
		return a
	case c.Common > 0:
		a.Strategy = SuspendResume
		a.Text = "suspend and resume with gpreempt, or give them turns: a priority belongs to a queue, so it cannot tell apart what shares one"
		reason("%s used by both logs", areOrIs(c.Common, "hardware queue"))
		limit("queues are shared within one process only, and gpreempt suspends a process with all its queues: run the two as processes of " +
			"their own first, or give the process more queues with GPU_MAX_HW_QUEUES")
		return a
	case c.Unknown > 0:
		a.Strategy = Undetermined
		a.Text = "the logs do not tell whether the two share queues"
		reason("%s at the same address in both logs: %s", areOrIs(c.Unknown, "ring"), undecided(c))
		limit("%s", Hint)
		return a
	case deepest >= deepBacklog:
		a.Strategy = SuspendResume
		a.Text = "suspend the offline one and resume it with gpreempt, or give them turns: the queues are their own, but contended"
		reason("in %s a packet found %d others waiting in its queue: the GPU is kept busy, and a priority does not take running kernels off it",
			side, deepest)
	default:
		a.Strategy = StreamPriority
		a.Text = "stream priorities may do: create the online streams with hipStreamCreateWithPriority and -1 (high) and leave the others 0 (normal)"
		if c.A.MaxBacklog != nil && c.B.MaxBacklog != nil {
			reason("the queues keep up: no packet found more than %d others waiting", deepest)
		} else {
			limit("whether the queues are contended is not in these logs: dispatch lines with rptr and wptr would show it")
		}
		limit("a priority orders what waits; it does not take a running kernel off the GPU. Where kernels are long, or the online latency is " +
			"still too high, suspend and resume with gpreempt")
	}
	reason("no hardware queue is in both logs")
	if c.Coincidences > 0 {
		limit("%s at the same address in both logs by coincidence", areOrIs(c.Coincidences, "ring"))
	}
	if n := withoutRing(c); n > 0 {
		limit("%s not compared: ROCm 6.1 and older do not print where their rings are", areOrIs(n, "queue"))
	}
	if c.OverlapMicros == 0 {
		limit("by their times the two did not run together: what they do to each other is not in these logs")
	}
	limit("the logs do not name GPUs: on different GPUs the two do not disturb each other's kernels")
	return a
}

// deepest returns the greatest backlog and the log it is in.
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

// withoutRing counts the queues whose ring is unknown.
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

// undecided returns the first reason why a match is not decided.
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

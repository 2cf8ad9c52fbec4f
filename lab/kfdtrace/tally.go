package kfdtrace

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/stat/histogram"
)

// Latency summarizes how long the calls of a function took. Count, Min, Mean and Max
// are exact; the quantiles are nearest-rank, at most 0.8 % too high. The times are
// those between two events, in whole microseconds.
type Latency struct {
	Count uint64        `json:"count"`
	Min   time.Duration `json:"min_ns"`
	Mean  time.Duration `json:"mean_ns"`
	P50   time.Duration `json:"p50_ns"`
	P95   time.Duration `json:"p95_ns"`
	P99   time.Duration `json:"p99_ns"`
	Max   time.Duration `json:"max_ns"`
}

func latency(h *histogram.Histogram) Latency {
	return Latency{
		Count: h.Count(), Min: time.Duration(h.Min()), Mean: time.Duration(h.Mean()), Max: time.Duration(h.Max()),
		P50: time.Duration(h.Quantile(0.50)), P95: time.Duration(h.Quantile(0.95)), P99: time.Duration(h.Quantile(0.99)),
	}
}

// tally counts what the lines of a trace say. It is a function of the lines, in their
// order.
type tally struct {
	// probes are what our events mean; groups are those of the followed functions.
	probes map[string]probe
	groups map[string]string

	unknown, lost uint64
	// compute counts the jobs on compute queues of the kernel, by the event that says so.
	compute   map[string]uint64
	events    map[string]uint64
	functions map[string]*calls
	open      map[call][]time.Duration // when the calls began that have not ended
	// began is the time of the marker.
	began time.Duration
}

// probe is an event at the beginning or the end of a function.
type probe struct {
	function string
	enter    bool
}

// calls are the calls of one function. Torn calls have no beginning or no end in the trace.
type calls struct {
	took histogram.Histogram
	torn uint64
}

// call identifies what can be in progress. CPUs share the idle thread's pid 0.
type call struct {
	function string
	pid, cpu int
}

func newTally() *tally {
	return &tally{
		compute: map[string]uint64{}, probes: map[string]probe{}, groups: map[string]string{}, events: map[string]uint64{}, functions: map[string]*calls{},
		open: map[call][]time.Duration{},
	}
}

// follow registers the two events that follow a function.
func (t *tally) follow(name string, f function) {
	t.probes[enterPrefix+name] = probe{f.name, true}
	t.probes[leavePrefix+name] = probe{f.name, false}
	t.groups[f.name] = f.group
}

func (t *tally) function(name string) *calls {
	f := t.functions[name]
	if f == nil {
		f = &calls{}
		t.functions[name] = f
	}
	return f
}

func (t *tally) add(l line) {
	switch l.kind {
	case kindUnknown:
		t.unknown++
	case kindNothing:
	case kindMarker:
		if t.began == 0 {
			t.began = l.at
		}
	case kindLost:
		t.lost += max(l.count, 1)
		// The end of any call may be among the lost events: with the end of a later
		// call it would have a duration that never was.
		t.tear()
	case kindEvent:
		p, ours := t.probes[l.name]
		if !ours {
			t.events[l.name]++
			if slices.Contains(jobEvents, l.name) && computeRing.MatchString(l.text) {
				t.compute[l.name]++
			}
			return
		}
		key := call{function: p.function, pid: l.pid}
		if l.pid == 0 {
			key.cpu = l.cpu
		}
		open := t.open[key]
		switch n := len(open); {
		case p.enter:
			t.open[key] = append(open, l.at)
		case n == 0:
			t.function(p.function).torn++
		default:
			t.function(p.function).took.Add(uint64(max(0, l.at-open[n-1])))
			t.open[key] = open[:n-1]
		}
	}
}

// jobEvents are the events of a job that begins on a ring of the kernel: both may report it.
var jobEvents = []string{"drm_sched_job_run", "drm_run_job", "amdgpu_sched_run_job"}

// computeRing matches the text of one on a compute ring, such as comp_1.0.0 (amdgpu_ring_init's name).
var computeRing = regexp.MustCompile(`\b(ring|ring_name|name)=comp_`)

// reportsJobs reports whether a trace event, or all events of a system, say that jobs begin.
func reportsJobs(name string) bool {
	system, event, one := strings.Cut(name, ":")
	if !one {
		return system == "gpu_scheduler" || system == driver
	}
	return slices.Contains(jobEvents, event)
}

// kernelCompute is Report.KernelCompute.
func (s *session) kernelCompute() *uint64 {
	if !s.jobs {
		return nil
	}
	var most uint64
	for _, n := range s.tally.compute {
		most = max(most, n)
	}
	return &most
}

// tear abandons the calls that have not ended.
func (t *tally) tear() {
	for key, open := range t.open {
		if len(open) > 0 {
			t.function(key.function).torn += uint64(len(open))
		}
	}
	clear(t.open)
}

// FunctionCalls summarizes the calls of a function.
type FunctionCalls struct {
	Name  string `json:"name"`
	Group string `json:"group"`
	Latency
	// Torn calls began before or ended after the recording, or are lost in part. They
	// are not in Count.
	Torn uint64 `json:"torn,omitempty"`
}

// EventCount is how often an event occurred.
type EventCount struct {
	Name  string `json:"name"`
	Count uint64 `json:"count"`
}

// functionCalls lists the functions by group, the largest sum first.
func (t *tally) functionCalls() []FunctionCalls {
	list := make([]FunctionCalls, 0, len(t.functions))
	for name, f := range t.functions {
		list = append(list, FunctionCalls{Name: name, Group: t.groups[name], Latency: latency(&f.took), Torn: f.torn})
	}
	slices.SortFunc(list, func(a, b FunctionCalls) int {
		return cmp.Or(
			cmp.Compare(slices.Index(groups, a.Group), slices.Index(groups, b.Group)),
			cmp.Compare(t.functions[b.Name].took.Sum(), t.functions[a.Name].took.Sum()),
			cmp.Compare(a.Name, b.Name),
		)
	})
	return list
}

// eventCounts lists the events, the most frequent first.
func (t *tally) eventCounts() []EventCount {
	list := make([]EventCount, 0, len(t.events))
	for name, n := range t.events {
		list = append(list, EventCount{name, n})
	}
	slices.SortFunc(list, func(a, b EventCount) int { return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Name, b.Name)) })
	return list
}

package kfdtrace

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
	"time"
)

// Latency summarises how long calls of a function took. Count, Min, Mean and Max
// are exact; the percentiles are nearest-rank, at most 0.8 % too high.
type Latency struct {
	Count uint64        `json:"count"`
	Min   time.Duration `json:"min_ns"`
	Mean  time.Duration `json:"mean_ns"`
	P50   time.Duration `json:"p50_ns"`
	P95   time.Duration `json:"p95_ns"`
	P99   time.Duration `json:"p99_ns"`
	Max   time.Duration `json:"max_ns"`
}

// histogram keeps durations in buckets, 128 to each power of two.
type histogram struct {
	buckets  []uint64
	count    uint64
	sum      float64
	min, max time.Duration
}

const (
	linear    = 256 // below this many nanoseconds each has its bucket
	perDouble = linear / 2
)

func (h *histogram) add(d time.Duration) {
	d = max(d, 0)
	i := bucketOf(d)
	if i >= len(h.buckets) {
		h.buckets = append(h.buckets, make([]uint64, i+1-len(h.buckets))...)
	}
	h.buckets[i]++
	if h.count == 0 || d < h.min {
		h.min = d
	}
	h.max = max(h.max, d)
	h.count++
	h.sum += float64(d)
}

func bucketOf(d time.Duration) int {
	if d < linear {
		return int(d)
	}
	shift := bits.Len64(uint64(d)) - bits.Len64(linear-1)
	return shift*perDouble + int(d>>shift)
}

// topOf is the longest duration in a bucket.
func topOf(bucket int) time.Duration {
	if bucket < linear {
		return time.Duration(bucket)
	}
	shift := bucket/perDouble - 1
	return time.Duration(bucket-shift*perDouble+1)<<shift - 1
}

// percentile returns the nearest-rank percentile, 0 < p <= 100.
func (h *histogram) percentile(p float64) time.Duration {
	rank := uint64(math.Ceil(p / 100 * float64(h.count)))
	for i, n := range h.buckets {
		if n >= rank {
			return min(max(topOf(i), h.min), h.max)
		}
		rank -= n
	}
	return h.max
}

func (h *histogram) latency() Latency {
	if h.count == 0 {
		return Latency{}
	}
	return Latency{
		Count: h.count, Min: h.min, Mean: time.Duration(h.sum / float64(h.count)), Max: h.max,
		P50: h.percentile(50), P95: h.percentile(95), P99: h.percentile(99),
	}
}

// tally counts what the lines of a trace tell. It is a function of the lines, in
// their order.
type tally struct {
	// enter and leave name the function of an event of ours, where functions are
	// followed by probes.
	enter, leave map[string]string

	lines, unknown, lost uint64
	events               map[string]uint64
	functions            map[string]*calls
	open                 map[thread][]call
	// began is the first marker's time by the trace's clock.
	began time.Duration
}

// calls are those of one function.
type calls struct {
	took histogram
	// torn calls had no beginning or no end in the trace.
	torn uint64
}

// thread names what runs functions one inside the other. CPUs share pid 0.
type thread struct{ pid, cpu int }

// call is one that has not ended.
type call struct {
	function string
	at       time.Duration
}

func newTally() *tally {
	return &tally{
		enter: map[string]string{}, leave: map[string]string{},
		events: map[string]uint64{}, functions: map[string]*calls{}, open: map[thread][]call{},
	}
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
	t.lines++
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
		// The end of any of them may be among what is gone: to take the end of a
		// later call for it would be a duration that never was.
		t.tear()
	case kindCall:
		t.push(l, baseName(l.name))
	case kindReturn:
		name := baseName(l.name)
		if !l.leaf {
			t.pop(l, name)
		}
		t.function(name).took.add(l.took)
	case kindEvent:
		if name, ok := t.enter[l.name]; ok {
			t.push(l, name)
		} else if name, ok := t.leave[l.name]; ok {
			if at, ok := t.pop(l, name); ok {
				t.function(name).took.add(l.at - at)
			} else {
				t.function(name).torn++
			}
		} else {
			t.events[l.name]++
		}
	}
}

func threadOf(l line) thread {
	if l.pid == 0 {
		return thread{cpu: l.cpu}
	}
	return thread{pid: l.pid}
}

func (t *tally) push(l line, name string) {
	key := threadOf(l)
	t.open[key] = append(t.open[key], call{name, l.at})
}

// pop returns when the thread's last open call of the function began. What was
// called later has no end in the trace.
func (t *tally) pop(l line, name string) (time.Duration, bool) {
	key := threadOf(l)
	open := t.open[key]
	i := len(open) - 1
	for i >= 0 && open[i].function != name {
		i--
	}
	if i < 0 {
		return 0, false
	}
	for _, c := range open[i+1:] {
		t.function(c.function).torn++
	}
	at := open[i].at
	if i == 0 {
		delete(t.open, key)
	} else {
		t.open[key] = open[:i]
	}
	return at, true
}

// tear returns up the calls that have not ended.
func (t *tally) tear() {
	for _, open := range t.open {
		for _, c := range open {
			t.function(c.function).torn++
		}
	}
	clear(t.open)
}

// FunctionCalls is what the trace tells of a function.
type FunctionCalls struct {
	Name  string `json:"name"`
	Group string `json:"group"`
	Latency
	// Torn calls began before or ended after what was recorded, or were lost in
	// part; they are not in Count.
	Torn uint64 `json:"torn,omitempty"`
}

// EventCount is how often an event came.
type EventCount struct {
	Name  string `json:"name"`
	Count uint64 `json:"count"`
}

// functionCalls lists the functions by group, the slowest sum first.
func (t *tally) functionCalls(group map[string]string) []FunctionCalls {
	list := make([]FunctionCalls, 0, len(t.functions))
	for name, f := range t.functions {
		list = append(list, FunctionCalls{Name: name, Group: cmp.Or(group[name], GroupOther), Latency: f.took.latency(), Torn: f.torn})
	}
	slices.SortFunc(list, func(a, b FunctionCalls) int {
		return cmp.Or(
			compareGroups(a.Group, b.Group),
			cmp.Compare(t.functions[b.Name].took.sum, t.functions[a.Name].took.sum),
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

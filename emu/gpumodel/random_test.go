package gpumodel

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// crowd is a machine with processes, whose packets are known.
type crowd struct {
	m     *Machine
	procs []gpreempt.ProcessKey
	// given is every packet submitted to a process.
	given   map[gpreempt.ProcessKey][]*given
	answers int
	asked   int
	faults  bool
	trace   strings.Builder
}

type given struct {
	d              time.Duration
	started, ended time.Duration
	calls          int
}

// pick draws a number from 0 to n-1.
type pick func(n int, label string) int

func newCrowd(spec Spec, gpus int, seed uint64) *crowd {
	return &crowd{m: New(spec, gpus, seed), given: map[gpreempt.ProcessKey][]*given{}}
}

func (c *crowd) log(format string, args ...any) {
	fmt.Fprintf(&c.trace, "%v "+format+"\n", append([]any{c.m.Now()}, args...)...)
}

func (c *crowd) submit(key gpreempt.ProcessKey, id uint32, pick pick) {
	g := &given{}
	k := Packet{Done: func(started, ended time.Duration) {
		g.started, g.ended = started, ended
		g.calls++
		c.log("packet of %v queue %d: %v to %v", key, id, started, ended)
	}}
	q, _ := c.m.byKey[key].queue(id)
	if q.typ == gpreempt.QueueCompute {
		g.d = time.Duration(1+pick(5000, "duration")) * us
		k.Duration, k.Occupancy, k.Overlap = g.d, float64(1+pick(100, "occupancy"))/100, pick(4, "overlap") == 0
	} else {
		k.Bytes = int64(1+pick(100, "bytes")) << 20
		g.d = overRate(k.Bytes, float64(c.m.spec.CopyRate))
	}
	switch err := c.m.Submit(key, id, k); {
	case err == nil:
		c.given[key] = append(c.given[key], g)
	case !errors.Is(err, ErrRingFull):
		panic(err)
	}
}

// check reports what is wrong with the machine, "" when nothing is.
func (c *crowd) check() string {
	for _, p := range c.m.Counters() {
		if p.Submitted != p.Executed+p.Lost+p.Abandoned+p.Pending {
			return fmt.Sprintf("packets do not add up: %+v", p)
		}
		if !c.faults && (p.Lost != 0 || p.Repeated != 0) {
			return fmt.Sprintf("lost or repeated: %+v", p)
		}
	}
	for _, g := range c.m.gpus {
		running := map[*queue]int{}
		for _, k := range append(slices.Clone(g.compute.running), g.copies.running...) {
			running[k.q]++
		}
		fit := g.fit()
		for _, q := range g.queues {
			if q.mapped && !fit.take(q) {
				return "more is mapped than fits"
			}
			if q.mapped && q.suspended {
				return "a suspended queue is mapped"
			}
			want := 0
			if q.mapped {
				want = len(q.inflight)
			}
			if running[q] != want {
				return fmt.Sprintf("queue %d runs %d packets, want %d", q.id, running[q], want)
			}
			delete(running, q)
		}
		if len(running) > 0 {
			return "a queue that is gone has packets running"
		}
		if g.op == nil && len(g.ops) > 0 {
			return "a change of the schedule waits for nothing"
		}
	}
	return ""
}

// audit runs to the end and checks what came of everything.
func (c *crowd) audit() string {
	for next, ok := c.m.Next(); ok; next, ok = c.m.Next() {
		c.m.AdvanceTo(next)
	}
	if c.answers != c.asked {
		return fmt.Sprintf("%d of %d requests answered", c.answers, c.asked)
	}
	for _, p := range c.m.Counters() {
		if p.Pending != 0 {
			return fmt.Sprintf("packets left over: %+v", p)
		}
		ran := uint64(0)
		for _, g := range c.given[p.Process] {
			if g.calls > 1 || g.calls == 1 && g.ended-g.started < g.d {
				return fmt.Sprintf("packet of %v: %+v", p.Process, g)
			}
			ran += uint64(g.calls)
		}
		// What Done tells and what the counters tell are two ways to know.
		if ran != p.Executed || uint64(len(c.given[p.Process])) != p.Submitted {
			return fmt.Sprintf("%d of %d packets reported done, the counters say %+v", ran, len(c.given[p.Process]), p)
		}
	}
	return c.check()
}

func crowdSpecs() []Spec {
	small, few, queueWise := hws(), hws(), mes()
	small.Slots, small.Quantum = 4, 2*ms
	small.Costs.Jitter = 0.1
	few.VMIDs, few.Quantum = 2, ms
	queueWise.Slots, queueWise.Quantum = 3, ms
	return []Spec{small, few, queueWise, zeroCost(hws())}
}

// play runs a long random life from one seed.
func play(spec Spec, seed uint64, steps int, faults bool) (*herd, string) {
	h := newHerd(spec, 2, seed)
	h.faults = faults
	rng := rand.New(rand.NewPCG(seed, 1))
	for range steps {
		h.step(func(n int, _ string) int { return rng.IntN(n) })
		if wrong := h.check(); wrong != "" {
			return h, wrong
		}
	}
	return h, h.finish()
}

func TestSameSeedSameTrace(t *testing.T) {
	for i, spec := range crowdSpecs() {
		spec.Costs.Jitter = 0.1
		first, wrong := play(spec, 7, 3000, false)
		if wrong != "" {
			t.Fatalf("spec %d: %s", i, wrong)
		}
		second, _ := play(spec, 7, 3000, false)
		if diff := cmp.Diff(first.trace.String(), second.trace.String()); diff != "" {
			t.Errorf("spec %d: traces differ:\n%s", i, diff)
		}
		if diff := cmp.Diff(first.m.Counters(), second.m.Counters()); diff != "" {
			t.Errorf("spec %d: counters differ:\n%s", i, diff)
		}
		if !strings.Contains(first.trace.String(), "packet of") {
			t.Errorf("spec %d: nothing ran", i)
		}
	}
	// Another seed of the machine, everything else equal.
	jittery := hws()
	jittery.Costs.Jitter = 0.1
	at := func(seed uint64) time.Duration {
		r := rig{t, NewLab(jittery, 1, seed)}
		a := r.start("a", 1, 0)
		r.AdvanceTo(ms)
		off := r.suspend(a)
		r.rest()
		return off.At
	}
	if at(1) == at(2) {
		t.Error("the seed changes nothing")
	}
}

func TestInjectedLossesAndRepetitionsShowInTheCounters(t *testing.T) {
	var lost, repeated uint64
	for i, spec := range crowdSpecs() {
		c, _ := play(spec, uint64(i), 2500, true)
		for _, p := range c.m.Counters() {
			lost += p.Lost
			repeated += p.Repeated
		}
	}
	if lost == 0 || repeated == 0 {
		t.Errorf("%d lost, %d repeated: some must be of each", lost, repeated)
	}
}

// TestLookingChangesNothing compares a machine that is looked at all the time with
// one that is left alone.
func TestLookingChangesNothing(t *testing.T) {
	run := func(look bool) (string, []ProcessCounters) {
		c := newHerd(crowdSpecs()[0], 2, 3)
		rng := rand.New(rand.NewPCG(3, 3))
		for i := range 2000 {
			c.step(func(n int, _ string) int { return rng.IntN(n) })
			if look {
				c.m.Counters()
				c.m.GPUCounters()
			}
			if look && i%50 == 0 {
				c.m.Truth()
				for _, name := range []string{"mqds", "hqds"} {
					if _, err := c.m.FS().ReadFile("sys/kernel/debug/kfd/" + name); err != nil {
						panic(err)
					}
				}
			}
		}
		c.finish()
		return c.trace.String(), c.m.Counters()
	}
	alone, counters := run(false)
	watched, same := run(true)
	if diff := cmp.Diff(alone, watched); diff != "" {
		t.Errorf("trace (-alone +watched):\n%s", diff)
	}
	if diff := cmp.Diff(counters, same); diff != "" {
		t.Errorf("counters (-alone +watched):\n%s", diff)
	}
}

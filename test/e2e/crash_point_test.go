package e2e

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// stage is a part of a daemon's life.
type stage string

const (
	starting stage = "start" // until it holds all jobs
	leasing  stage = "lease" // while it suspends and resumes
	stopping stage = "stop"  // while it detaches
)

// crashPoint is a moment at which a daemon is killed: a fault strikes or, without one,
// a time has passed since the stage began.
type crashPoint struct {
	name  string
	stage stage
	fault *kfdemu.Fault
	after time.Duration
}

// observe finds out what calls a daemon makes and what the hardware does for it, and
// returns the points at which it can be killed.
func (c *crashes) observe() []crashPoint {
	c.t.Helper()
	var points []crashPoint
	during := func(s stage, what func()) {
		from := c.m.now()
		what()
		all, _, _ := c.m.log.since(from)
		points = append(points, pointsIn(s, all, c.works)...)
	}
	quiet := func() { c.m.awaitAll("everything runs after a lease", c.all) }
	during(starting, func() { c.launch(nil); c.takeOver(true); quiet() })
	during(leasing, func() { c.takeOver(false); quiet() })
	during(stopping, c.stop)
	c.launch(nil)
	c.takeOver(true)
	return points
}

// works reports whether a process is a worker: the others are the daemon and its helpers.
func (c *crashes) works(pid int32) bool {
	return slices.ContainsFunc(c.all, func(w *worker) bool { return w.PID == pid })
}

// pointsIn returns the crash points among the events of a daemon and its helpers.
func pointsIn(s stage, events []kfdemu.Event, works func(pid int32) bool) []crashPoint {
	var points []crashPoint
	counts := map[string]int{}
	// Until a daemon is attached to all jobs it repeats some calls many times.
	const mostAtStart = 8
	add := func(when, op string, f kfdemu.Fault) {
		f.Nth = counts[op]
		points = append(points, crashPoint{name: fmt.Sprintf("%s: %s %s %d", s, when, op, f.Nth), stage: s, fault: &f})
	}
	for _, e := range events {
		if e.PID == 0 || works(e.PID) || e.Kind != kfdemu.EventCall && e.Kind != kfdemu.EventStep {
			continue
		}
		op := e.Op
		if e.Kind == kfdemu.EventStep {
			op = "step " + op
		}
		counts[op]++
		if s == starting && counts[op] > mostAtStart {
			continue
		}
		if e.Kind == kfdemu.EventStep {
			add("in", op, kfdemu.Fault{Step: driver.StepKind(e.Op)})
			continue
		}
		add("before", op, kfdemu.Fault{Op: driver.Op(e.Op), Kill: kfdemu.KillCaller})
		if e.Op != string(driver.OpOpen) { // it has no effect yet
			add("after", op, kfdemu.Fault{Op: driver.Op(e.Op), Kill: kfdemu.KillCaller, After: true})
		}
	}
	return points
}

// random returns a point under load, or sometimes during a daemon's start.
func (c *crashes) random() crashPoint {
	if c.r.IntN(8) == 0 {
		return crashPoint{name: "start: at a random time", stage: starting, after: between(c.r, 0, 150*time.Millisecond)}
	}
	return crashPoint{name: "lease: at a random time", stage: leasing, after: between(c.r, 0, 20*time.Millisecond)}
}

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
)

// frozen reports whether a worker has queues and all are suspended.
func (m *emulated) frozen(w *worker) bool {
	for _, p := range m.Driver().Processes() {
		if p.PID == w.PID {
			return len(p.Queues) > 0 && !slices.ContainsFunc(p.Queues, func(q driver.QueueState) bool { return q.Running || !q.Suspended })
		}
	}
	return false
}

// executed returns how many packets the GPUs have executed, by process.
func (m *emulated) executed() map[int32]uint64 {
	all := map[int32]uint64{}
	m.Machine(func(g *gpumodel.Machine) {
		for _, p := range g.Counters() {
			all[p.Process.PID] = p.Executed
		}
	})
	return all
}

// awaitAll waits until every queue of the workers runs.
func (m *emulated) awaitAll(what string, workers []*worker) {
	m.t.Helper()
	m.awaitThat(what, func() string {
		var still []string
		for _, p := range m.Driver().Processes() {
			if !slices.ContainsFunc(workers, func(w *worker) bool { return w.PID == p.PID }) {
				continue
			}
			for _, q := range p.Queues {
				if !q.Destroying && (!q.Running || q.Suspended) {
					still = append(still, fmt.Sprintf("queue %d of %d: %+v", q.ID, p.PID, q))
				}
			}
		}
		return strings.Join(still, "\n")
	})
}

// awaitThat waits until cond returns "" instead of what is missing. It checks after each
// event of the machine, and regularly for changes without an event.
func (m *emulated) awaitThat(what string, cond func() string) {
	m.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(timeout)
	for {
		_, _, next := m.log.since(0)
		missing := cond()
		if missing == "" {
			return
		}
		select {
		case <-next:
		case <-tick.C:
		case <-late:
			m.t.Fatalf("%s: not within %v: %s", what, timeout, missing)
		}
	}
}

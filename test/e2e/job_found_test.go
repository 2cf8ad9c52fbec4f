package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/term"
)

// nothingSet is the default config, for a test that has no groups.
const nothingSet = "access: {online_groups: [], admin_groups: []}\n"

// foundQueue is what queue find says of a queue.
type foundQueue struct {
	ID      uint32 `json:"queue_id"`
	Address uint64 `json:"ring_address,string"`
	Active  *bool  `json:"active"`
}

// found returns what queue find says of a job's queues, and whether that is all known.
func (d *daemon) found(w *worker) (queues []foundQueue, known bool) {
	d.t.Helper()
	var f struct{ Queues []foundQueue }
	r := d.ctl("-o", "json", "queue", "find", fmt.Sprint(w.PID))
	if r.Code == term.ExitNotFound { // not yet
		return nil, false
	}
	if err := json.Unmarshal([]byte(r.Out), &f); err != nil {
		d.t.Fatalf("%v: %+v", err, r)
	}
	return f.Queues, len(f.Queues) > 0 && !slices.ContainsFunc(f.Queues, func(q foundQueue) bool { return q.Address == 0 || q.Active == nil })
}

// queueStates returns the queues that a job has.
func (m *emulated) queueStates(w *worker) map[uint32]driver.QueueState {
	m.t.Helper()
	p, _ := m.process(w.PID)
	all := map[uint32]driver.QueueState{}
	for _, q := range p.Queues {
		all[q.ID] = q
	}
	return all
}

// With the default config, a job that nobody attached to: all queues have an address and are active or not, as
// on the machine. One queue replaces another, and evictions begin and end. What is said is never wrong; directly after a
// change it may be unknown.
func TestQueuesThatNobodyAttachedToAreFound(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(nothingSet)
	m.serve("--queues", "2") // others with rings of the same size
	job := m.serve("--queues", "3", "--duration", "500")
	looks := 50
	if !testing.Short() {
		looks = 1000
	}
	evicted, right := false, 0
	for look := range looks {
		if look%25 == 0 {
			if evicted = !evicted; evicted {
				m.evict(job)
			} else {
				m.restore(job)
			}
			if rand.IntN(2) == 0 {
				for id := range m.queueStates(job) {
					job.tell("destroy %d", id)
					job.await("destroyed")
					job.create()
					break
				}
			}
			m.eventually("the daemon has noticed the change", func() bool {
				queues, known := d.found(job)
				return known && len(queues) == 3 && m.notSo(queues, job) == ""
			})
		}
		queues, known := d.found(job)
		if wrong := m.notSo(queues, job); wrong != "" {
			t.Error(wrong)
		} else if known && len(queues) == 3 {
			right++
		}
	}
	t.Logf("%d of %d right, the others unknown", right, looks)
	if right*100 < 99*looks {
		t.Errorf("of %d looks %d told all", looks, right)
	}
	job.stop()
}

// notSo returns what is said of queues and is not so; "" is nothing.
func (m *emulated) notSo(queues []foundQueue, w *worker) string {
	truth := m.queueStates(w)
	for _, q := range queues {
		is, exists := truth[q.ID]
		if !exists || q.Address != 0 && q.Address != is.Ring || q.Active != nil && *q.Active != is.Running {
			return fmt.Sprintf("queue %d is said to be at %#x, and active: %v; on the machine: %+v", q.ID, q.Address, q.Active != nil && *q.Active, is)
		}
	}
	return ""
}

// Reading mqds takes at most 10 % of the time, also with many queues that are new.
func TestReadingTheQueuesOfManyJobsTakesLittleTime(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(nothingSet)
	var jobs []*worker
	for range 10 {
		jobs = append(jobs, m.serve("--queues", "8", "--duration", "500"))
	}
	var mqds *gpreemptv1.Source
	d.eventually("all addresses are known", func() bool {
		for _, s := range d.status().GetSources() {
			if s.GetName() == "mqds" {
				mqds = s
			}
		}
		var list gpreemptv1.ListQueuesResponse
		d.ctlJSON(&list, "queue", "list")
		known := 0
		for _, q := range list.GetQueues() {
			if q.GetRingAddress() != 0 {
				known++
			}
		}
		return known == 80 && mqds.GetReadings() > 0
	})
	t.Logf("%d readings; the last took %v, the next after %v; %s", mqds.GetReadings(), mqds.GetTook().AsDuration(), mqds.GetEvery().AsDuration(), mqds.GetNote())
	if took, every := mqds.GetTook().AsDuration(), mqds.GetEvery().AsDuration(); every < 9*took {
		t.Errorf("a reading took %v, and the next is %v later", took, every)
	}
	for _, job := range jobs {
		job.stop()
	}
}

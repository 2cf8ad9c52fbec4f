package main

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Invented work of a host.
const (
	rankQueues = 4  // of each offline process
	slots      = 24 // compute queues that fit an MI300X
	leaseTTL   = 10 * time.Second
	maxWait    = 20 * time.Millisecond
)

// lease is one that will be completed.
type lease struct {
	id  scheduler.LeaseID
	end scheduler.Time
}

// host is a simulated host: a scheduler, an event log, and an offline job with a process on
// each GPU. Announcements arrive at random, and suspends take random times. Its time is that
// of its last advance. It is safe for concurrent use.
type host struct {
	handler http.Handler

	mu     sync.Mutex // guards what follows
	random *rand.Rand
	mean   time.Duration // between announcements
	core   *scheduler.Core
	log    *events.Log
	gpus   []gpreempt.GPU
	now    scheduler.Time
	next   scheduler.Time // when the next announcement arrives
	leases []lease
	last   scheduler.LeaseID
	calls  int64
	driver time.Duration
}

// newHost returns host number n, whose handler serves the metrics of the time that now
// returns.
func newHost(n, gpus int, now func() time.Duration) (*host, error) {
	policy, err := scheduler.PresetByName("balanced")
	if err != nil {
		return nil, err
	}
	h := &host{
		random: rand.New(rand.NewPCG(1, uint64(n))),
		core:   scheduler.New(policy, scheduler.Limits{LeasesPerClient: 64, LeasesPerUser: 64, LeasesTotal: 256}),
		log:    events.NewLog(64),
	}
	h.mean = time.Second + time.Duration(h.random.Int64N(int64(4*time.Second)))
	h.next = h.wait(h.mean)
	for i := range gpus {
		// Hosts of one model have the same ids: the driver makes them from the GPU's
		// properties and its place.
		id := gpreempt.GPUID(5964 + 1021*i)
		h.gpus = append(h.gpus, gpreempt.GPU{ID: id, Name: "gfx942", BDF: fmt.Sprintf("0000:%02x:00.0", 0x10+i)})
		h.step(scheduler.GPUAdded{GPU: id})
		h.step(scheduler.TargetSeen{
			Target: gpreempt.ProcessKey{PID: int32(1000 + i), Start: 1}, Job: "training", Class: gpreempt.Offline,
			GPUs: []gpreempt.GPUID{id}, Queues: rankQueues,
		})
	}
	h.handler = events.MetricsHandler(events.MetricsConfig{
		Snapshot: func() events.MetricsSnapshot {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.advance(now())
			return h.snapshot()
		},
		Alive: func() {}, Ready: func() bool { return true },
	})
	return h, nil
}

// wait draws an exponentially distributed time.
func (h *host) wait(mean time.Duration) time.Duration {
	return time.Duration(h.random.ExpFloat64() * float64(mean))
}

// advance does everything that is due until a time.
func (h *host) advance(until scheduler.Time) {
	for {
		at, what := h.next, h.announce
		if len(h.leases) > 0 && h.leases[0].end < at {
			at, what = h.leases[0].end, h.complete
		}
		if deadline, ok := h.core.NextDeadline(); ok && deadline < at {
			at, what = deadline, func() { h.step(scheduler.Tick{}) }
		}
		if at > until {
			h.now = max(h.now, until)
			return
		}
		h.now = max(h.now, at)
		what()
	}
}

func (h *host) announce() {
	h.last++
	first := h.random.IntN(len(h.gpus))
	var gpus []gpreempt.GPUID
	for _, gpu := range h.gpus[first : first+1+h.random.IntN(len(h.gpus)-first)] {
		gpus = append(gpus, gpu.ID)
	}
	h.leases = append(h.leases, lease{h.last, h.now + h.wait(50*time.Millisecond)})
	slices.SortFunc(h.leases, func(a, b lease) int { return int(a.end - b.end) })
	h.next = h.now + h.wait(h.mean)
	h.step(scheduler.LeaseRequested{Lease: h.last, Client: scheduler.ClientID{PID: 1}, GPUs: gpus, Priority: 8, TTL: leaseTTL, MaxWait: maxWait})
}

func (h *host) complete() {
	id := h.leases[0].id
	h.leases = h.leases[1:]
	h.step(scheduler.LeaseFinished{Lease: id, End: scheduler.EndCompleted})
}

// step makes a step of the scheduler and carries out what it orders.
func (h *host) step(ev scheduler.Event) {
	todo := slices.Clone(h.core.Step(h.now, ev))
	for len(todo) > 0 {
		result := h.do(todo[0])
		if todo = todo[1:]; result != nil {
			todo = append(todo, h.core.Step(h.now, result)...)
		}
	}
}

// do carries out an action and returns its result, nil for one that has none.
func (h *host) do(a scheduler.Action) scheduler.Event {
	switch a.Kind {
	case scheduler.ActRecord:
		h.log.Append(time.Time{}, a.Record, "dbgtrap")
	case scheduler.ActAnswer:
		h.log.Answered(a.Answer, events.Stages{Decide: h.wait(20 * time.Microsecond), Reply: h.wait(50 * time.Microsecond)})
	case scheduler.ActAttach:
		return scheduler.Attached{Target: a.Target}
	case scheduler.ActDetach:
		return scheduler.Detached{Target: a.Target, Took: h.call()}
	case scheduler.ActKill: // no job of it resists
	case scheduler.ActInspect:
		return scheduler.Inspected{Target: a.Target, Seq: a.Seq}
	case scheduler.ActSuspend:
		return scheduler.Suspended{Target: a.Target, Seq: a.Seq, Took: h.call()}
	case scheduler.ActResume:
		return scheduler.Resumed{Target: a.Target, Seq: a.Seq, Took: h.call()}
	}
	return nil
}

// call makes a call to an invented driver.
func (h *host) call() time.Duration {
	took := h.wait(time.Millisecond)
	h.now += took
	h.calls++
	h.driver += took
	return took
}

// snapshot returns what a scrape of the host's daemon is made from.
func (h *host) snapshot() events.MetricsSnapshot {
	second := int64(h.now / time.Second)
	source := func(name string, every int64, took time.Duration) inventory.Source {
		n := second / every
		return inventory.Source{Name: name, Available: true, Readings: uint64(n), Spent: time.Duration(n) * took}
	}
	s := events.MetricsSnapshot{
		Version: "simulated", Backend: "simulated mi300x", Mechanisms: []string{"dbgtrap"}, Log: h.log, Now: h.now,
		GPUs: h.gpus, States: h.core.GPUs(), Leases: h.core.Leases(), Jobs: h.core.Jobs(),
		Floor: h.core.Policy().ShareFloor, Cap: h.core.Policy().ShareCap, FloorUse: h.core.FloorUse(), Draining: h.core.Draining(),
		Sources: []inventory.Source{
			source("events", 5, 20*time.Microsecond), source("hqds", 30, time.Millisecond), source("mqds", 10, time.Millisecond),
			source("smi", 1, 100*time.Microsecond), source("sysfs", 1, 2*time.Millisecond),
		},
		DriverCalls: h.calls, DriverTime: h.driver, Processes: len(h.gpus),
		Queues: map[gpreempt.GPUID]int{}, Used: map[gpreempt.GPUID]inventory.Occupancy{},
	}
	for _, gpu := range s.States {
		running := rankQueues * max(1-gpu.Suspended, 0)
		s.Queues[gpu.ID] = rankQueues
		s.Used[gpu.ID] = inventory.Occupancy{Slots: slots, Mapped: running, Offline: running}
	}
	for _, t := range h.core.Targets() {
		mechanism := "dbgtrap"
		if !t.Ready {
			mechanism = ""
		}
		s.Targets = append(s.Targets, events.Target{Class: t.Class, State: t.State, Mechanism: mechanism})
	}
	return s
}

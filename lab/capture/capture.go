// Package capture says what two workloads make of the driver's queues: it joins the recordings of each,
// and holds the figures of the design documents' test plan against their targets.
package capture

import (
	"slices"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/hiplog"
	"github.com/gpreempt/gpreempt/lab/kfdtrace"
)

// Case is one workload with what was recorded of it. A recording that does not exist is nil.
type Case struct {
	Name string
	// Log is the HIP log of all its processes, Trace the recording of the driver, and Seen what the
	// daemon showed of its queues.
	Log   *hiplog.Analysis
	Trace *kfdtrace.Report
	Seen  *Seen
}

// Seen is what readings of the daemon showed of the compute queues of some processes.
type Seen struct {
	Readings int `json:"readings"`
	// Queues is the most that a process had at once.
	Queues int `json:"queues"`
	// Backlog is the most packets that waited in one, nil if the daemon could read none.
	Backlog *uint64 `json:"backlog_packets"`
	// Active and Idle count over all readings the queues with a hardware slot and those without.
	Active int `json:"active"`
	Idle   int `json:"idle"`
	// Quanta are the values of CP_HQD_QUANTUM in their slots, sorted.
	Quanta []uint32 `json:"quanta"`
}

// Readings collects what the daemon shows, by the id of the target.
type Readings map[string]*Seen

// Add adds a reading of all queues, and of the hardware slots, which may be nil. A queue without a slot
// counts only if each slot of its GPU is known to be another's.
func (r Readings) Add(queues []*gpreemptv1.Queue, slots []*gpreemptv1.Hqd) {
	type queue struct {
		target string
		id     uint32
		gpu    uint32
	}
	has, doubtful, read := map[queue]*gpreemptv1.Hqd{}, map[uint32]bool{}, map[uint32]bool{}
	for _, h := range slots {
		if h.GetKind() != "cp" {
			continue
		}
		read[h.GetGpuId()] = true
		switch {
		case h.GetState() != gpreemptv1.HqdState_HQD_STATE_LIVE:
		case h.GetTargetId() == "":
			doubtful[h.GetGpuId()] = true
		default:
			has[queue{h.GetTargetId(), h.GetQueueId(), h.GetGpuId()}] = h
		}
	}
	now := map[string]int{}
	for _, q := range queues {
		if q.GetType() != "compute" {
			continue
		}
		s := r[q.GetTargetId()]
		if s == nil {
			s = &Seen{}
			r[q.GetTargetId()] = s
		}
		if now[q.GetTargetId()]++; now[q.GetTargetId()] == 1 {
			s.Readings++
		}
		s.Queues = max(s.Queues, now[q.GetTargetId()])
		if n := q.GetBacklog(); q.Backlog != nil && q.GetBacklogUnit() == "packets" && (s.Backlog == nil || n > *s.Backlog) {
			s.Backlog = &n
		}
		switch h := has[queue{q.GetTargetId(), q.GetQueueId(), q.GetGpuId()}]; {
		case h != nil:
			s.Active++
			s.Quanta = append(s.Quanta, h.GetQuantum())
		case read[q.GetGpuId()] && !doubtful[q.GetGpuId()]:
			s.Idle++
		}
		slices.Sort(s.Quanta)
		s.Quanta = slices.Compact(s.Quanta)
	}
}

// Of returns what was seen of some targets, nil if nothing.
func (r Readings) Of(targets []string) *Seen {
	var all *Seen
	for _, id := range slices.Compact(slices.Sorted(slices.Values(targets))) {
		s := r[id]
		if s == nil {
			continue
		}
		if all == nil {
			all = &Seen{}
		}
		all.Readings, all.Queues = max(all.Readings, s.Readings), max(all.Queues, s.Queues)
		all.Active, all.Idle = all.Active+s.Active, all.Idle+s.Idle
		if s.Backlog != nil && (all.Backlog == nil || *s.Backlog > *all.Backlog) {
			all.Backlog = s.Backlog
		}
		all.Quanta = slices.Compact(slices.Sorted(slices.Values(append(all.Quanta, s.Quanta...))))
	}
	return all
}

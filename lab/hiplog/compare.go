package hiplog

import (
	"cmp"
	"slices"
)

// Comparison compares two logs. Its JSON is as stable as that of Analysis.
type Comparison struct {
	A Side `json:"a"`
	B Side `json:"b"`
	// Matches are pairs of queues with a ring at the same address: Common of them are the
	// same queue, Coincidences are different ones, and Unknown are undecided.
	Matches      []Match `json:"matches"`
	Common       int     `json:"common"`
	Coincidences int     `json:"coincidences"`
	Unknown      int     `json:"unknown"`
	// OnlyA and OnlyB count the queues that are certainly not in the other log.
	OnlyA int `json:"only_a"`
	OnlyB int `json:"only_b"`
	// Kernels are those of both logs, most frequent first, at most 50 of DistinctKernels.
	Kernels         []SharedKernel `json:"kernels"`
	CommonKernels   int            `json:"common_kernels"`
	DistinctKernels int            `json:"distinct_kernels"`
	// KernelOverlap is the sum over all kernels of the smaller of their shares in the
	// launches of A and of B, from 0 without common kernels to 1 for the same mix. It is nil
	// when a log has no kernel names.
	KernelOverlap *float64 `json:"kernel_overlap"`
	// OverlapMicros is how long both wrote records. The clocks are the same only if both ran
	// on one host without a reboot between them, which the logs do not show.
	OverlapMicros uint64 `json:"overlap_us"`
	Advice        Advice `json:"advice"`
}

// Side is one of the two logs.
type Side struct {
	PIDs       []int32   `json:"pids"`
	Records    uint64    `json:"records"`
	Queues     []Queue   `json:"queues"`
	Dispatches uint64    `json:"dispatches"`
	Barriers   uint64    `json:"barriers"`
	MinMicros  uint64    `json:"min_us"`
	MaxMicros  uint64    `json:"max_us"`
	Processes  []Process `json:"processes"`
	// MaxBacklog is the largest of its queues, nil = unknown.
	MaxBacklog *Backlog  `json:"max_backlog"`
	Warnings   []Warning `json:"warnings"`
}

// Verdict reports whether two queues with a ring at the same address are the same.
type Verdict string

// The verdicts.
const (
	// SameQueue: the same process created it at the same time.
	SameQueue Verdict = "same"
	// Coincidence: they are of different processes, whose addresses are independent.
	Coincidence Verdict = "coincidence"
	// Undecided: the logs lack the process ids or the creations.
	Undecided Verdict = "unknown"
)

// Match is a pair of queues with a ring at HWq.
type Match struct {
	HWq  Address `json:"hwq"`
	PIDA int32   `json:"pid_a"`
	PIDB int32   `json:"pid_b"`
	// A and B are the indices in the Queues of the sides.
	A       int     `json:"a"`
	B       int     `json:"b"`
	Verdict Verdict `json:"verdict"`
	Why     string  `json:"why"`
}

// SharedKernel is a kernel's launches in both logs.
type SharedKernel struct {
	Name string `json:"name"`
	A    uint64 `json:"a"`
	B    uint64 `json:"b"`
}

// Compare compares a and b, without changing them.
func Compare(a, b *Analysis) *Comparison {
	c := &Comparison{A: side(a), B: side(b), Matches: []Match{}}
	c.match()
	c.kernels(a, b)
	if a.Records > 0 && b.Records > 0 {
		begin, end := max(a.MinMicros, b.MinMicros), min(a.MaxMicros, b.MaxMicros)
		c.OverlapMicros = max(begin, end) - begin
	}
	c.Advice = advise(c)
	return c
}

func side(a *Analysis) Side {
	s := Side{
		PIDs: a.PIDs, Records: a.Records, Queues: a.Queues, MinMicros: a.MinMicros, MaxMicros: a.MaxMicros,
		Processes: a.Processes, Warnings: a.Warnings,
	}
	for i := range a.Processes {
		p := &a.Processes[i]
		s.Dispatches += p.Dispatches
		s.Barriers += p.Barriers
	}
	for i := range a.Queues {
		if q := a.Queues[i].MaxBacklog; q != nil && (s.MaxBacklog == nil || q.Packets > s.MaxBacklog.Packets) {
			s.MaxBacklog = q
		}
	}
	return s
}

// match pairs the queues by address.
func (c *Comparison) match() {
	at := map[Address][]int{}
	for i := range c.B.Queues {
		if hwq := c.B.Queues[i].HWq; hwq != 0 {
			at[hwq] = append(at[hwq], i)
		}
	}
	sharedA, sharedB := map[int]bool{}, map[int]bool{}
	for i := range c.A.Queues {
		qa := &c.A.Queues[i]
		for _, j := range at[qa.HWq] {
			qb := &c.B.Queues[j]
			m := Match{HWq: qa.HWq, PIDA: qa.PID, PIDB: qb.PID, A: i, B: j}
			m.Verdict, m.Why = same(qa, qb)
			switch m.Verdict {
			case SameQueue:
				c.Common++
			case Coincidence:
				c.Coincidences++
			case Undecided:
				c.Unknown++
			}
			if m.Verdict != Coincidence {
				sharedA[i], sharedB[j] = true, true
			}
			c.Matches = append(c.Matches, m)
		}
	}
	c.OnlyA, c.OnlyB = len(c.A.Queues)-len(sharedA), len(c.B.Queues)-len(sharedB)
}

// same decides whether two queues with their rings at one address are the same.
func same(a, b *Queue) (Verdict, string) {
	switch {
	case a.PID != 0 && b.PID != 0 && a.PID != b.PID:
		return Coincidence, "the processes differ, and addresses of different processes are independent"
	case a.Created != nil && b.Created != nil && a.Created.Micros == b.Created.Micros && slices.Equal(a.SWqs, b.SWqs):
		return SameQueue, "both logs contain the same creation"
	case a.Created != nil && b.Created != nil && a.Creations == 1 && b.Creations == 1:
		return Coincidence, "the logs contain different creations, in different processes or runs"
	case a.PID == 0 || b.PID == 0:
		return Undecided, "a log has no process ids"
	default:
		return Undecided, "the process ids are equal, but they can repeat in containers and over time, and the logs have no common creation"
	}
}

// maxShared bounds Comparison.Kernels.
const maxShared = 50

// kernels compares the launches.
func (c *Comparison) kernels(a, b *Analysis) {
	launchesA, totalA := launches(a)
	launchesB, totalB := launches(b)
	c.Kernels = []SharedKernel{}
	overlap := 0.0
	for name, n := range launchesA {
		m := launchesB[name]
		c.Kernels = append(c.Kernels, SharedKernel{Name: name, A: n, B: m})
		if m > 0 {
			c.CommonKernels++
			overlap += min(float64(n)/float64(totalA), float64(m)/float64(totalB))
		}
	}
	for name, m := range launchesB {
		if launchesA[name] == 0 {
			c.Kernels = append(c.Kernels, SharedKernel{Name: name, B: m})
		}
	}
	c.DistinctKernels = len(c.Kernels)
	slices.SortFunc(c.Kernels, func(x, y SharedKernel) int {
		return cmp.Or(cmp.Compare(y.A+y.B, x.A+x.B), cmp.Compare(x.Name, y.Name))
	})
	c.Kernels = c.Kernels[:min(len(c.Kernels), maxShared)]
	if totalA > 0 && totalB > 0 {
		c.KernelOverlap = &overlap
	}
}

// launches sums over the processes of a log; the total includes kernels that were not
// counted separately.
func launches(a *Analysis) (by map[string]uint64, total uint64) {
	by = map[string]uint64{}
	for i := range a.Processes {
		total += a.Processes[i].Launches.Total
		for name, n := range a.Processes[i].Launches.counts {
			by[name] += n
		}
	}
	return by, total
}

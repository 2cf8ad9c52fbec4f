package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/internal/term"
)

// samples accumulates several listings of the queues.
type samples struct {
	times     []time.Time
	counts    []int
	queues    map[sampledKey]*sampledQueue
	processes []sampledProcess // in the order of their first sample
}

// sampledProcess is one process in all samples.
type sampledProcess struct {
	target, command string
	most            int // queues at once
}

// sampledKey identifies one queue: ids are reused.
type sampledKey struct {
	queueKey
	born int64
}

// sampledQueue is one queue in all samples.
type sampledQueue struct {
	queue       *gpreemptv1.Queue // of the last sample with it
	seen        int
	first, last int // samples, counted from 1
	// backlogs counts the samples with a backlog; the rest is of these.
	backlogs    int
	least, most uint64
	sum         float64
}

// add adds one sample: the selected queues, each once.
func (s *samples) add(at time.Time, list []*gpreemptv1.Queue) {
	if s.queues == nil {
		s.queues = map[sampledKey]*sampledQueue{}
	}
	s.times = append(s.times, at)
	s.counts = append(s.counts, len(list))
	now := map[string]int{}
	for _, q := range list {
		now[q.GetTargetId()]++
		n := slices.IndexFunc(s.processes, func(p sampledProcess) bool { return p.target == q.GetTargetId() })
		if n < 0 {
			n = len(s.processes)
			s.processes = append(s.processes, sampledProcess{target: q.GetTargetId()})
		}
		s.processes[n].command = q.GetComm()
		s.processes[n].most = max(s.processes[n].most, now[q.GetTargetId()])

		key := sampledKey{keyOf(q), q.GetFirstSeen().AsTime().UnixNano()}
		was := s.queues[key]
		if was == nil {
			was = &sampledQueue{first: len(s.times), least: math.MaxUint64}
			s.queues[key] = was
		}
		was.queue, was.last = q, len(s.times)
		was.seen++
		if q.Backlog != nil {
			was.backlogs++
			was.sum += float64(q.GetBacklog())
			was.least, was.most = min(was.least, q.GetBacklog()), max(was.most, q.GetBacklog())
		}
	}
}

// sampleReport is the summary of the samples.
type sampleReport struct {
	Began     string            `json:"began"`
	Ended     string            `json:"ended"`
	Interval  string            `json:"interval"`
	Samples   int               `json:"samples"`
	Simulated string            `json:"simulated,omitempty"`
	Queues    []json.RawMessage `json:"queues"`
	PerSample perSample         `json:"queues_per_sample"`
	Types     map[string]int    `json:"types"`
	GPUs      map[string]int    `json:"gpus"`
	// Created and Destroyed count the queues that are not in the first and not in the
	// last sample.
	Created   int    `json:"created"`
	Destroyed int    `json:"destroyed"`
	Runs      []runs `json:"runs"`

	queues []*sampledQueue
}

// perSample summarizes the number of queues at once.
type perSample struct {
	Counts []int   `json:"counts"`
	Min    int     `json:"min"`
	Mean   float64 `json:"mean"`
	Max    int     `json:"max"`
	Std    float64 `json:"std"`
	// Stable reports whether the numbers differ by at most one; null for one sample.
	Stable *bool `json:"stable"`
}

// runs compares the processes with the same command.
type runs struct {
	Command string `json:"command"`
	// Processes are target ids; Queues has the largest number of queues at once of each.
	Processes []string `json:"processes"`
	Queues    []int    `json:"queues"`
	// Consistent reports whether these differ by at most one.
	Consistent bool `json:"consistent"`
}

// seenQueue are the fields that the samples add to a queue.
type seenQueue struct {
	Seen      int      `json:"seen"`
	Frequency float64  `json:"frequency"`
	First     int      `json:"first_sample"`
	Last      int      `json:"last_sample"`
	Backlogs  int      `json:"backlog_samples"`
	Least     *uint64  `json:"backlog_min,string,omitempty"`
	Mean      *float64 `json:"backlog_mean,omitempty"`
	Most      *uint64  `json:"backlog_max,string,omitempty"`
}

// report summarizes at least one sample.
func (s *samples) report(interval time.Duration) (*sampleReport, error) {
	r := &sampleReport{
		Began: s.times[0].UTC().Format(time.RFC3339Nano), Ended: s.times[len(s.times)-1].UTC().Format(time.RFC3339Nano),
		Interval: interval.String(), Samples: len(s.times), Queues: []json.RawMessage{}, PerSample: spread(s.counts),
		Types: map[string]int{}, GPUs: map[string]int{}, Runs: s.runs(),
	}
	r.queues = slices.SortedFunc(maps.Values(s.queues), func(a, b *sampledQueue) int {
		return cmp.Or(cmp.Compare(a.queue.GetPid(), b.queue.GetPid()), cmp.Compare(a.queue.GetTargetId(), b.queue.GetTargetId()),
			cmp.Compare(a.first, b.first), cmp.Compare(a.queue.GetQueueId(), b.queue.GetQueueId()))
	})
	for _, q := range r.queues {
		r.Types[q.queue.GetType()]++
		r.GPUs[strconv.FormatUint(uint64(q.queue.GetGpuId()), 10)]++
		if q.first > 1 {
			r.Created++
		}
		if q.last < len(s.times) {
			r.Destroyed++
		}
		more := seenQueue{
			Seen: q.seen, Frequency: float64(q.seen) / float64(len(s.times)), First: q.first, Last: q.last, Backlogs: q.backlogs,
		}
		if q.backlogs > 0 {
			mean := q.mean()
			more.Least, more.Mean, more.Most = &q.least, &mean, &q.most
		}
		raw, err := term.Extend(q.queue, more)
		if err != nil {
			return nil, err
		}
		r.Queues = append(r.Queues, raw)
	}
	return r, nil
}

func (q *sampledQueue) mean() float64 { return q.sum / float64(q.backlogs) }

func spread(counts []int) perSample {
	s := perSample{Counts: counts, Min: slices.Min(counts), Max: slices.Max(counts)}
	s.Mean = stat.Mean(counts)
	for _, n := range counts {
		s.Std += (float64(n) - s.Mean) * (float64(n) - s.Mean)
	}
	s.Std = math.Sqrt(s.Std / float64(len(counts)))
	if len(counts) > 1 {
		s.Stable = new(s.Max-s.Min <= 1)
	}
	return s
}

// runs groups the processes by their command.
func (s *samples) runs() []runs {
	var all []runs
	for _, p := range s.processes {
		n := slices.IndexFunc(all, func(r runs) bool { return r.Command == p.command })
		if n < 0 {
			n = len(all)
			all = append(all, runs{Command: p.command})
		}
		all[n].Processes = append(all[n].Processes, p.target)
		all[n].Queues = append(all[n].Queues, p.most)
		all[n].Consistent = slices.Max(all[n].Queues)-slices.Min(all[n].Queues) <= 1
	}
	return all
}

// enoughRuns is how many runs of a program show that its number of queues is constant.
const enoughRuns = 5

func printSamples(p *term.Printer, s *samples, r *sampleReport) {
	p.Line(term.Cell{Text: fmt.Sprintf("%s over %s: %s of %s", term.Count(r.Samples, "sample"), term.Duration(s.times[len(s.times)-1].Sub(s.times[0])),
		term.Count(len(r.queues), "queue"), term.NumberOf(len(s.processes), "process", "processes")), Style: term.StyleBold})
	if r.Simulated != "" {
		p.Line(term.Cell{Text: "simulated " + r.Simulated + ": no hardware is involved", Style: term.StyleNote})
	}
	if len(r.queues) == 0 {
		return
	}
	p.Linef("")
	t := p.Table("", term.Columns{
		">PID", "COMMAND", ">QUEUE", "TYPE", ">GPU", ">ADDRESS", ">RING", ">HWPRIO", ">SEEN", ">OF ALL", "+>FIRST", "+>LAST", ">BACKLOG MIN",
		">MEAN", ">MAX", "UNIT", "+TARGET",
	})
	for _, s := range r.queues {
		q := s.queue
		least, mean, most, unit := "-", "-", "-", "-"
		if s.backlogs > 0 {
			least, most, unit = strconv.FormatUint(s.least, 10), strconv.FormatUint(s.most, 10), q.GetBacklogUnit()
			mean = strconv.FormatFloat(s.mean(), 'f', 1, 64)
		}
		t.Row(q.GetPid(), q.GetComm(), q.GetQueueId(), q.GetType(), q.GetGpuId(), term.Address(q.GetRingAddress()),
			term.Size(q.GetRingBytes()), hardwarePriority(q), fmt.Sprintf("%d/%d", s.seen, r.Samples),
			fmt.Sprintf("%.0f %%", 100*float64(s.seen)/float64(r.Samples)), s.first, s.last, least, mean, most,
			term.Or(unit, "-"), q.GetTargetId())
	}
	t.Flush()
	p.Linef("")

	n := r.PerSample
	p.Linef("queues at once  min %d, mean %.1f, max %d, std %.2f", n.Min, n.Mean, n.Max, n.Std)
	p.Linef("types           %s", distribution(r.Types))
	p.Linef("GPUs            %s", distribution(r.GPUs))
	p.Linef("changes         %d created, %d destroyed", r.Created, r.Destroyed)
	switch {
	case n.Stable == nil:
		p.Linef("stability       unknown: one sample")
	case *n.Stable:
		p.Line("stability       ", term.Cell{Text: "stable: the numbers differ by at most one", Style: term.StyleGood})
	default:
		p.Line("stability       ", term.Cell{Text: fmt.Sprintf("not stable: %d to %d queues", n.Min, n.Max), Style: term.StyleNote})
	}
	for _, run := range r.Runs {
		if len(run.Processes) < 2 {
			continue
		}
		result := term.Cell{Text: "the same number, within one", Style: term.StyleGood}
		if !run.Consistent {
			result = term.Cell{Text: "different numbers", Style: term.StyleNote}
		}
		few := ""
		if len(run.Processes) < enoughRuns {
			few = fmt.Sprintf("; %d runs are recommended", enoughRuns)
		}
		p.Line(fmt.Sprintf("runs            %s of %s with %s queues: ", term.NumberOf(len(run.Processes), "process", "processes"), run.Command,
			strings.Trim(fmt.Sprint(run.Queues), "[]")), result, few)
	}
}

// distribution formats how many of each there are, the most frequent first.
func distribution(of map[string]int) string {
	names := slices.SortedFunc(maps.Keys(of), func(a, b string) int { return cmp.Or(cmp.Compare(of[b], of[a]), cmp.Compare(a, b)) })
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d", name, of[name])
	}
	return strings.Join(names, ", ")
}

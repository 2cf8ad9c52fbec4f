package cli

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/hiplog"
)

func printAnalysis(p *term.Printer, log *analyzedLog) {
	p.Line(term.Cell{Text: log.File, Style: term.StyleBold}, ": "+about(log.Analysis))
	for i := range log.Processes {
		p.Linef("%s", aboutProcess(&log.Processes[i]))
	}
	if len(log.PIDs) == 0 && len(log.PIDsInText) > 0 {
		p.Linef("the program itself printed: process %s", term.Numbers(log.PIDsInText))
	}
	if len(log.Queues) > 0 {
		p.Linef("")
		printLogQueues(p, log.Queues)
		p.Linef("HWQ is the address of the ring. HSA-ID is the runtime's counter, not the driver's queue id.")
	}
	printLaunches(p, log.Processes)
	printLogWarnings(p, "", log.Warnings)
}

func about(a *hiplog.Analysis) string {
	summary := fmt.Sprintf("%s in %s, over %s", term.Count(a.Records, "HIP record"), term.Count(a.Lines, "line"), micros(a.MaxMicros-a.MinMicros))
	if len(a.Levels) > 0 {
		summary += fmt.Sprintf(", up to level %d", slices.Max(slices.Collect(maps.Keys(a.Levels))))
	}
	return summary
}

func aboutProcess(q *hiplog.Process) string {
	parts := []string{term.Count(q.Queues, "queue")}
	if q.QueuesPerPriority > 0 {
		parts[0] += fmt.Sprintf(" (at most %d per priority)", q.QueuesPerPriority)
	}
	if q.Threads > 0 {
		parts = append(parts, term.Count(q.Threads, "thread"))
	}
	parts = append(parts, launchesOf(q), fmt.Sprintf("%d dispatches", q.Dispatches), term.Count(q.Barriers, "barrier"))
	if q.Intervals.Count > 0 {
		parts = append(parts, fmt.Sprintf("a dispatch every %s (p99 %s)", micros(q.Intervals.P50), micros(q.Intervals.P99)))
	}
	return "process " + logPID(q.PID) + ": " + strings.Join(parts, ", ")
}

func launchesOf(q *hiplog.Process) string {
	if q.Launches.Total == 1 {
		return "1 launch"
	}
	return fmt.Sprintf("%d launches", q.Launches.Total)
}

func printLogQueues(p *term.Printer, queues []hiplog.Queue) {
	t := p.Table("", term.Columns{
		">PID", "HWQ", ">HSA-ID", ">PACKETS", "HSA-PRIO", ">STREAMS", ">DISPATCHES", ">BARRIERS", ">EVERY", ">P99", ">BACKLOG", "KERNEL",
		"+SWQ", "+CREATED", "+DELETED", "+>MIN", "+>MEAN", "+>P95", "+>MAX", "+RPTR", "+WPTR", "+FIRST", "+LAST", "+CUS", "+HIP STREAMS",
	})
	for i := range queues {
		q := &queues[i]
		hwq, packets, streams, backlog, kernel, cus := "-", "-", "-", "-", "-", "-"
		if q.HWq != 0 {
			hwq = q.HWq.String()
		}
		if q.SizePackets > 0 {
			packets = strconv.FormatUint(q.SizePackets, 10)
		}
		if q.Acquired+q.Selected > 0 {
			streams = strconv.FormatUint(q.MaxRefCount, 10)
		}
		if q.MaxBacklog != nil {
			backlog = strconv.FormatUint(q.MaxBacklog.Packets, 10)
		}
		if len(q.Kernels.Top) > 0 {
			kernel = term.Cut(q.Kernels.Top[0].Name, 40)
			if more := q.Kernels.Distinct - 1; more > 0 {
				kernel += fmt.Sprintf(" +%d", more)
			}
		}
		if q.CUMask != "" {
			cus = "0x" + term.Cut(q.CUMask, 40)
		}
		every := func(v uint64) string {
			if q.Intervals.Count == 0 {
				return "-"
			}
			return micros(v)
		}
		t.Row(logPID(q.PID), hwq, term.Numbers(q.IDs), packets, term.Or(q.Priority, "-"), streams,
			q.Dispatches, q.Barriers, every(q.Intervals.P50), every(q.Intervals.P99), backlog, kernel,
			addresses(q.SWqs), happened(q.Created), happened(q.Deleted), every(q.Intervals.Min),
			every(uint64(q.Intervals.Mean)), every(q.Intervals.P95), every(q.Intervals.Max), fromTo(q.ReadIndex), fromTo(q.WriteIndex),
			happened(q.FirstDispatch), happened(q.LastDispatch), cus, addresses(q.Streams))
	}
	t.Flush()
}

// printLaunches lists the kernels that each process launched most.
func printLaunches(p *term.Printer, processes []hiplog.Process) {
	shown := 5
	if p.Wide {
		shown = 20
	}
	for i := range processes {
		mix := &processes[i].Launches
		if mix.Total == 0 {
			continue
		}
		p.Linef("")
		p.Linef("launched by process %s: %s", logPID(processes[i].PID), term.Count(mix.Distinct, "kernel"))
		t := p.Table("  ", term.Columns{">LAUNCHES", ">SHARE", "KERNEL"})
		rest := mix.Total
		for _, k := range mix.Top[:min(shown, len(mix.Top))] {
			t.Row(k.Count, percent(k.Count, mix.Total), kernelName(p, k.Name))
			rest -= k.Count
		}
		if rest > 0 {
			others := "(all others)"
			if mix.Others > 0 {
				others = fmt.Sprintf("(all others; %d launches of kernels that were not counted separately)", mix.Others)
			}
			t.Row(rest, percent(rest, mix.Total), others)
		}
		t.Flush()
	}
}

// kernelName shortens a name: template names are very long.
func kernelName(p *term.Printer, name string) string {
	if p.Wide {
		return name
	}
	return term.Cut(name, 90)
}

func printLogWarnings(p *term.Printer, of string, warnings []hiplog.Warning) {
	for _, w := range warnings {
		p.Linef("")
		p.Line(term.Cell{Text: "warning", Style: term.StyleNote}, " "+of+w.Code+": "+w.Text)
		if w.Next != "" {
			p.Linef("  try: %s", w.Next)
		}
	}
}

func printComparison(p *term.Printer, c *comparedLogs) {
	p.Line(term.Cell{Text: c.Advice.Text, Style: term.StyleBold})
	for _, reason := range c.Advice.Reasons {
		p.Linef("  reason: %s", reason)
	}
	for _, limit := range c.Advice.Limits {
		p.Linef("  limit: %s", limit)
	}
	p.Linef("")
	p.Linef("A: %s", c.FileA)
	p.Linef("B: %s", c.FileB)
	p.Linef("")
	t := p.Table("", term.Columns{"", "A", "B"})
	row := func(name string, of func(*hiplog.Side) string) { t.Row(name, of(&c.A), of(&c.B)) }
	row("processes", func(s *hiplog.Side) string { return term.Numbers(s.PIDs) })
	row("time", func(s *hiplog.Side) string { return micros(s.MaxMicros - s.MinMicros) })
	row("queues", func(s *hiplog.Side) string { return strconv.Itoa(len(s.Queues)) })
	row("hsa ids", func(s *hiplog.Side) string { return term.Numbers(idsOf(s)) })
	row("launches", func(s *hiplog.Side) string {
		return fmt.Sprint(sum(s, func(q *hiplog.Process) uint64 { return q.Launches.Total }))
	})
	row("dispatches", func(s *hiplog.Side) string { return fmt.Sprint(s.Dispatches) })
	row("barriers", func(s *hiplog.Side) string { return fmt.Sprint(s.Barriers) })
	row("dispatch every", func(s *hiplog.Side) string { return intervalsOf(s, func(i *hiplog.Intervals) uint64 { return i.P50 }) })
	row("  p99", func(s *hiplog.Side) string { return intervalsOf(s, func(i *hiplog.Intervals) uint64 { return i.P99 }) })
	row("  longest", func(s *hiplog.Side) string { return intervalsOf(s, func(i *hiplog.Intervals) uint64 { return i.Max }) })
	row("deepest backlog", func(s *hiplog.Side) string {
		if s.MaxBacklog == nil {
			return "-"
		}
		return term.Count(s.MaxBacklog.Packets, "packet")
	})
	t.Flush()
	p.Linef("")
	p.Linef("queues: %d in both, %d only in A, %d only in B, %d unknown; %s at the same address by coincidence",
		c.Common, c.OnlyA, c.OnlyB, c.Unknown, term.Count(c.Coincidences, "pair"))
	p.Linef("overlap in time: %s, if both are from one host without a reboot between them", micros(c.OverlapMicros))
	if c.KernelOverlap != nil {
		p.Linef("kernels: %d in both of %d; %.0f %% of the launches overlap", c.CommonKernels, c.DistinctKernels, 100**c.KernelOverlap)
	}
	printMatches(p, c.Matches)
	printSharedKernels(p, c.Comparison)
	if p.Wide {
		for _, s := range []*hiplog.Side{&c.A, &c.B} {
			if len(s.Queues) > 0 {
				p.Linef("")
				printLogQueues(p, s.Queues)
			}
		}
	}
	printLogWarnings(p, "A: ", c.A.Warnings)
	printLogWarnings(p, "B: ", c.B.Warnings)
}

func printMatches(p *term.Printer, matches []hiplog.Match) {
	if len(matches) == 0 {
		return
	}
	p.Linef("")
	t := p.Table("", term.Columns{"HWQ", ">PID A", ">PID B", "QUEUE", "REASON"})
	for _, m := range matches {
		verdict := term.Cell{Text: string(m.Verdict)}
		if m.Verdict == hiplog.SameQueue {
			verdict.Style = term.StyleNote
		}
		t.Row(m.HWq, logPID(m.PIDA), logPID(m.PIDB), verdict, m.Why)
	}
	t.Flush()
}

func printSharedKernels(p *term.Printer, c *hiplog.Comparison) {
	if len(c.Kernels) == 0 {
		return
	}
	shown := 10
	if p.Wide {
		shown = len(c.Kernels)
	}
	p.Linef("")
	t := p.Table("", term.Columns{">IN A", ">IN B", "KERNEL"})
	for _, k := range c.Kernels[:min(shown, len(c.Kernels))] {
		t.Row(k.A, k.B, kernelName(p, k.Name))
	}
	t.Flush()
}

func idsOf(s *hiplog.Side) []uint32 {
	var ids []uint32
	for i := range s.Queues {
		ids = append(ids, s.Queues[i].IDs...)
	}
	return ids
}

func sum(s *hiplog.Side, of func(*hiplog.Process) uint64) uint64 {
	n := uint64(0)
	for i := range s.Processes {
		n += of(&s.Processes[i])
	}
	return n
}

// intervalsOf formats a figure of each process with intervals.
func intervalsOf(s *hiplog.Side, of func(*hiplog.Intervals) uint64) string {
	var parts []string
	for i := range s.Processes {
		if s.Processes[i].Intervals.Count > 0 {
			parts = append(parts, micros(of(&s.Processes[i].Intervals)))
		}
	}
	return term.Or(term.Few(parts), "-")
}

func addresses(list []hiplog.Address) string {
	var parts []string
	for _, v := range list {
		parts = append(parts, v.String())
	}
	return term.Or(term.Few(parts), "-")
}

func logPID(pid int32) string {
	if pid == 0 {
		return "?"
	}
	return strconv.Itoa(int(pid))
}

// micros formats a number of microseconds.
func micros(n uint64) string {
	return term.Duration(time.Duration(min(n, math.MaxInt64/1000)) * time.Microsecond)
}

func percent(part, whole uint64) string {
	return fmt.Sprintf("%.1f%%", 100*float64(part)/float64(whole))
}

// happened formats the line of an event and its time since boot.
func happened(e *hiplog.Event) string {
	if e == nil {
		return "-"
	}
	return fmt.Sprintf("line %d at %d.%06ds", e.Line, e.Micros/1e6, e.Micros%1e6)
}

func fromTo(r *hiplog.Range) string {
	if r == nil {
		return "-"
	}
	return fmt.Sprintf("%d..%d", r.Min, r.Max)
}

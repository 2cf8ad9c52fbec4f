package capture

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/lab/kfdtrace"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// Result is what a figure says about its target.
type Result string

// The results.
const (
	Met     Result = "met"
	Missed  Result = "missed"
	Unknown Result = "unknown"
)

// Figure is a row of the test plan with a value of each case.
type Figure struct {
	Name   string `json:"name"`
	Target string `json:"target"`
	// Values are for people; "unknown" where it was not recorded.
	Values []string `json:"values"`
	// Result is the worst of the cases.
	Result Result `json:"result"`
	// MissedBy are the cases that missed the target.
	MissedBy []string `json:"missed_by,omitempty"`
	// Learn says how to learn what is unknown, "" if all is known.
	Learn string `json:"learn,omitempty"`
}

// How to learn a figure, by what it is read from.
const (
	fromTrace = "run gplab capture as root on the host of the GPU, with a kernel that has kprobe events"
	fromLog   = "capture a program of ROCm with --hip-log 4 or 5"
	fromSlots = "let the daemon read debugfs (gpctl doctor), and capture for a minute: it reads less often on a busy host"
	fromBoth  = "it needs both, the KFD trace and a HIP log"
)

// row is how a figure is found. value returns it for people, and whether it meets the target; "" when it
// is unknown.
type row struct {
	name, target, learn string
	value               func(c *Case) (value string, met bool)
}

// The limits of the targets (S2).
const (
	mostCreate  = time.Millisecond
	mostQueues  = 3
	mostMQD     = 2
	mostBacklog = 100
	// quantum is what every driver writes: on, in units of 1 ms, 1 of them. The 512 to 1024 of the
	// document are no value of the register.
	quantum = 0x111
)

var rows = []row{
	{"create a queue, p99", "< 1 ms", fromTrace, func(c *Case) (string, bool) {
		f := calls(c.Trace, "kfd_ioctl_create_queue")
		if f.Count == 0 {
			return "", false
		}
		return f.P99.String(), f.P99 < mostCreate
	}},
	{"compute queues of a process", "1 to 3", fromSlots, func(c *Case) (string, bool) {
		if c.Seen == nil || c.Seen.Queues == 0 {
			return "", false
		}
		return strconv.Itoa(c.Seen.Queues), c.Seen.Queues <= mostQueues
	}},
	{"MQD writes for a new queue", "1 to 2", fromTrace, func(c *Case) (string, bool) {
		created := calls(c.Trace, "pqm_create_queue").Count
		if created == 0 {
			return "", false
		}
		n := float64(calls(c.Trace, "init_mqd", "load_mqd", "kfd_load_mqd", "update_mqd").Count) / float64(created)
		return fmt.Sprintf("%.1f", n), n >= 1 && n <= mostMQD
	}},
	{"jobs on kernel queues (KCQ)", "0", fromTrace, func(c *Case) (string, bool) {
		if c.Trace == nil || c.Trace.KernelCompute == nil {
			return "", false
		}
		return strconv.FormatUint(*c.Trace.KernelCompute, 10), *c.Trace.KernelCompute == 0
	}},
	{"queue calls for a dispatch (else doorbell)", "< 1", fromBoth, func(c *Case) (string, bool) {
		if c.Trace == nil || c.Trace.Followed == 0 || c.Log == nil {
			return "", false
		}
		var dispatches uint64
		for i := range c.Log.Processes {
			dispatches += c.Log.Processes[i].Dispatches
		}
		if dispatches == 0 {
			return "", false
		}
		n := float64(calls(c.Trace, "kfd_ioctl_").Count) / float64(dispatches)
		return fmt.Sprintf("%.3g", n), n < 1
	}},
	{"backlog of a queue, most packets", "< 100", fromLog, func(c *Case) (string, bool) {
		most, known := uint64(0), false
		if c.Log != nil {
			for i := range c.Log.Queues {
				if b := c.Log.Queues[i].MaxBacklog; b != nil {
					most, known = max(most, b.Packets), true
				}
			}
		}
		if !known && c.Seen != nil && c.Seen.Backlog != nil {
			most, known = *c.Seen.Backlog, true
		}
		if !known {
			return "", false
		}
		return strconv.FormatUint(most, 10), most < mostBacklog
	}},
	{"quantum of a slot", "1 ms", fromSlots, func(c *Case) (string, bool) {
		if c.Seen == nil || len(c.Seen.Quanta) == 0 {
			return "", false
		}
		var all []string
		for _, q := range c.Seen.Quanta {
			all = append(all, discovery.DecodeQuantum(q).String())
		}
		return strings.Join(all, ", "), len(all) == 1 && c.Seen.Quanta[0] == quantum
	}},
	{"queues with a slot while it runs", "100 %", fromSlots, func(c *Case) (string, bool) {
		if c.Seen == nil || c.Seen.Active+c.Seen.Idle == 0 {
			return "", false
		}
		return fmt.Sprintf("%.0f %%", 100*float64(c.Seen.Active)/float64(c.Seen.Active+c.Seen.Idle)), c.Seen.Idle == 0
	}},
}

// Figures returns the rows of the test plan for some cases.
func Figures(cases []Case) []Figure {
	var all []Figure
	for _, r := range rows {
		f := Figure{Name: r.name, Target: r.target, Result: Met}
		for i := range cases {
			value, met := r.value(&cases[i])
			switch {
			case value == "":
				value, f.Learn = string(Unknown), r.learn
				if f.Result == Met {
					f.Result = Unknown
				}
			case !met:
				f.Result, f.MissedBy = Missed, append(f.MissedBy, cases[i].Name)
			}
			f.Values = append(f.Values, value)
		}
		all = append(all, f)
	}
	return all
}

// Verdict says in a line how many targets were missed, by which cases, and how many figures are unknown.
func Verdict(figures []Figure, cases []Summary) string {
	var missed []string
	unknown := 0
	for _, f := range figures {
		if f.Result == Unknown {
			unknown++
		}
		for i := range cases {
			if slices.Contains(f.MissedBy, cases[i].Name) {
				missed = append(missed, fmt.Sprintf("case %s: %s %s, target %s", cases[i].Name, f.Name, f.Values[i], f.Target))
			}
		}
	}
	of := ""
	if unknown > 0 {
		of = fmt.Sprintf(", %d unknown", unknown)
	}
	n := 0
	for _, f := range figures {
		if f.Result == Missed {
			n++
		}
	}
	switch n {
	case 0:
		return "no target missed" + of
	case 1:
		return "1 target missed (" + strings.Join(missed, "; ") + ")" + of
	}
	return fmt.Sprintf("%d targets missed (%s)%s", n, strings.Join(missed, "; "), of)
}

// calls returns the sum of the calls of functions whose names begin with one of the prefixes, with the
// p99 of the slowest.
func calls(trace *kfdtrace.Report, prefixes ...string) (sum kfdtrace.Latency) {
	if trace == nil {
		return sum
	}
	for _, f := range trace.Functions {
		for _, prefix := range prefixes {
			if strings.HasPrefix(f.Name, prefix) {
				sum.Count += f.Count
				sum.P99 = max(sum.P99, f.P99)
				break
			}
		}
	}
	return sum
}

// Learning returns how to learn what is unknown, each way once with the names of its figures.
// An emulated machine has no driver that could be traced.
func Learning(figures []Figure, origin string) (lines []string) {
	names := map[string][]string{}
	var order []string
	for _, f := range figures {
		if f.Learn == "" {
			continue
		}
		learn := f.Learn
		if origin == "emulated" && (learn == fromTrace || learn == fromBoth) {
			learn = "capture on a host with the GPU, because an emulated machine has no driver to trace"
		}
		if names[learn] == nil {
			order = append(order, learn)
		}
		names[learn] = append(names[learn], f.Name)
	}
	for _, learn := range order {
		lines = append(lines, fmt.Sprintf("to learn %s: %s", strings.Join(names[learn], "; "), learn))
	}
	return lines
}

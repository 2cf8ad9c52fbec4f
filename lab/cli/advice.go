package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// How processes share queues and GPUs.
const (
	queuesShared   = "shared"   // both kinds of work are in one process
	queuesDisjoint = "disjoint" // processes with queues of their own on a common GPU
	queuesApart    = "apart"    // no common GPU
)

// advice is the result of queue advice.
type advice struct {
	Processes []advised `json:"processes"`
	// Queues is one of the constants above, and GPUs are those of at least two of the processes.
	Queues string   `json:"queues"`
	GPUs   []uint32 `json:"gpu_ids"`
	// Strategies are in the order of the recommendation.
	Strategies []strategy `json:"strategies"`
	Notes      []string   `json:"notes"`
	Simulated  string     `json:"simulated,omitempty"`
	names      term.GPUNames
}

// advised is a process with its queues.
type advised struct {
	TargetID   string   `json:"target_id"`
	PID        int32    `json:"pid"`
	Comm       string   `json:"comm"`
	Class      string   `json:"class"` // as in messages
	QueueCount int      `json:"queue_count"`
	GPUs       []uint32 `json:"gpu_ids"`
	// Priorities are the hardware priorities of its queues, where known.
	Priorities []uint32 `json:"hardware_priorities"`
}

// strategy is a way to give online work the GPU.
type strategy struct {
	Name    string `json:"name"`
	Text    string `json:"text"`
	Command string `json:"command,omitempty"`
}

func adviceCommand(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:   "advice PID...",
		Short: "Advise how online and offline work of processes should share a GPU",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return term.Usage(cmd, "missing argument: PID")
			}
			return nil
		},
		ValidArgsFunction: a.TargetNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			var keys []gpreempt.ProcessKey
			for _, arg := range args {
				key, err := gpreempt.ParseProcessKey(arg)
				if err != nil {
					return term.Usage(cmd, "%v", err)
				}
				keys = append(keys, key)
			}
			return a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
				found, err := advise(ctx, admin, keys)
				if err != nil {
					return err
				}
				return a.Show(found, func(p *term.Printer) { printAdvice(p, found) })
			})
		},
	}
}

// advise reads the processes and decides.
func advise(ctx context.Context, admin term.AdminClient, keys []gpreempt.ProcessKey) (*advice, error) {
	found := &advice{Processes: []advised{}, GPUs: []uint32{}, Notes: []string{}}
	users := map[uint32]int{} // processes on each GPU
	for _, key := range keys {
		target, err := term.OneTarget(ctx, admin, key, "")
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(found.Processes, func(p advised) bool { return p.TargetID == target.GetTargetId() }) {
			continue
		}
		list, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{TargetId: target.GetTargetId()})
		if err != nil {
			return nil, err
		}
		p := advised{
			TargetID: target.GetTargetId(), PID: target.GetPid(), Comm: target.GetComm(), Class: target.GetClass().String(),
			QueueCount: len(list.GetQueues()), Priorities: []uint32{},
		}
		on, priorities := map[uint32]bool{}, map[uint32]bool{}
		for _, q := range list.GetQueues() {
			on[q.GetGpuId()] = true
			if q.KfdPriority != nil {
				priorities[q.GetKfdPriority()] = true
			}
		}
		p.GPUs = slices.Sorted(maps.Keys(on))
		p.Priorities = slices.AppendSeq(p.Priorities, slices.Values(slices.Sorted(maps.Keys(priorities))))
		for id := range on {
			users[id]++
		}
		found.Processes = append(found.Processes, p)
	}
	st, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	nodes, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		return nil, err
	}
	found.Simulated, found.names = term.Simulated(st), nodes.GetGpus()
	for _, g := range nodes.GetGpus() {
		if users[g.GetGpuId()] > 1 {
			found.GPUs = append(found.GPUs, g.GetGpuId())
		}
		if users[g.GetGpuId()] > 0 && g.GetQueueSlots() > 0 && g.GetQueueCount() > g.GetQueueSlots() {
			found.Notes = append(found.Notes, fmt.Sprintf("GPU %d has %d queues for %d slots, so the firmware takes turns between them; suspended queues need no slot",
				g.GetGpuId(), g.GetQueueCount(), g.GetQueueSlots()))
		}
	}
	found.decide()
	return found, nil
}

// decide sets how the processes share queues, and the strategies. A KFD queue belongs to one
// process, so only work of the same process shares queues.
func (v *advice) decide() {
	switch {
	case len(v.Processes) == 1:
		v.Queues = queuesShared
		p := v.Processes[0]
		v.Strategies = []strategy{
			{Name: "two processes", Text: fmt.Sprintf("All work of a process shares its %s, and a process is suspended as a whole. "+
				"Run the offline work as a process of its own, then suspend that one.", term.Count(p.QueueCount, "queue"))},
			{Name: "explicit suspend", Text: "The design documents' choice for shared queues. It stops the online work of this process too."},
			{Name: "time slice", Text: "The program divides its offline work into short pieces and waits between them. gpreempt cannot do that from outside."},
		}
	case len(v.GPUs) == 0:
		v.Queues = queuesApart
		v.Strategies = []strategy{{Name: "none", Text: "No GPU has queues of two of the processes: they do not disturb each other on a GPU."}}
	default:
		v.Queues = queuesDisjoint
		v.Strategies = []strategy{v.suspend(), v.priority(), {
			Name: "time slice", Text: "The share floor: offline work runs at least this share of the time, even while online work is announced without a pause.",
			Command: "gpctl policy set --knob share_floor=0.2",
		}}
	}
}

// suspend is gpreempt's own strategy.
func (v *advice) suspend() strategy {
	s := strategy{Name: "explicit suspend", Text: "Recommended. Offline processes are suspended while online work is announced, in the middle of their kernels and whatever their streams. "}
	var offline []string
	for _, p := range v.Processes {
		if p.Class == gpreemptv1.Class_CLASS_OFFLINE.String() {
			offline = append(offline, strconv.Itoa(int(p.PID)))
		}
	}
	if len(offline) == 0 {
		s.Text += "None of these processes is offline yet."
		at := max(0, slices.IndexFunc(v.Processes, func(p advised) bool { return p.Class != gpreemptv1.Class_CLASS_ONLINE.String() }))
		s.Command = fmt.Sprintf("gpctl target classify %d offline", v.Processes[at].PID)
		return s
	}
	s.Text += fmt.Sprintf("Already offline: %s. The others have to announce their work.", strings.Join(offline, ", "))
	s.Command = "gpctl target explain " + offline[0]
	return s
}

// priority is the design documents' choice for disjoint queues.
func (v *advice) priority() strategy {
	different := map[uint32]bool{}
	for _, p := range v.Processes {
		for _, n := range p.Priorities {
			different[n] = true
		}
	}
	known := "No queue's hardware priority is known here."
	switch {
	case len(different) == 1:
		known = "All queues here have the same hardware priority."
	case len(different) > 1:
		known = "The queues here have different hardware priorities."
	}
	return strategy{
		Name: "stream priority", Text: "The design documents' choice for disjoint queues: priority -1 for online streams, 0 for offline ones. ROCm ignores it by default since July 2026 " +
			"(rocm-systems pull request 8485), unless DEBUG_HIP_IGNORE_STREAM_PRIORITY=false; and it orders work that waits, it stops no running kernel. " + known,
	}
}

func printAdvice(p *term.Printer, v *advice) {
	t := p.Table("", term.Columns{">PID", "COMMAND", "CLASS", ">QUEUES", "HIP", "GPU", "HWPRIO"})
	for _, process := range v.Processes {
		var priorities []string
		for _, n := range process.Priorities {
			priorities = append(priorities, strconv.FormatUint(uint64(n), 10))
		}
		t.Row(process.PID, process.Comm, api.EnumName(gpreemptv1.Class(gpreemptv1.Class_value[process.Class])), process.QueueCount, v.names.HIP(process.GPUs...), term.GPUs(process.GPUs, true), term.Or(strings.Join(priorities, ","), "-"))
	}
	t.Flush()
	where := ""
	if len(v.GPUs) > 0 {
		where = ", on a common GPU: " + term.GPUs(v.GPUs, true)
	}
	p.Linef("")
	p.Linef("queues  %s%s", v.Queues, where)
	for i, s := range v.Strategies {
		p.Line(fmt.Sprintf("%d. ", i+1), term.Cell{Text: s.Name, Style: term.StyleBold})
		for line := range strings.SplitSeq(wrap(s.Text, 90), "\n") {
			p.Linef("   %s", line)
		}
		if s.Command != "" {
			p.Linef("   try: %s", s.Command)
		}
	}
	for _, note := range v.Notes {
		p.Linef("note   %s", note)
	}
}

// wrap breaks a text at spaces into lines of at most n characters, where that is possible.
func wrap(s string, n int) string {
	var b strings.Builder
	width := 0
	for i, word := range strings.Fields(s) {
		switch {
		case i == 0:
		case width+1+len(word) > n:
			b.WriteByte('\n')
			width = 0
		default:
			b.WriteByte(' ')
			width++
		}
		b.WriteString(word)
		width += len(word)
	}
	return b.String()
}

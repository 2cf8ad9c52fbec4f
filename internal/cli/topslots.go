package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

// gpuTable writes at most n GPUs, those with an open breaker first if there are more.
func (s *topScreen) gpuTable(p *term.Printer, width, n int) {
	cells := 10
	if width >= 140 {
		cells = 30
	}
	order := make([]int, len(s.now.gpus))
	for i := range order {
		order[i] = i
	}
	if len(order) > n {
		open := func(i int) int { return map[bool]int{true: 0, false: 1}[s.now.gpus[i].GetBreakerOpen()] }
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(open(a), open(b)) })
		order = order[:n-1]
	}
	t := p.Table("", term.Columns{">HIP", "+>GPU", "-NAME", "QUEUES", "SUSPENDED:" + fmt.Sprint(cells+5), "->LEASES", "+>EVICTIONS", "BREAKER"})
	for _, i := range order {
		g := s.now.gpus[i]
		most := s.suspendedOn(g.GetGpuId())
		breaker := term.Cell{Text: "closed"}
		if g.GetBreakerOpen() {
			breaker = term.Cell{Text: "open for " + term.Took(g.GetBreakerClosesIn()), Style: term.StyleBad}
		}
		evictions := "-"
		if g.MemoryEvictions != nil {
			evictions = fmt.Sprint(g.GetMemoryEvictions())
		}
		t.Row(i, g.GetGpuId(), g.GetName(), s.busy(g, cells*2/3), term.Cell{Text: fmt.Sprintf("%s %3.0f%%", bar(most, cells), 100*most), Style: term.StyleNote},
			g.GetLeaseCount(), evictions, breaker)
	}
	t.Flush()
	if more := len(s.now.gpus) - len(order); more > 0 {
		p.Linef("     %s (gpctl gpu list)", term.NumberOf(more, "other GPU", "other GPUs"))
	}
}

// busy draws the hardware slots of a GPU in n cells: those for queues that may run, those whose
// queues are suspended, and free ones.
func (s *topScreen) busy(g *gpreemptv1.Gpu, n int) string {
	suspended := 0
	for _, q := range s.now.queues {
		if q.GetGpuId() == g.GetGpuId() && q.GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
			suspended++
		}
	}
	slots := max(1, g.GetQueueSlots(), g.GetQueueCount())
	cells := func(queues int) int { return (max(0, queues)*n + int(slots) - 1) / int(slots) }
	all := cells(int(g.GetQueueCount()))
	running := min(all, cells(int(g.GetQueueCount())-suspended))
	return strings.Repeat("█", running) + strings.Repeat("░", all-running) + strings.Repeat("·", n-all) + fmt.Sprintf(" %d/%d", g.GetQueueCount(), g.GetQueueSlots())
}

package cli

import (
	"fmt"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

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

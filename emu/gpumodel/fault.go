package gpumodel

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// FaultKind is what goes wrong.
type FaultKind uint8

// The kinds of fault.
const (
	// FaultSuspendError makes a Suspend on the GPU report a hardware error. As
	// with the driver, queues it was to take off stay marked as suspended.
	FaultSuspendError FaultKind = iota + 1
	// FaultResumeError makes a Resume on the GPU report a hardware error. As with
	// the driver, its queues run again all the same.
	FaultResumeError
	// FaultSuspendStuck makes a Suspend on the GPU take Delay longer, or an Unmap or a
	// RemoveQueue.
	FaultSuspendStuck
	// FaultLosePacket drops the oldest packet in flight of a queue that is being
	// restored: the rest of it is never executed.
	FaultLosePacket
	// FaultRepeatPacket makes that packet run twice.
	FaultRepeatPacket
)

// Fault is something that goes wrong once, the next time it can.
type Fault struct {
	Kind FaultKind
	GPU  gpreempt.GPUID
	// Delay is for FaultSuspendStuck.
	Delay time.Duration
}

// SetFault arms a fault. Several can be armed; each happens once.
func (m *Machine) SetFault(f Fault) error {
	g, err := m.gpu(f.GPU)
	if err != nil {
		return err
	}
	if f.Kind < FaultSuspendError || f.Kind > FaultRepeatPacket {
		return fmt.Errorf("there is no fault of kind %d", f.Kind)
	}
	if f.Kind == FaultSuspendStuck && f.Delay <= 0 {
		return fmt.Errorf("a stuck suspend needs a positive delay, not %v", f.Delay)
	}
	g.faults = append(g.faults, f)
	return nil
}

// strike takes the first armed fault of a kind.
func (g *gpu) strike(kind FaultKind) (Fault, bool) {
	i := slices.IndexFunc(g.faults, func(f Fault) bool { return f.Kind == kind })
	if i < 0 {
		return Fault{}, false
	}
	f := g.faults[i]
	g.faults = slices.Delete(g.faults, i, i+1)
	return f, true
}

// injectStuck returns the time a suspend takes longer.
func (g *gpu) injectStuck() time.Duration {
	if g.op.kind != opSuspend {
		return 0
	}
	f, _ := g.strike(FaultSuspendStuck)
	return f.Delay
}

// injectError makes the change under way fail from where it is.
func (g *gpu) injectError() bool {
	if g.op.request == nil {
		return false
	}
	kind := FaultSuspendError
	switch g.op.kind {
	case opSuspend:
	case opResume:
		kind = FaultResumeError
	case opRefresh, opTurn:
		return false
	}
	_, failed := g.strike(kind)
	if failed {
		g.op.fail(g.op.at)
	}
	return failed
}

// injectLoss spoils what q had in flight.
func (g *gpu) injectLoss(q *queue) {
	if len(q.inflight) == 0 {
		return
	}
	if _, repeat := g.strike(FaultRepeatPacket); repeat {
		q.inflight[0].again = true
	}
	if _, lose := g.strike(FaultLosePacket); lose {
		q.retire(q.inflight[0])
	}
}

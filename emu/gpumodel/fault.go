package gpumodel

import (
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// FaultKind is what goes wrong.
type FaultKind uint8

// The kinds of fault.
const (
	// FaultLosePacket drops the oldest packet in flight of a queue that is being
	// restored: the rest of it is never executed.
	FaultLosePacket FaultKind = iota + 1
	// FaultRepeatPacket makes that packet run twice.
	FaultRepeatPacket
)

// SetFault arms a fault of a GPU, which happens once, the next time it can: a test that
// counts packets shows by it that it would notice. Several can be armed.
func (m *Machine) SetFault(id gpreempt.GPUID, kind FaultKind) error {
	g, err := m.gpu(id)
	if err != nil {
		return err
	}
	if kind != FaultLosePacket && kind != FaultRepeatPacket {
		return fmt.Errorf("there is no fault of kind %d", kind)
	}
	g.faults[kind]++
	return nil
}

// strike takes an armed fault of a kind.
func (g *gpu) strike(kind FaultKind) bool {
	if g.faults[kind] == 0 {
		return false
	}
	g.faults[kind]--
	return true
}

// injectLoss has the armed faults happen to what q had in flight.
func (g *gpu) injectLoss(q *queue) {
	if len(q.inflight) == 0 {
		return
	}
	if g.strike(FaultRepeatPacket) {
		q.inflight[0].again = true
	}
	if g.strike(FaultLosePacket) {
		q.retire(q.inflight[0])
	}
}

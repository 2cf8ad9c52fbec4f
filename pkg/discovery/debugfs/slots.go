package debugfs

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// SlotState is whether a queue is mapped to a slot.
type SlotState uint8

// The states.
const (
	// Empty slots contain nothing.
	Empty SlotState = iota
	// Stale slots contain registers of a queue that was unmapped.
	Stale
	// Live slots have a queue.
	Live
)

// String returns the name in the output.
func (s SlotState) String() string { return gpreempt.Word(s, "state", "empty", "stale", "live") }

// Slot is a hardware queue, decoded.
type Slot struct {
	GPU gpreempt.GPUID
	// Node is the topology node number.
	Node int
	Kind SlotKind
	// XCC, MEC, Pipe and Queue are those of HQD: for SDMA Pipe is the engine and Queue
	// its queue.
	XCC, MEC, Pipe, Queue int
	State                 SlotState
	// Address is the byte address of the first register.
	Address uint32
	// Compute is decoded of CP slots and of the HIQ, SDMA of SDMA slots.
	Compute Compute
	SDMA    SDMA
}

// Slots decodes the slots of all nodes, in the order of the text. It omits slots with a
// number of registers that no GPU of gfx9 to gfx12 has; the parser has a warning for them.
func (d *HQDDump) Slots() []Slot {
	n := 0
	for i := range d.Nodes {
		n += len(d.Nodes[i].Slots)
	}
	slots := make([]Slot, 0, n)
	for i := range d.Nodes {
		node := &d.Nodes[i]
		for j := range node.Slots {
			h := &node.Slots[j]
			s := Slot{
				GPU: node.GPU, Node: node.Node, Kind: h.Kind, XCC: h.XCC, MEC: h.MEC, Pipe: h.Pipe, Queue: h.Queue,
				Address: h.Address,
			}
			if s.decode(h.Registers) {
				slots = append(slots, s)
			}
		}
	}
	return slots
}

func (s *Slot) decode(registers []uint32) bool {
	var err error
	if s.Kind == SlotSDMA {
		if sdmaRegisters(len(registers)) == SDMAUnknown {
			return false
		}
		s.SDMA, err = DecodeSDMA(registers, 0)
		s.State = s.SDMA.state()
	} else {
		if len(registers) != hqdRegisters {
			return false
		}
		s.Compute, err = DecodeCompute(registers)
		s.State = s.Compute.state()
	}
	return err == nil
}

// state depends on CP_HQD_ACTIVE: the other registers keep the values of the last queue.
func (c *Compute) state() SlotState {
	switch {
	case c.Active:
		return Live
	case c.MQD != 0 || c.RingBase != 0:
		return Stale
	}
	return Empty
}

// state distinguishes a queue from the registers of an unmapped one. To unmap a queue, the
// driver disables it, waits until it is idle, disables its doorbell, and enables it again
// (hqd_sdma_destroy of kfd2kgd; with firmware scheduling the result looks the same). So a
// slot is live if it is enabled and its doorbell is enabled or it has work.
func (s *SDMA) state() SlotState {
	switch {
	case s.Enabled && (s.DoorbellEnabled || !s.Idle || s.ReadPosition != s.WritePosition):
		return Live
	case s.Enabled || s.RingBase != 0:
		return Stale
	}
	return Empty
}

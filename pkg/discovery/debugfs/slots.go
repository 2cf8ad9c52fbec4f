package debugfs

import (
	"strconv"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// SlotState says whether there is a queue in a slot.
type SlotState uint8

// The states.
const (
	// Empty: nothing was left in it.
	Empty SlotState = iota
	// Stale: what is in it is left of a queue that is not there any more.
	Stale
	// Live: a queue is in it.
	Live
)

// String returns the word used in the output.
func (s SlotState) String() string {
	switch s {
	case Empty:
		return "empty"
	case Stale:
		return "stale"
	case Live:
		return "live"
	}
	return "state(" + strconv.Itoa(int(s)) + ")"
}

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

// Slots decodes the slots of all nodes, in the order of the text. A slot with a
// number of registers that no GPU of gfx9 to gfx12 has is left out: the parser
// gave a warning for it.
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

// state goes by CP_HQD_ACTIVE: the other registers keep what the last queue left.
func (c *Compute) state() SlotState {
	switch {
	case c.Active:
		return Live
	case c.MQD != 0 || c.RingBase != 0:
		return Stale
	}
	return Empty
}

// state tells a queue from what is left of one. A queue that leaves is disabled,
// waited for until it is idle, cut from its doorbell, and then enabled again
// (hqd_sdma_destroy of kfd2kgd; the firmware's leftovers look the same). So a slot
// is live when it is enabled and either listens to its doorbell or still has
// something to do.
func (s *SDMA) state() SlotState {
	switch {
	case s.Enabled && (s.DoorbellEnabled || !s.Idle || s.ReadPosition != s.WritePosition):
		return Live
	case s.Enabled || s.RingBase != 0:
		return Stale
	}
	return Empty
}

package debugfs

import (
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// SlotMatch is the owner of a slot.
type SlotMatch struct {
	// Owner is the index of the owner, -1 without one or when uncertain.
	Owner int
	// How describes the evidence, or why there is no owner.
	How string
}

// MatchSlots finds the queue of each live slot; result i is for slots[i]. slots come from
// one dump. owners are all known queues of the same GPUs, with the info of MatchQueues; a
// RingBytes of 0 is unknown.
//
// The address of an MQD identifies a queue: each queue has an MQD on each XCC. An owner has
// the address of the MQD on the first XCC. The driver allocates the MQDs of the other XCCs
// after it at equal distances, and their save areas as well (init_mqd_v9_4_3); the distance
// is not in the registers. So a slot of another XCC belongs to the queue whose slot on the
// first XCC has the same ring in the same address space (VMID), at a lower MQD address.
//
// SDMA queues, and queues from a snapshot only, have no address of an MQD. Then a slot
// belongs to the only owner with its ring, if the address space is known to belong to the
// owner's process, or if the rings of all queues are known: several processes can have rings
// at the same address. Pointers and save area must agree wherever both are known. The firmware may
// assign a VMID to another process while the registers are read; then the VMID proves
// nothing, and How reports it.
func MatchSlots(slots []Slot, owners []gpreempt.QueueEntry) []SlotMatch {
	m := slotMatcher{
		slots: slots, owners: owners, matches: make([]SlotMatch, len(slots)),
		mqds: map[gpuAddress][]int{}, rings: map[gpuAddress][]int{},
		unknown: map[gpreempt.GPUID][]uint64{}, first: map[firstSlot][]int{}, rank: map[gpuXCC]int{}, spaces: map[gpuVMID]*space{},
	}
	for i := range owners {
		o := &owners[i]
		if o.Info.MQD != 0 {
			k := gpuAddress{o.GPU, o.Info.MQD}
			m.mqds[k] = append(m.mqds[k], i)
		}
		if o.Info.RingBase != 0 {
			k := gpuAddress{o.GPU, o.Info.RingBase}
			m.rings[k] = append(m.rings[k], i)
		} else {
			m.unknown[o.GPU] = append(m.unknown[o.GPU], o.RingBytes)
		}
	}
	m.ranks()
	// Certain matches first: the others depend on them.
	m.each(m.idle)
	for _, i := range m.each(m.byAddress) {
		m.learn(i)
	}
	for _, i := range m.each(m.byFirst) {
		m.learn(i)
	}
	m.doubt(m.each(m.byRing))
	return m.matches
}

// each calls a step for the slots without an answer, and returns those with an owner
// afterwards.
func (m *slotMatcher) each(step func(i int)) (found []int) {
	for i := range m.slots {
		if m.matches[i].How != "" {
			continue
		}
		if step(i); m.matches[i].How != "" && m.matches[i].Owner >= 0 {
			found = append(found, i)
		}
	}
	return found
}

// doubt removes matches by the ring alone where they assign an address space to two
// processes.
func (m *slotMatcher) doubt(found []int) {
	for _, i := range found {
		m.learn(i)
	}
	for _, i := range found {
		f := m.facts(&m.slots[i])
		if m.spaces[f.gpuVMID].mixed {
			m.answer(i, -1, "its ring %#x is that of queue %s, but the slots of VMID %d are of more than one process", f.ring, m.name(m.matches[i].Owner), f.vmid)
		}
	}
}

type gpuAddress struct {
	gpu     gpreempt.GPUID
	address uint64
}

type gpuXCC struct {
	gpu gpreempt.GPUID
	xcc int
}

type gpuVMID struct {
	gpu  gpreempt.GPUID
	vmid int
}

// firstSlot are the common properties of the slots of a queue on several XCCs.
type firstSlot struct {
	gpuVMID
	ring uint64
}

// space is the process of an address space.
type space struct {
	process gpreempt.ProcessKey
	// mixed reports that slots of two processes had it.
	mixed bool
}

type slotMatcher struct {
	slots   []Slot
	owners  []gpreempt.QueueEntry
	matches []SlotMatch
	// mqds and rings are the owners by their addresses.
	mqds, rings map[gpuAddress][]int
	// unknown are the sizes of the rings with an unknown address.
	unknown map[gpreempt.GPUID][]uint64
	// first are the live slots with an owner on the first XCC of each GPU.
	first map[firstSlot][]int
	// rank counts the XCCs of a GPU in the order of the dump, from 0.
	rank   map[gpuXCC]int
	spaces map[gpuVMID]*space
}

func (m *slotMatcher) ranks() {
	count := map[gpreempt.GPUID]int{}
	for i := range m.slots {
		s := &m.slots[i]
		k := gpuXCC{s.GPU, s.XCC}
		if _, seen := m.rank[k]; seen || s.Kind == SlotSDMA {
			continue
		}
		m.rank[k] = count[s.GPU]
		count[s.GPU]++
	}
}

// learn stores what a match implies for the next slots.
func (m *slotMatcher) learn(i int) {
	s := &m.slots[i]
	f := m.facts(s)
	process := m.owners[m.matches[i].Owner].Process
	if sp := m.spaces[f.gpuVMID]; sp == nil {
		m.spaces[f.gpuVMID] = &space{process: process}
	} else if sp.process != process {
		sp.mixed = true
	}
	if s.Kind == SlotCP && f.rank == 0 {
		m.first[f.onFirst()] = append(m.first[f.onFirst()], i)
	}
}

// facts are the comparable properties of a slot.
type facts struct {
	gpuVMID
	traits
	mqd uint64
	// rank is that of the slot's XCC; 0 for SDMA.
	rank uint64
}

func (m *slotMatcher) facts(s *Slot) facts {
	if s.Kind == SlotSDMA {
		return facts{gpuVMID: gpuVMID{s.GPU, s.SDMA.VMID}, traits: traitsOfSDMA(&s.SDMA), mqd: s.SDMA.MQD}
	}
	c := &s.Compute
	f := facts{gpuVMID: gpuVMID{s.GPU, c.VMID}, traits: traitsOfCompute(c), mqd: c.MQD, rank: uint64(m.rank[gpuXCC{s.GPU, s.XCC}])}
	// The save areas of the XCCs are contiguous: the owner's is the first.
	if f.save != 0 {
		f.save -= f.rank * c.SaveBytes
	}
	return f
}

// onFirst returns what the queue's slot on the first XCC has in common.
func (f *facts) onFirst() firstSlot { return firstSlot{f.gpuVMID, f.ring} }

// mayBe reports whether a slot's MQD may be that of the queue with its first MQD at base:
// the same, or after it by rank times one distance, in pages.
func (f *facts) mayBe(base uint64) bool {
	if f.rank == 0 {
		return f.mqd == base
	}
	return f.mqd > base && (f.mqd-base)%(f.rank*4096) == 0
}

// contradicts describes the first difference between a slot and an owner, or returns "".
func (f *facts) contradicts(o *gpreempt.QueueEntry) string {
	return traitsOf(&o.Info, o.RingBytes).contradiction(f.traits)
}

func (m *slotMatcher) answer(i, owner int, format string, args ...any) {
	m.matches[i] = SlotMatch{Owner: owner, How: fmt.Sprintf(format, args...)}
}

// idle handles the slots without a queue of a process.
func (m *slotMatcher) idle(i int) {
	s := &m.slots[i]
	switch {
	case s.Kind == SlotHIQ:
		m.answer(i, -1, "the driver's own queue")
	case s.State == Empty:
		m.answer(i, -1, "empty")
	case s.State == Stale:
		m.answer(i, -1, "not active: the registers belong to a queue that was unmapped")
	}
}

// byAddress handles the slots whose MQD address an owner has.
func (m *slotMatcher) byAddress(i int) {
	f := m.facts(&m.slots[i])
	owners := m.mqds[gpuAddress{f.gpu, f.mqd}]
	switch len(owners) {
	case 0:
	case 1:
		o := owners[0]
		if c := f.contradicts(&m.owners[o]); c != "" {
			m.answer(i, -1, "its MQD %#x is that of queue %s, but it has %s: another queue may have replaced it", f.mqd, m.name(o), c)
			return
		}
		m.answer(i, o, "MQD %#x", f.mqd)
	default:
		m.answer(i, -1, "its MQD %#x is that of queues %s equally", f.mqd, m.ownerNames(owners))
	}
}

// byFirst handles the slots of further XCCs whose queue has a slot on the first.
func (m *slotMatcher) byFirst(i int) {
	f := m.facts(&m.slots[i])
	if f.rank == 0 {
		return
	}
	var fit []int
	at := 0
	for _, j := range m.first[f.onFirst()] {
		o := m.matches[j].Owner
		if f.mayBe(m.slots[j].Compute.MQD) && f.contradicts(&m.owners[o]) == "" && !slices.Contains(fit, o) {
			fit, at = append(fit, o), j
		}
	}
	switch len(fit) {
	case 0:
	case 1:
		m.answer(i, fit[0], "ring %#x in VMID %d, as in pipe %d queue %d of XCC %d",
			f.ring, f.vmid, m.slots[at].Pipe, m.slots[at].Queue, m.slots[at].XCC)
	default:
		m.answer(i, -1, "its ring %#x in VMID %d is that of queues %s equally", f.ring, f.vmid, m.ownerNames(fit))
	}
}

// byRing handles the others.
func (m *slotMatcher) byRing(i int) {
	f := m.facts(&m.slots[i])
	sp := m.spaces[f.gpuVMID]
	var fit []int
	why := ""
	for _, o := range m.rings[gpuAddress{f.gpu, f.ring}] {
		owner := &m.owners[o]
		switch c := f.contradicts(owner); {
		case c != "":
			why = fmt.Sprintf("queue %s has its ring %#x, but the slot has %s", m.name(o), f.ring, c)
		case owner.Info.MQD != 0 && f.mqd != 0 && !f.mayBe(owner.Info.MQD):
			why = fmt.Sprintf("queue %s has its ring %#x, but MQD %#x, to which %#x does not belong", m.name(o), f.ring, owner.Info.MQD, f.mqd)
		case sp != nil && !sp.mixed && sp.process != owner.Process:
			why = fmt.Sprintf("queue %s has its ring %#x, but VMID %d is that of process %d", m.name(o), f.ring, f.vmid, sp.process.PID)
		default:
			fit = append(fit, o)
		}
	}
	switch {
	case len(fit) == 1 && sp != nil && !sp.mixed:
		m.answer(i, fit[0], "ring %#x in VMID %d of its process", f.ring, f.vmid)
	case len(fit) == 1 && m.slots[i].Kind == SlotCP && m.owners[fit[0]].Info.MQD != 0:
		m.answer(i, -1, "its ring %#x is that of queue %s, but there is no evidence for its MQD %#x", f.ring, m.name(fit[0]), f.mqd)
	case len(fit) == 1 && m.mayBeUnknown(&f):
		m.answer(i, -1, "its ring %#x is that of queue %s, but the rings of some queues are unknown", f.ring, m.name(fit[0]))
	case len(fit) == 1:
		m.answer(i, fit[0], "ring %#x, which no other queue has", f.ring)
	case len(fit) > 1:
		m.answer(i, -1, "its ring %#x is that of queues %s equally", f.ring, m.ownerNames(fit))
	case why != "":
		m.answer(i, -1, "%s", why)
	default:
		m.answer(i, -1, "no known queue has its MQD %#x or ring %#x", f.mqd, f.ring)
	}
}

// mayBeUnknown reports whether a slot may be that of a queue with an unknown ring.
func (m *slotMatcher) mayBeUnknown(f *facts) bool {
	return slices.ContainsFunc(m.unknown[f.gpu], func(size uint64) bool { return size == 0 || f.ringBytes == 0 || size == f.ringBytes })
}

// name formats an owner.
func (m *slotMatcher) name(o int) string {
	return fmt.Sprintf("%d of process %d", m.owners[o].ID, m.owners[o].Process.PID)
}

func (m *slotMatcher) ownerNames(owners []int) string { return list(owners, m.name) }

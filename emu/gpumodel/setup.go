package gpumodel

import (
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// setup is where everything of a queue is. It never changes.
type setup struct {
	typ gpreempt.QueueType
	// pm4: it is a compute queue that is not of AQL.
	pm4  bool
	ring region
	// read and write are the addresses of the queue's two positions in its process.
	read, write uint64
	// eop is where end-of-pipe events are written; 0: nowhere.
	eop uint64
	// save is the save area of the first XCC, of saveBytes for each.
	save                  uint64
	saveBytes, stackBytes uint32
	// mqd is the GPU address of the first XCC's MQD, mqdStride how far it is to the next.
	mqd, mqdStride uint64
	// doorbell counts in dwords from the beginning of the GPU's doorbells, page is
	// where the process's begin.
	doorbell, page uint32
	// engine and rlc are what the driver gave an SDMA queue. The firmware runs it on
	// that engine, but in whatever slot of it is free.
	engine, rlc int
	// logicXCC is the number the first XCC has for the queue; queues take turns in it.
	logicXCC int
}

type region struct{ base, bytes uint64 }

// memory is an MQD: what the driver wrote, and what the firmware saved in it when it
// last took the queue off the GPU.
type memory struct {
	*setup
	priority gpreempt.Priority
	saved    place
}

// place is how far a queue was and in which VMID, when it was last seen in hardware.
type place struct {
	// known is false for a queue that has never been taken off.
	known bool
	vmid  uint8
	// read and write are in bytes, and do not wrap.
	read, write uint64
}

// Addresses in a process, unless a driver outside has others. All processes have the same, as the allocator of every
// process begins at the same place in forked ones: an address tells a queue of one
// process from another of its queues, and nothing else. A queue that is made again
// is where the old one was.
const (
	arenaBase  = 0x7f00_0000_0000
	arenaBytes = 1 << 30
	// arenaStep spreads the queues of a process, so that the order of addresses is
	// not the order of ids. It is odd, so that no two get the same arena.
	arenaStep = 389

	ringOffset  = 0x20_0000
	queueOffset = 0x0800_0000
	eopOffset   = 0x0801_0000
	saveOffset  = 0x1000_0000

	// amd_queue_t of ROCr has its positions at these offsets, struct queue of
	// libhsakmt those of SDMA queues.
	aqlWriteOffset, aqlReadOffset   = 0x38, 0x80
	sdmaWriteOffset, sdmaReadOffset = 0x08, 0x10
)

// Addresses of the driver's own, on the GPU. Every GPU has the same.
const (
	// kernelMQDs is where the MQDs of the HIQ begin; those of SDMA follow
	// (allocate_hiq_mqd, allocate_sdma_mqd).
	kernelMQDs = 0x6e_3000
	hiqRing    = 0xfc_c000
	// userMQDs is where the others are.
	userMQDs = 0x100_0000

	pageBytes       = 4096
	computeMQDBytes = 2048
)

// Doorbells: a process has a page of them on each GPU, eight bytes each; the first
// are the driver's own.
const (
	doorbellPageDwords = 2048
	firstDoorbellPage  = 2
	doorbellDwords     = 2
	// SDMA queues have theirs at fixed places: by engine, and the odd ones half a page
	// further on (allocate_doorbell).
	sdmaDoorbells, doorbellsPerEngine, oddDoorbells = 0x100, 10, 512
)

// ownSpec says where the queues of a process without a driver outside have everything,
// but for the doorbell.
func (m *Machine) ownSpec(id uint32, typ gpreempt.QueueType, ringPackets int) QueueSpec {
	arena := arenaBase + uint64(id)*arenaStep%maxQueues*arenaBytes
	spec := QueueSpec{
		ID: id, Type: typ, Ring: arena + ringOffset, RingBytes: uint64(ringPackets) * packetBytes, Priority: gpreempt.PriorityNormal,
		Read: arena + queueOffset + sdmaReadOffset, Write: arena + queueOffset + sdmaWriteOffset,
	}
	if typ != gpreempt.QueueCompute {
		return spec
	}
	spec.Read, spec.Write = arena+queueOffset+aqlReadOffset, arena+queueOffset+aqlWriteOffset
	if m.spec.major() >= 10 {
		spec.EOP = arena + eopOffset
	}
	size, _ := m.spec.saveArea()
	spec.Save, spec.SaveBytes = arena+saveOffset, uint32(size)
	return spec
}

// setUp finds a place for everything of q that spec has none for, and takes it.
func (q *queue) setUp(spec QueueSpec) {
	m, g := q.proc.m, q.gpu
	s := &setup{
		typ: q.typ, ring: region{spec.Ring, spec.RingBytes}, read: spec.Read, write: spec.Write,
		page: uint32(take(&g.pages, q.proc)+firstDoorbellPage) * doorbellPageDwords,
	}
	s.doorbell = s.page + spec.Doorbell/4
	q.memory = &memory{setup: s, priority: spec.Priority}
	if q.typ != gpreempt.QueueCompute {
		q.setUpSDMA(s)
		return
	}
	s.pm4, s.eop = spec.PM4, spec.EOP
	_, stack := m.spec.saveArea()
	if spec.Save != 0 {
		s.save, s.saveBytes, s.stackBytes = spec.Save, spec.SaveBytes, uint32(stack)
	}
	switch {
	case m.spec.MES:
		s.mqdStride = pageBytes
	case m.spec.major() == 9:
		// The control stack stands behind the MQD (mqd_stride_v9).
		s.mqdStride = pageBytes + uint64(stack)
	default:
		s.mqdStride = computeMQDBytes
	}
	s.mqd = userMQDs + uint64(occupy(&g.mqds, q))*s.mqdStride*uint64(m.spec.XCCs)
	s.logicXCC = g.computeBirths % m.spec.XCCs
	g.computeBirths++
}

// setUpSDMA returns q its engine and what goes with that (allocate_sdma_queue).
func (q *queue) setUpSDMA(s *setup) {
	spec, g := &q.proc.m.spec, q.gpu
	engines, queues := spec.SDMAEngines, &g.sdmaQueues
	if q.typ == gpreempt.QueueSDMAXGMI {
		engines, s.engine, queues = spec.XGMIEngines, spec.SDMAEngines, &g.xgmiQueues
	}
	id := occupy(queues, q)
	s.engine += id % engines
	s.rlc = id / engines
	if spec.MES {
		s.mqdStride = pageBytes
		s.mqd = userMQDs + uint64(occupy(&g.mqds, q))*s.mqdStride*uint64(spec.XCCs)
		return
	}
	at := s.engine*spec.SDMAQueuesPerEngine + s.rlc
	s.mqdStride = uint64(spec.sdma().words) * 4
	s.mqd = kernelMQDs + uint64(spec.XCCs)*computeMQDBytes + uint64(at)*s.mqdStride
	g.sdmaMemory[at] = q.memory
}

// ownDoorbell is where q has its doorbell in its process's page, in dwords, when there is
// no driver outside.
func (q *queue) ownDoorbell() uint32 {
	if q.typ == gpreempt.QueueCompute {
		return uint32(q.freeDoorbell()) * doorbellDwords
	}
	s := q.memory
	return uint32(sdmaDoorbells+s.engine*doorbellsPerEngine+s.rlc%2*oddDoorbells+s.rlc/2) * doorbellDwords
}

// freeDoorbell returns the lowest that no compute queue of the process has on the GPU.
func (q *queue) freeDoorbell() int {
	var taken [maxQueuesPerGPU + 1]bool
	for _, o := range q.proc.queues {
		if o.gpu == q.gpu && o.typ == gpreempt.QueueCompute {
			taken[(o.memory.doorbell-o.memory.page)/doorbellDwords] = true
		}
	}
	return slices.Index(taken[:], false)
}

// tearDown returns back what setUp took, except what the GPU still remembers.
func (q *queue) tearDown() {
	for _, all := range []*[]*queue{&q.gpu.mqds, &q.gpu.sdmaQueues, &q.gpu.xgmiQueues} {
		if i := slices.Index(*all, q); i >= 0 {
			(*all)[i] = nil
		}
	}
}

// occupy puts v at the lowest free index and gives that.
func occupy[T comparable](all *[]T, v T) int {
	var free T
	i := slices.Index(*all, free)
	if i < 0 {
		i = len(*all)
		*all = append(*all, free)
	}
	(*all)[i] = v
	return i
}

// take returns the index of v, which gets one if it has none.
func take[T comparable](all *[]T, v T) int {
	if i := slices.Index(*all, v); i >= 0 {
		return i
	}
	return occupy(all, v)
}

// SetQueuePriority changes a queue's priority, 0 to MaxPriority, as UPDATE_QUEUE
// does: it is in the MQD at once, and in hardware after the GPU's schedule has been
// gone through once more, which a driver outside has to do itself. It does not change
// who runs.
func (m *Machine) SetQueuePriority(key gpreempt.ProcessKey, id uint32, priority gpreempt.Priority) error {
	q, err := m.queue(key, id)
	if err != nil {
		return err
	}
	if priority > gpreempt.MaxPriority {
		return fmt.Errorf("queue %d of %v: a priority is 0 to %d, not %d", id, key, gpreempt.MaxPriority, priority)
	}
	q.memory.priority = priority
	m.moves++
	if q.suspended || m.rule == ruleDriver {
		return nil
	}
	o := &op{kind: opRefresh, proc: q.proc}
	if m.spec.MES {
		q.unmap()
		q.pool.schedule()
		q.gpu.note()
		o.queues = []*queue{q}
	}
	q.gpu.enqueue(o)
	m.callBack()
	return nil
}

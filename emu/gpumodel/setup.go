package gpumodel

import (
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
)

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
	if spec.Save != 0 {
		s.save, s.saveBytes, s.stackBytes = spec.Save, spec.SaveBytes, m.spec.saveArea().Stack
	}
	switch {
	case m.spec.MES:
		s.mqdStride = pageBytes
	case m.spec.major() == 9:
		// The control stack stands behind the MQD (mqd_stride_v9).
		s.mqdStride = pageBytes + uint64(m.spec.saveArea().Stack)
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

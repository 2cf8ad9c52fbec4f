package gpumodel

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Lab is a machine with a simple driver, for tests: it makes queues that run at once, and
// suspends and resumes processes, one GPU and one change at a time.
type Lab struct {
	*Machine
	// run are the queues that are to run.
	run map[QueueRef]bool
	// changes are those of each GPU that wait; the first is under way.
	changes [][]func(end func())
}

// NewLab returns a machine without processes.
func NewLab(spec Spec, gpus int, seed uint64) *Lab {
	return &Lab{Machine: New(spec, gpus, seed), run: map[QueueRef]bool{}, changes: make([][]func(func()), gpus)}
}

// change has f change the schedule of a GPU once the changes before it have ended.
func (l *Lab) change(gpu int, f func(end func())) {
	l.changes[gpu] = append(l.changes[gpu], f)
	if len(l.changes[gpu]) == 1 {
		l.next(gpu)
	}
}

func (l *Lab) next(gpu int) {
	l.changes[gpu][0](func() {
		l.changes[gpu] = l.changes[gpu][1:]
		if len(l.changes[gpu]) > 0 {
			l.next(gpu)
		}
	})
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// cycle is a runlist cycle in which prepare decides what is to run.
func (l *Lab) cycle(gpu int, prepare, done func()) {
	l.change(gpu, func(end func()) {
		id := l.facts[gpu].ID
		must(l.Unmap(id, 0, func() {
			prepare()
			var runlist []QueueRef
			for _, q := range l.gpus[gpu].queues {
				if ref := (QueueRef{q.proc.key, q.id}); l.run[ref] {
					runlist = append(runlist, ref)
				}
			}
			must(l.Map(id, runlist, func() { done(); end() }))
		}))
	})
}

// oneByOne adds or removes queues, those that are gone left out.
func (l *Lab) oneByOne(refs []QueueRef, run bool, done func()) {
	for len(refs) > 0 {
		ref := refs[0]
		refs = refs[1:]
		if _, err := l.queue(ref.Process, ref.ID); err != nil {
			continue
		}
		l.run[ref] = run
		step := l.RemoveQueue
		if run {
			step = l.AddQueue
		}
		must(step(ref, func() { l.oneByOne(refs, run, done) }))
		return
	}
	done()
}

// CreateQueue makes a queue with the lowest free id, which runs at once.
func (l *Lab) CreateQueue(key gpreempt.ProcessKey, gpu gpreempt.GPUID, typ gpreempt.QueueType, ringPackets int) (uint32, error) {
	p, err := l.process(key)
	if err != nil {
		return 0, err
	}
	id := uint32(0)
	for _, q := range p.queues {
		if q.id != id {
			break
		}
		id++
	}
	spec := l.queueSpec(id, gpu, typ, ringPackets)
	spec.Doorbell = l.doorbell(key, spec)
	if err := l.AttachQueue(key, spec); err != nil {
		return 0, err
	}
	ref, index := QueueRef{key, id}, l.index(gpu)
	l.run[ref] = true
	if l.spec.MES {
		l.change(index, func(end func()) { l.oneByOne([]QueueRef{ref}, true, end) })
	} else {
		l.cycle(index, func() {}, func() {})
	}
	return id, nil
}

// DestroyQueue takes a queue away.
func (l *Lab) DestroyQueue(key gpreempt.ProcessKey, id uint32) error {
	q, err := l.queue(key, id)
	if err != nil {
		return err
	}
	must(l.DetachQueue(key, id))
	delete(l.run, QueueRef{key, id})
	if !l.spec.MES {
		l.cycle(q.gpu.index, func() {}, func() {})
	}
	return nil
}

// EndProcess ends a process.
func (l *Lab) EndProcess(key gpreempt.ProcessKey) error {
	p, err := l.process(key)
	if err != nil {
		return err
	}
	var gpus []int
	for _, q := range p.queues {
		delete(l.run, QueueRef{key, q.id})
		if !slices.Contains(gpus, q.gpu.index) {
			gpus = append(gpus, q.gpu.index)
		}
	}
	must(l.Machine.EndProcess(key))
	if !l.spec.MES {
		for _, gpu := range gpus {
			l.cycle(gpu, func() {}, func() {})
		}
	}
	return nil
}

// Suspend takes queues of a process off their GPUs, all of them when ids is nil, and calls
// done when the last GPU has changed.
func (l *Lab) Suspend(key gpreempt.ProcessKey, ids []uint32, done func()) {
	l.control(key, ids, false, 0, done)
}

// Resume puts queues back.
func (l *Lab) Resume(key gpreempt.ProcessKey, ids []uint32, done func()) {
	l.control(key, ids, true, 0, done)
}

func (l *Lab) control(key gpreempt.ProcessKey, ids []uint32, run bool, gpu int, done func()) {
	for ; gpu < len(l.gpus); gpu++ {
		var refs []QueueRef
		if p := l.byKey[key]; p != nil {
			for _, q := range p.queues {
				if q.gpu.index == gpu && (ids == nil || slices.Contains(ids, q.id)) {
					refs = append(refs, QueueRef{key, q.id})
				}
			}
		}
		if len(refs) == 0 {
			continue
		}
		next := func() { l.control(key, ids, run, gpu+1, done) }
		if l.spec.MES {
			l.change(gpu, func(end func()) { l.oneByOne(refs, run, func() { next(); end() }) })
			return
		}
		l.cycle(gpu, func() {
			for _, ref := range refs {
				if _, err := l.queue(ref.Process, ref.ID); err == nil {
					l.run[ref] = run
				}
			}
		}, next)
		return
	}
	if done != nil {
		done()
	}
}

// QueueIndexes is how far a queue is.
type QueueIndexes struct {
	ID uint32
	// Read and Write count packets since the queue was made.
	Read, Write uint64
}

// Indexes returns how far the queues of a process are, by id.
func (m *Machine) Indexes(key gpreempt.ProcessKey) (all []QueueIndexes) {
	p, err := m.process(key)
	must(err)
	for _, q := range p.queues {
		all = append(all, QueueIndexes{ID: q.id, Read: q.read, Write: q.write})
	}
	return all
}

func (m *Machine) index(gpu gpreempt.GPUID) int {
	return slices.IndexFunc(m.facts, func(g gpreempt.GPU) bool { return g.ID == gpu })
}

// Addresses in a process. All processes have the same, as the allocator of every process
// begins at the same place in forked ones: an address distinguishes the queues of one
// process, and nothing else. A queue that is made again is where the old one was.
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

	doorbellDwords = 2
	// SDMA queues have their doorbells at fixed places: by engine, and the odd ones half a
	// page further on (allocate_doorbell).
	sdmaDoorbells, doorbellsPerEngine, oddDoorbells = 0x100, 10, 512
)

// queueSpec returns where a queue has everything except its doorbell.
func (m *Machine) queueSpec(id uint32, gpu gpreempt.GPUID, typ gpreempt.QueueType, ringPackets int) QueueSpec {
	arena := arenaBase + uint64(id)*arenaStep%maxQueues*arenaBytes
	spec := QueueSpec{
		ID: id, GPU: gpu, Type: typ, Ring: arena + ringOffset, RingBytes: uint64(ringPackets) * packetBytes, Priority: gpreempt.PriorityNormal,
		Read: arena + queueOffset + sdmaReadOffset, Write: arena + queueOffset + sdmaWriteOffset,
	}
	if typ != gpreempt.QueueCompute {
		return spec
	}
	spec.Read, spec.Write = arena+queueOffset+aqlReadOffset, arena+queueOffset+aqlWriteOffset
	if m.spec.major() >= 10 {
		spec.EOP = arena + eopOffset
	}
	spec.Save, spec.SaveBytes = arena+saveOffset, m.spec.saveArea().Bytes
	return spec
}

// doorbell returns where the driver puts the doorbell of a queue in its process's page, in
// bytes: for compute queues the lowest free one.
func (m *Machine) doorbell(key gpreempt.ProcessKey, spec QueueSpec) uint32 {
	g := m.gpus[m.index(spec.GPU)]
	if spec.Type == gpreempt.QueueCompute {
		var taken [maxQueuesPerGPU + 1]bool
		for _, o := range m.byKey[key].queues {
			if o.gpu == g && o.typ == gpreempt.QueueCompute {
				taken[(o.memory.doorbell-o.memory.page)/doorbellDwords] = true
			}
		}
		return uint32(slices.Index(taken[:], false)) * doorbellDwords * 4
	}
	engines, first, queues := m.spec.SDMAEngines, 0, g.sdmaQueues
	if spec.Type == gpreempt.QueueSDMAXGMI {
		engines, first, queues = m.spec.XGMIEngines, m.spec.SDMAEngines, g.xgmiQueues
	}
	id := slices.Index(queues, nil)
	if id < 0 {
		id = len(queues)
	}
	engine, rlc := first+id%max(engines, 1), id/max(engines, 1)
	return uint32(sdmaDoorbells+engine*doorbellsPerEngine+rlc%2*oddDoorbells+rlc/2) * doorbellDwords * 4
}

// zeroCost returns spec with firmware that takes no time.
func zeroCost(spec Spec) Spec {
	spec.Costs = Costs{}
	return spec
}

// resumeTime is the counterpart of SuspendTime.
func (s Spec) resumeTime(gpus, queues int, occupancy float64) time.Duration {
	s.Costs.RemoveQueue, s.Costs.Save = s.Costs.AddQueue, s.Costs.Restore
	return s.SuspendTime(gpus, queues, occupancy)
}

package gpumodel

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// debugfsDir is sys/kernel/debug/kfd. What its files show is copied while the machine
// is locked, and made into text afterwards, which takes much longer. A program of the model
// has a VM on every GPU; proc, which shows that, is in the driver of Linux 7.2 only
// (kfd_debugfs_add_process).
func (m *Machine) debugfsDir() *node {
	return dir(map[string]*node{
		"mqds": {show: func() func() []byte { return m.viewMQDs().text }},
		"hqds": {show: func() func() []byte { return m.viewHQDs().text }},
		"proc": m.byPID(func(p *process) *node {
			vms := map[string]*node{}
			for i, g := range m.facts {
				vms[fmt.Sprintf("pasid_%d", g.ID)] = file(fmt.Sprintf("%d\n", p.pasid()+uint32(i)))
			}
			return dir(vms)
		}),
	})
}

func (m *Machine) dialect() dialect {
	return dialect{kernel: m.kernel, spec: &m.spec, major: m.spec.major(), sdma: m.spec.sdma()}
}

// viewMQDs is what mqds is made of.
type viewMQDs struct {
	dialect
	gpus  []gpreempt.GPUID
	procs []procView
	// sdmaMemory are the MQDs of SDMA queues as they stand in memory, GPU by GPU: those
	// of queues that are gone, too.
	sdmaMemory [][]memory
}

type procView struct {
	pid    int32
	pasid  uint32
	queues []queueView
}

// queueView is a queue's MQD. at is its index among those of the GPU's SDMA queues, or
// -1 for one that stands alone.
type queueView struct {
	memory
	gpu int
	at  int
}

func (m *Machine) viewMQDs() *viewMQDs {
	v := &viewMQDs{dialect: m.dialect()}
	for i, g := range m.gpus {
		v.gpus = append(v.gpus, m.facts[i].ID)
		// Only where a queue has several dumps does any show what stands behind its MQD.
		if v.kernel.xccs(v.spec) == 1 || v.spec.MES {
			v.sdmaMemory = append(v.sdmaMemory, nil)
			continue
		}
		all := make([]memory, len(g.sdmaMemory))
		for at, mqd := range g.sdmaMemory {
			if mqd != nil {
				all[at] = *mqd
			}
		}
		v.sdmaMemory = append(v.sdmaMemory, all)
	}
	for _, p := range m.hashed() {
		v.procs = append(v.procs, p.view())
	}
	return v
}

func (p *process) view() procView {
	v := procView{pid: p.key.PID, pasid: p.pasid()}
	for _, q := range p.newestFirst() {
		at := -1
		if q.typ != gpreempt.QueueCompute && !p.m.spec.MES {
			at = q.memory.engine*p.m.spec.SDMAQueuesPerEngine + q.memory.rlc
		}
		v.queues = append(v.queues, queueView{*q.memory, q.gpu.index, at})
	}
	return v
}

// text is mqds (kfd_debugfs_mqds_by_process, pqm_debugfs_mqds).
func (v *viewMQDs) text() []byte {
	b := make([]byte, 0, v.size())
	for i := range v.procs {
		p := &v.procs[i]
		b = v.kernel.processLine(b, p.pid, p.pasid)
		// How many dumps a queue gets is set by compute queues alone.
		dumps := 1
		for j := range p.queues {
			q := &p.queues[j]
			if q.typ == gpreempt.QueueCompute {
				dumps = v.kernel.xccs(v.spec)
				b = fmt.Appendf(b, "  Compute queue on device %x\n", uint32(v.gpus[q.gpu]))
				for xcc := range dumps {
					var words [computeMQDWords]uint32
					v.computeMQD(words[:], &q.memory, xcc)
					b = appendDump(b, "    ", words[:])
				}
				continue
			}
			b = fmt.Appendf(b, "  SDMA queue on device %x\n", uint32(v.gpus[q.gpu]))
			for n := range dumps {
				b = v.appendSDMA(b, q, n)
			}
		}
	}
	return b
}

// size is at least how long the text is.
func (v *viewMQDs) size() int {
	n := 0
	for i := range v.procs {
		n += lineBytes + len(v.procs[i].queues)*(lineBytes+v.kernel.xccs(v.spec)*dumpBytes(computeMQDWords))
	}
	return n
}

// appendSDMA dumps what stands n MQDs behind that of an SDMA queue.
func (v *viewMQDs) appendSDMA(b []byte, q *queueView, n int) []byte {
	var room [maxSDMAWords]uint32
	words := room[:v.sdma.words]
	switch all := v.sdmaMemory[q.gpu]; {
	case n == 0:
		v.sdmaMQD(words, &q.memory)
	case q.at >= 0 && q.at+n < len(all) && all[q.at+n].setup != nil:
		v.sdmaMQD(words, &all[q.at+n])
	}
	return appendDump(b, "    ", words)
}

// viewHQDs is what hqds is made of.
type viewHQDs struct {
	dialect
	nodes []nodeView
}

type nodeView struct {
	gpreempt.GPU
	cycles        uint64
	compute, sdma []slot
}

func (m *Machine) viewHQDs() *viewHQDs {
	v := &viewHQDs{dialect: m.dialect()}
	for i, g := range m.gpus {
		v.nodes = append(v.nodes, nodeView{m.facts[i], g.cycles, viewSlots(g.slots), viewSlots(g.sdma)})
	}
	return v
}

// viewSlots returns the slots as they are now.
func viewSlots(slots []slot) []slot {
	views := slices.Clone(slots)
	for i := range views {
		if q := views[i].q; q != nil {
			views[i].at = q.now()
		}
	}
	return views
}

// text is hqds (kfd_debugfs_hqds_by_device, dqm_debugfs_hqds).
func (v *viewHQDs) text() []byte {
	b := make([]byte, 0, v.size())
	for i := range v.nodes {
		n := &v.nodes[i]
		b = appendNode(b, &n.GPU)
		for xcc := range v.kernel.xccs(v.spec) {
			b = v.appendXCC(b, n, xcc)
		}
		for at := range n.sdma {
			engine, rlc := at/v.spec.SDMAQueuesPerEngine, at%v.spec.SDMAQueuesPerEngine
			b = fmt.Appendf(b, "  SDMA Engine %d, RLC %d\n", engine, rlc)
			var words [maxSDMAWords]uint32
			v.sdmaRegisters(words[:], &n.sdma[at])
			b = appendRegisters(b, v.sdma.base(engine)+uint32(rlc)*sdmaStride, v.sdma.stretches, words[:])
		}
	}
	return b
}

// size is at least how long the text is.
func (v *viewHQDs) size() int {
	n := 0
	for i := range v.nodes {
		slots := v.kernel.xccs(v.spec)*(1+len(v.nodes[i].compute)) + len(v.nodes[i].sdma)
		n += 2*lineBytes + slots*(lineBytes+dumpBytes(registersOfQueue))
	}
	return n
}

// appendNode begins a GPU.
func appendNode(b []byte, g *gpreempt.GPU) []byte {
	return fmt.Appendf(b, "Node %d, gpu_id %x:\n", g.Node, uint32(g.ID))
}

// appendXCC dumps the HIQ and every slot of an XCC, free or not.
func (v *viewHQDs) appendXCC(b []byte, n *nodeView, xcc int) []byte {
	pipes := v.spec.pipes()
	base := v.registerAddress(xcc)
	all := []stretch{{0, registersOfQueue}}

	var regs [registersOfQueue]uint32
	v.hiqRegisters(regs[:], n.cycles, xcc)
	b = v.kernel.hiqLine(b, xcc, pipes)
	b = appendRegisters(b, base, all, regs[:])
	for pipe := range pipes {
		for at := pipe; at < len(n.compute); at += pipes {
			clear(regs[:])
			v.slotRegisters(regs[:], &n.compute[at], xcc)
			b = v.kernel.slotLine(b, xcc, pipe, firstQueue+at/pipes)
			b = appendRegisters(b, base, all, regs[:])
		}
	}
	return b
}

// buckets is the size of the driver's table of processes.
const buckets = 32

// bucket is the process's place in that table, which is as good as random.
func (p *process) bucket() int { return int(p.birth * 0x9e37_79b9_7f4a_7c15 >> 32 % buckets) }

// pasid is the process's PASID.
func (p *process) pasid() uint32 { return uint32(0x8000 + p.birth%0x8000) }

// hashed returns the living in the order of the driver's table: by bucket, then the
// newest first.
func (m *Machine) hashed() []*process {
	return slices.SortedFunc(slices.Values(m.procs), func(a, b *process) int {
		return cmp.Or(cmp.Compare(a.bucket(), b.bucket()), cmp.Compare(b.birth, a.birth))
	})
}

// newestFirst returns the queues in the order the driver lists them.
func (p *process) newestFirst() []*queue {
	return slices.SortedFunc(slices.Values(p.queues), func(a, b *queue) int { return cmp.Compare(b.birth, a.birth) })
}

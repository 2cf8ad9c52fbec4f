package gpumodel

import (
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// listed is an entry of a GPU's runlist: a process with how many queues it has there,
// or one of its queues.
type listed struct {
	proc   *process
	queues int
	queue  *setup
}

// makeRunlist makes the runlist the driver hands to the firmware anew: every process of the
// GPU with its queues that are to run, the newest first (pm_create_runlist_ib). There is
// none when nothing is to run. Sets of queues taking turns is the firmware's affair.
func (g *gpu) makeRunlist() {
	g.m.moves++
	clear(g.runlist)
	g.runlist = g.runlist[:0]
	process := 0
	active := false
	for i, q := range slices.Backward(g.queues) {
		if i == len(g.queues)-1 || g.queues[i+1].proc != q.proc {
			process = len(g.runlist)
			g.runlist = append(g.runlist, listed{proc: q.proc})
		}
		g.runlist[process].queues++
		if !q.suspended {
			g.runlist = append(g.runlist, listed{queue: q.memory.setup})
			active = true
		}
	}
	if !active {
		g.runlist = g.runlist[:0]
	}
}

// viewRunlists is what rls is made of.
type viewRunlists struct {
	dialect
	nodes []runlistView
}

type runlistView struct {
	gpreempt.GPU
	entries []runlistEntry
}

// runlistEntry is a process, when queue is nil, or a queue.
type runlistEntry struct {
	pasid  uint32
	table  uint64
	queues int
	queue  *setup
}

func (m *Machine) viewRunlists() *viewRunlists {
	v := &viewRunlists{dialect: m.dialect()}
	for i, g := range m.gpus {
		n := runlistView{GPU: m.facts[i]}
		for _, l := range g.runlist {
			e := runlistEntry{queues: l.queues, queue: l.queue}
			if l.proc != nil {
				e.pasid, e.table = l.proc.pasid(), pageTables+l.proc.birth*pageBytes
			}
			n.entries = append(n.entries, e)
		}
		v.nodes = append(v.nodes, n)
	}
	return v
}

// Packets of a runlist (kfd_pm4_headers_ai.h, kfd_pm4_headers_aldebaran.h): their
// codes, their lengths in dwords and what is the same in all.
const (
	mapProcess, mapQueues, runList = 0xa1, 0xa2, 0xa5

	mapProcessWords, mapProcessWordsAldebaran = 16, 21
	firstAldebaran                            = 90010 // gfx90a
	mapQueuesWords, runListWords              = 7, 4

	processQuantum = 10 << 25
	memoryBases    = 1<<16 | 2
	sdmaEnable     = 1 << 7
	mapOneQueue    = 1<<29 | 1<<4
	engineSelSDMA0 = 2
	runlistIsValid = 1 << 23
	runlistIsChain = 1<<22 | 1<<20
	pageTables     = 0x40_0000_0000
	runlistAddress = 0xfe_0000
	queuesShift    = 22
	processesShift = 24
	engineSelShift = 26
	extendedShift  = 2
)

// text is rls (kfd_debugfs_rls_by_device, pm_debugfs_runlist).
func (v *viewRunlists) text() []byte {
	var b []byte
	for i := range v.nodes {
		n := &v.nodes[i]
		b = appendNode(b, &n.GPU)
		if len(n.entries) == 0 {
			b = append(b, "  No active runlist\n"...)
			continue
		}
		b = appendDump(b, "  ", v.packets(n.entries))
	}
	return b
}

// packets is a runlist as the firmware gets it.
func (v *viewRunlists) packets(entries []runlistEntry) []uint32 {
	var all []uint32
	add := func(code uint32, words int) []uint32 {
		all = append(all, make([]uint32, words)...)
		packet := all[len(all)-words:]
		packet[0] = 3<<30 | uint32(words-2)<<16 | code<<8
		return packet
	}
	processes, compute := 0, 0
	for _, e := range entries {
		if e.queue != nil {
			if e.queue.typ == gpreempt.QueueCompute {
				compute++
			}
			v.mapQueue(add(mapQueues, mapQueuesWords), e.queue)
			continue
		}
		processes++
		words := mapProcessWords
		if v.major == 9 && v.spec.GFX >= firstAldebaran {
			words = mapProcessWordsAldebaran
		}
		p := add(mapProcess, words)
		p[1] = processQuantum | e.pasid&0xffff
		put(p, 2, e.table)
		p[4] = memoryBases
		p[13] = uint32(e.queues)<<queuesShift | sdmaEnable
	}
	// What does not fit at once is gone through again and again.
	if processes > v.spec.VMIDs || compute > v.spec.Slots {
		p := add(runList, runListWords)
		put(p, 1, runlistAddress)
		p[3] = uint32(len(all)) | runlistIsChain | runlistIsValid | uint32(min(processes, v.spec.VMIDs)&0xf)<<processesShift
	}
	return all
}

// mapQueue is pm_map_queues_v9.
func (v *viewRunlists) mapQueue(p []uint32, s *setup) {
	p[1] = mapOneQueue
	if s.typ != gpreempt.QueueCompute {
		if s.engine < 2 && v.major == 9 {
			p[1] |= uint32(engineSelSDMA0+s.engine) << engineSelShift
		} else {
			p[1] |= uint32(s.engine/8+1)<<extendedShift | uint32(s.engine%8)<<engineSelShift
		}
	}
	p[2] = s.doorbell << 2
	put(p, 3, s.mqd)
	put(p, 5, s.write)
}

package debugfs_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// owner is the queue of a process as returned by MatchQueues.
func (q queue) owner(pid int32, id uint32) gpreempt.QueueEntry {
	return gpreempt.QueueEntry{Queue: gpreempt.Queue{Process: gpreempt.ProcessKey{PID: pid, Start: 1}, ID: id, GPU: gpu}, Info: q.info()}
}

func (d dma) owner(pid int32, id uint32) gpreempt.QueueEntry {
	return gpreempt.QueueEntry{Queue: gpreempt.Queue{Process: gpreempt.ProcessKey{PID: pid, Start: 1}, ID: id, GPU: gpu}, Info: d.info()}
}

// slots renders slots and parses them.
type slots struct {
	text
	t *testing.T
}

func newSlots(t *testing.T) *slots {
	t.Helper()
	s := &slots{t: t}
	s.linef("Node 2, gpu_id %x:", uint32(gpu))
	return s
}

// cp adds the queue's slot on an XCC, live in a VMID.
func (s *slots) cp(xcc, at int, q queue, vmid uint32) *slots {
	q.vmid, q.live = vmid, true
	s.linef(" Inst %d,  CP Pipe %d, Queue %d", xcc, at, 2)
	s.at(4, 0xc914, q.xcc(xcc).registers())
	return s
}

func (s *slots) sdma(engine int, d dma, vmid uint32) *slots {
	d.vmid, d.enabled, d.listens = vmid, true, true
	s.linef("  SDMA Engine %d, RLC 0", engine)
	s.sdmaRegisters(0x4e40, d.words(gfx9, 44), runs94...)
	return s
}

func (s *slots) read() []debugfs.Slot {
	s.t.Helper()
	d, err := debugfs.ParseHQDs([]byte(s.String()))
	if err != nil || len(d.Warnings) > 0 {
		s.t.Fatal(err, d.Warnings)
	}
	return d.Slots()
}

func TestSlotsAreMatchedToTheirQueues(t *testing.T) {
	type matches = []debugfs.SlotMatch
	type owners = []gpreempt.QueueEntry
	snapshot := func(o gpreempt.QueueEntry) gpreempt.QueueEntry {
		o.Info.MQD, o.Info.Source = 0, gpreempt.FromSnapshot
		return o
	}
	fork := q(1) // the same addresses in another process
	fork.mqd = 0x900000
	moved := q(1)
	moved.read += 64
	sdmaFork := s(3)
	at := func(mqd uint64) queue { q := q(1); q.mqd = mqd; return q } // of the first XCC
	for _, tc := range []struct {
		name   string
		slots  *slots
		owners owners
		want   matches
	}{
		{
			"by the address of the MQD, and its other XCCs by ring and VMID",
			newSlots(t).cp(0, 0, q(1), 3).cp(0, 1, q(2), 3).cp(1, 0, q(1), 3).cp(1, 1, q(2), 3).cp(2, 2, q(2), 3),
			owners{q(2).owner(5, 1), q(1).owner(5, 0)},
			matches{
				{1, "MQD 0x110000"},
				{0, "MQD 0x120000"},
				{1, "ring 0x7f0001000000 in VMID 3, as in pipe 0 queue 2 of XCC 0"},
				{0, "ring 0x7f0002000000 in VMID 3, as in pipe 1 queue 2 of XCC 0"},
				{0, "ring 0x7f0002000000 in VMID 3, as in pipe 1 queue 2 of XCC 0"},
			},
		},
		{
			"forked processes with the same addresses",
			newSlots(t).cp(0, 0, q(1), 3).cp(0, 1, fork, 4).cp(1, 0, fork, 4).cp(1, 1, q(1), 3),
			owners{q(1).owner(5, 0), fork.owner(6, 0)},
			matches{
				{0, "MQD 0x110000"},
				{1, "MQD 0x900000"},
				{1, "ring 0x7f0001000000 in VMID 4, as in pipe 1 queue 2 of XCC 0"},
				{0, "ring 0x7f0001000000 in VMID 3, as in pipe 0 queue 2 of XCC 0"},
			},
		},
		{
			"of forked processes snapshots are not enough",
			newSlots(t).cp(0, 0, q(1), 3),
			owners{snapshot(q(1).owner(5, 0)), snapshot(fork.owner(6, 0))},
			matches{{-1, "its ring 0x7f0001000000 is that of queues 0 of process 5, 0 of process 6 equally"}},
		},
		{
			"unless the VMID is known to be one's",
			newSlots(t).cp(0, 0, q(1), 3).cp(0, 1, q(2), 3),
			owners{snapshot(q(1).owner(5, 0)), snapshot(fork.owner(6, 0)), q(2).owner(6, 1)},
			matches{{1, "ring 0x7f0001000000 in VMID 3 of its process"}, {2, "MQD 0x120000"}},
		},
		{
			"by a ring no other queue has, without an MQD",
			newSlots(t).cp(0, 0, q(1), 3).cp(1, 0, q(1), 3),
			owners{snapshot(q(1).owner(5, 0))},
			matches{{0, "ring 0x7f0001000000, which no other queue has"}, {0, "ring 0x7f0001000000, which no other queue has"}},
		},
		{
			"but not while the ring of another queue of that size is not known",
			newSlots(t).cp(0, 0, q(1), 3),
			owners{snapshot(q(1).owner(5, 0)), {Queue: gpreempt.Queue{Process: gpreempt.ProcessKey{PID: 6, Start: 1}, GPU: gpu, RingBytes: q(1).ringBytes}}},
			matches{{-1, "its ring 0x7f0001000000 is that of queue 0 of process 5, but the rings of some queues are unknown"}},
		},
		{
			"that of another size rules nothing out",
			newSlots(t).cp(0, 0, q(1), 3),
			owners{snapshot(q(1).owner(5, 0)), {Queue: gpreempt.Queue{Process: gpreempt.ProcessKey{PID: 6, Start: 1}, GPU: gpu, RingBytes: 4 * q(1).ringBytes}}},
			matches{{0, "ring 0x7f0001000000, which no other queue has"}},
		},
		{
			"a ring of another size is another queue's",
			newSlots(t).cp(0, 0, q(1), 3),
			owners{{Queue: gpreempt.Queue{Process: gpreempt.ProcessKey{PID: 6, Start: 1}, GPU: gpu, RingBytes: 4 * q(1).ringBytes}, Info: *q(1).snapshot()}},
			matches{{-1, fmt.Sprintf("queue 0 of process 6 has its ring 0x7f0001000000, but the slot has a ring of %d bytes instead of %d", q(1).ringBytes, 4*q(1).ringBytes)}},
		},
		{
			"on a further XCC the ring of a queue whose own slot is another's proves nothing",
			newSlots(t).cp(0, 0, q(1), 3).cp(1, 0, fork, 4),
			owners{q(1).owner(5, 0)},
			matches{{0, "MQD 0x110000"}, {-1, "its ring 0x7f0001000000 is that of queue 0 of process 5, but there is no evidence for its MQD 0x903000"}},
		},
		{
			"rings alone that make a VMID two processes'",
			newSlots(t).cp(0, 0, q(1), 3).cp(0, 1, q(2), 3),
			owners{snapshot(q(1).owner(5, 0)), snapshot(q(2).owner(6, 0))},
			matches{
				{-1, "its ring 0x7f0001000000 is that of queue 0 of process 5, but the slots of VMID 3 are of more than one process"},
				{-1, "its ring 0x7f0002000000 is that of queue 0 of process 6, but the slots of VMID 3 are of more than one process"},
			},
		},
		{
			"a ring in the address space of another process",
			newSlots(t).cp(0, 0, q(1), 3).cp(0, 1, q(2), 3),
			owners{q(1).owner(5, 0), snapshot(q(2).owner(6, 0))},
			matches{{0, "MQD 0x110000"}, {-1, "queue 0 of process 6 has its ring 0x7f0002000000, but VMID 3 is that of process 5"}},
		},
		{
			"an MQD that went to another queue",
			newSlots(t).cp(0, 0, moved, 3),
			owners{q(1).owner(5, 0)},
			matches{{-1, "its MQD 0x110000 is that of queue 0 of process 5, but it has read pointer 0x7f10000010c0 instead of 0x7f1000001080: another queue may have replaced it"}},
		},
		{
			"a ring that went to another queue",
			newSlots(t).cp(0, 0, fork, 3),
			owners{q(1).owner(5, 0)},
			matches{{-1, "queue 0 of process 5 has its ring 0x7f0001000000, but MQD 0x110000, to which 0x900000 does not belong"}},
		},
		{
			"further XCCs whose MQDs are before that of the first, or between pages",
			newSlots(t).cp(0, 0, q(1), 3).cp(1, 0, at(0x10000-0x3000), 3).cp(1, 1, at(0x110000+8), 3).cp(2, 1, at(0x110000+0x1000), 3),
			owners{q(1).owner(5, 0)},
			matches{
				{0, "MQD 0x110000"},
				{-1, "queue 0 of process 5 has its ring 0x7f0001000000, but MQD 0x110000, to which 0x10000 does not belong"},
				{-1, "queue 0 of process 5 has its ring 0x7f0001000000, but MQD 0x110000, to which 0x113008 does not belong"},
				{-1, "queue 0 of process 5 has its ring 0x7f0001000000, but MQD 0x110000, to which 0x117000 does not belong"},
			},
		},
		{
			"two owners with one MQD",
			newSlots(t).cp(0, 0, q(1), 3),
			owners{q(1).owner(5, 0), q(1).owner(6, 0)},
			matches{{-1, "its MQD 0x110000 is that of queues 0 of process 5, 0 of process 6 equally"}},
		},
		{
			"SDMA by ring and VMID",
			newSlots(t).cp(0, 0, q(1), 3).cp(0, 1, fork, 4).sdma(0, s(3), 3).sdma(1, sdmaFork, 4).sdma(2, s(4), 3).sdma(3, s(5), 3),
			owners{q(1).owner(5, 0), fork.owner(6, 0), s(3).owner(5, 1), sdmaFork.owner(6, 1), s(4).owner(5, 2)},
			matches{
				{0, "MQD 0x110000"},
				{1, "MQD 0x900000"},
				{2, "ring 0x7f8003000000 in VMID 3 of its process"},
				{3, "ring 0x7f8003000000 in VMID 4 of its process"},
				{4, "ring 0x7f8004000000 in VMID 3 of its process"},
				{-1, "no known queue has its MQD 0x0 or ring 0x7f8005000000"},
			},
		},
		{
			"an XCC whose save area is not where it would be",
			newSlots(t).cp(0, 0, q(1), 3).cp(1, 0, func() queue { q := q(1); q.save += 4096; return q }(), 3),
			owners{q(1).owner(5, 0)},
			matches{{0, "MQD 0x110000"}, {-1, "queue 0 of process 5 has its ring 0x7f0001000000, but the slot has save area 0x7f2010001000 instead of 0x7f2010000000"}},
		},
		{
			"a further XCC of two queues with one ring in one process",
			newSlots(t).cp(0, 0, q(1), 3).cp(0, 1, fork, 3).cp(1, 0, fork, 3),
			owners{q(1).owner(5, 0), fork.owner(5, 1)},
			matches{{0, "MQD 0x110000"}, {1, "MQD 0x900000"}, {-1, "its ring 0x7f0001000000 in VMID 3 is that of queues 0 of process 5, 1 of process 5 equally"}},
		},
		{"nobody's", newSlots(t).cp(0, 0, q(1), 3), nil, matches{{-1, "no known queue has its MQD 0x110000 or ring 0x7f0001000000"}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, debugfs.MatchSlots(tc.slots.read(), tc.owners)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestSlotsWithoutAQueueHaveNoOwner(t *testing.T) {
	var b text
	b.linef("Node 2, gpu_id %x:", uint32(gpu))
	b.linef("   Inst 0, HIQ on MEC 2 Pipe 0 Queue 0")
	b.at(4, 0xc914, q(1).registers())
	b.linef(" Inst 0,  CP Pipe 0, Queue 2")
	left := q(1).registers()
	left[2] = 0
	b.at(4, 0xc914, left)
	b.linef(" Inst 0,  CP Pipe 0, Queue 3")
	b.at(4, 0xc914, make([]uint32, 56))
	d := parseHQDs(t, b.String())
	want := []debugfs.SlotMatch{
		{-1, "the driver's own queue"}, {-1, "not active: the registers belong to a queue that was unmapped"}, {-1, "empty"},
	}
	if diff := cmp.Diff(want, debugfs.MatchSlots(d.Slots(), []gpreempt.QueueEntry{q(1).owner(5, 0)})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Forked processes have the same addresses, except those of the MQDs. Slots in any order
// on any XCC have the right owner, or none.
func TestNoSlotIsMatchedToAnotherProcess(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		processes := rapid.IntRange(1, 4).Draw(rt, "processes")
		xccs := rapid.IntRange(1, 4).Draw(rt, "XCCs")
		var owners []gpreempt.QueueEntry
		var all [][]queue
		for p := range processes {
			var mine []queue
			for i := range 3 {
				a := q(i)
				a.mqd = uint64(p*16+i+1) << 20
				mine = append(mine, a)
				o := a.owner(int32(p+1), uint32(i))
				if rapid.Bool().Draw(rt, "MQD not known") {
					o.Info.MQD = 0
				}
				owners = append(owners, o)
			}
			all = append(all, mine)
		}
		s := newSlots(t)
		var want []int
		for x := range xccs {
			for range rapid.IntRange(0, 6).Draw(rt, "slots") {
				p, i := rapid.IntRange(0, processes-1).Draw(rt, "process"), rapid.IntRange(0, 2).Draw(rt, "queue")
				s.cp(x, 0, all[p][i], uint32(p+3))
				want = append(want, p*3+i)
			}
		}
		for i, m := range debugfs.MatchSlots(s.read(), owners) {
			if m.Owner >= 0 && m.Owner != want[i] {
				rt.Fatalf("slot %d has owner %d, want %d: %s\n%s", i, m.Owner, want[i], m.How, fmt.Sprint(owners[m.Owner]))
			}
		}
	})
}

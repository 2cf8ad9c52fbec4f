package gpumodel_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/discovery/registers"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// place is the part of a slot of hqds that is compared.
type place struct {
	Node                  int
	GPU                   gpreempt.GPUID
	Kind                  debugfs.SlotKind
	XCC, MEC, Pipe, Queue int
	State                 debugfs.SlotState
	MQD, RingBase         uint64
	VMID                  int
	Read, Write           uint64
	PipePriority          uint32
	Doorbell              bool
}

func (l *life) wantSlots(truth gpumodel.Truth) []place {
	var all []place
	for _, g := range truth.GPUs {
		for xcc := range l.shownXCCs() {
			all = append(all, l.wantHIQ(g, xcc))
			for _, s := range g.Slots {
				if !s.SDMA {
					all = append(all, l.wantSlot(g, s, xcc))
				}
			}
		}
		for _, s := range g.Slots {
			if s.SDMA {
				all = append(all, l.wantSlot(g, s, 0))
			}
		}
	}
	return all
}

// wantHIQ leaves out what is in it, which is not modelled.
func (l *life) wantHIQ(g gpumodel.GPUTruth, xcc int) place {
	p := place{Node: g.Node, GPU: g.ID, Kind: debugfs.SlotHIQ, XCC: xcc, MEC: 2, State: debugfs.Live}
	if g.MES {
		p.State = debugfs.Empty
	}
	if g.GFX >= 120000 {
		p.MEC = 3
	}
	return p
}

func (l *life) wantSlot(g gpumodel.GPUTruth, s gpumodel.SlotTruth, xcc int) place {
	p := place{Node: g.Node, GPU: g.ID, XCC: xcc, MEC: 1, Pipe: s.Pipe, Queue: s.Queue}
	if s.SDMA {
		p.Kind, p.MEC = debugfs.SlotSDMA, 0
	}
	if !s.Used {
		return p
	}
	p.State, p.RingBase, p.VMID, p.Doorbell = debugfs.Stale, s.RingBase, s.At.VMID, s.Live
	l.seen |= sawStale
	if s.Live {
		p.State = debugfs.Live
		l.seen |= sawLive
	}
	switch {
	case !s.SDMA:
		p.MQD = s.MQDs[xcc]
		p.Read, p.Write = s.At.Read*packetDwords, s.At.Write*packetDwords
		switch class(s.Priority) {
		case gpreempt.PriorityHigh:
			p.PipePriority = 2
		case gpreempt.PriorityNormal:
			p.PipePriority = 1
		}
	case s.Live:
		p.Read, p.Write = s.At.Read*packetBytes, s.At.Write*packetBytes
	}
	return p
}

func (l *life) gotSlots(slots []debugfs.Slot) []place {
	var all []place
	for _, s := range slots {
		p := place{Node: s.Node, GPU: s.GPU, Kind: s.Kind, XCC: s.XCC, MEC: s.MEC, Pipe: s.Pipe, Queue: s.Queue, State: s.State}
		switch s.Kind {
		case debugfs.SlotHIQ:
		case debugfs.SlotSDMA:
			d := s.SDMA
			p.RingBase, p.VMID, p.Read, p.Write, p.Doorbell = d.RingBase, d.VMID, d.ReadPosition, d.WritePosition, d.DoorbellEnabled
		case debugfs.SlotCP:
			c := registers.Of(s.Compute)
			p.MQD, p.RingBase, p.VMID, p.PipePriority, p.Doorbell = c.MQD, c.RingBase, c.VMID, c.PipePriority, c.DoorbellEnabled
			// The read position wraps with the ring, and the write position does not.
			p.Write = c.WritePosition
			p.Read = c.WritePosition - c.BacklogDwords()
			if !c.Empty && c.BacklogDwords() == 0 && c.WritePosition > 0 {
				p.Read -= c.RingBytes / 4
			}
		}
		all = append(all, p)
	}
	return all
}

// checkOwners finds out which queue is in which slot.
func (l *life) checkOwners(truth gpumodel.Truth, mqds debugfs.MQDDump, slots []debugfs.Slot) {
	l.Helper()
	gfx := func(gpreempt.GPUID) uint32 { return l.Spec().GFX }
	var owners []gpreempt.QueueEntry
	for i, p := range truth.Processes {
		var known []debugfs.Known
		for _, q := range p.Queues {
			known = append(known, debugfs.Known{
				ID: q.ID, GPU: q.GPU, Type: q.Type, RingBytes: q.RingBytes,
				Snapshot: &gpreempt.QueueInfo{RingBase: q.Info.RingBase, ReadPointer: q.Info.ReadPointer, WritePointer: q.Info.WritePointer, SaveArea: q.Info.SaveArea},
			})
		}
		for j, info := range debugfs.MatchQueues(known, mqds.Processes[i].Queues, gfx) {
			q := p.Queues[j]
			want := q.Info
			want.Source, want.Note = gpreempt.FromMQD, info.Note
			if q.Type != gpreempt.QueueCompute {
				// What an SDMA MQD does not have.
				want.MQD, want.Priority, want.PriorityExact = 0, 0, false
			} else if got := info.Priority; info.PriorityExact || got != class(want.Priority) {
				want.PriorityExact = true
			} else {
				want.Priority, want.PriorityExact = got, false
			}
			if diff := cmp.Diff(want, info); diff != "" {
				l.Fatalf("queue %d of %v (-want +got):\n%s", q.ID, p.Process, diff)
			}
			owners = append(owners, gpreempt.QueueEntry{Queue: gpreempt.Queue{Process: p.Process, ID: q.ID, GPU: q.GPU}, Info: info})
		}
	}
	inSlots := queuesInSlots(truth)
	matches := debugfs.MatchSlots(slots, owners)
	for i, s := range slots {
		m, owner := matches[i], inSlots[slotKey{s.GPU, s.Kind, s.Pipe, s.Queue}]
		switch {
		case m.Owner < 0 && owner == (queueKey{}):
		case m.Owner < 0 && s.Kind == debugfs.SlotSDMA:
			// Rings of different processes have one address, so it may not be certain.
		case m.Owner < 0 || (queueKey{owners[m.Owner].Process, owners[m.Owner].ID}) != owner:
			l.Fatalf("%v slot of XCC %d, pipe %d, queue %d of GPU %v is that of %v queue %d, but got %+v (owners %+v)",
				s.Kind, s.XCC, s.Pipe, s.Queue, s.GPU, owner.process, owner.id, m, owners)
		case s.Kind == debugfs.SlotSDMA:
			l.seen |= sawSDMAOwner
		}
	}
}

type slotKey struct {
	gpu         gpreempt.GPUID
	kind        debugfs.SlotKind
	pipe, queue int
}

type queueKey struct {
	process gpreempt.ProcessKey
	id      uint32
}

// queuesInSlots returns whose queue is in each live slot, by the truth.
func queuesInSlots(truth gpumodel.Truth) map[slotKey]queueKey {
	all := map[slotKey]queueKey{}
	for _, g := range truth.GPUs {
		for _, s := range g.Slots {
			kind := debugfs.SlotCP
			if s.SDMA {
				kind = debugfs.SlotSDMA
			}
			all[slotKey{g.ID, kind, s.Pipe, s.Queue}] = queueKey{s.Owner, s.ID}
		}
	}
	return all
}

// TestSuspendedQueuesHaveNoSlotAndExactPositions is what a suspension is verified by.
func TestSuspendedQueuesHaveNoSlotAndExactPositions(t *testing.T) {
	for _, name := range []string{"mi300x", "rx7900xtx"} {
		spec, err := gpumodel.PresetByName(name)
		if err != nil {
			t.Fatal(err)
		}
		l := newLife(t, spec, gpumodel.Linux612, 1)
		gpu := l.GPUs()[0].ID
		start := func() gpreempt.ProcessKey {
			key, err := l.StartProcess(gpumodel.ProcSpec{})
			l.ok(err)
			for id := range uint32(2) {
				_, err := l.CreateQueue(key, gpu, gpreempt.QueueCompute, 64)
				l.ok(err)
				for range 30 {
					l.ok(l.Submit(key, id, gpumodel.Packet{Duration: time.Millisecond, Occupancy: 0.2}))
				}
			}
			return key
		}
		online, offline := start(), start()
		l.AdvanceTo(20 * time.Millisecond)

		// slots counts the live slots of XCC 0 by process; the rest is of the dump too.
		slots := func() map[gpreempt.ProcessKey]int {
			l.check()
			count := map[gpreempt.ProcessKey]int{}
			for _, s := range l.Truth().GPUs[0].Slots {
				if s.Live {
					count[s.Owner]++
				}
			}
			return count
		}
		want := func(when string, want map[gpreempt.ProcessKey]int) {
			t.Helper()
			if diff := cmp.Diff(want, slots()); diff != "" {
				t.Errorf("%s: %s: live slots (-want +got):\n%s", name, when, diff)
			}
		}
		want("before", map[gpreempt.ProcessKey]int{online: 2, offline: 2})

		l.Suspend(offline, nil, nil)
		l.AdvanceTo(l.Now() + 10*time.Microsecond)
		if got := slots(); got[offline] == 2 {
			t.Errorf("%s: during the suspension: %v", name, got)
		}
		l.AdvanceTo(l.Now() + 5*time.Millisecond)
		want("suspended", map[gpreempt.ProcessKey]int{online: 2})

		// Submitting moves the positions, and not the MQD.
		queues := l.Indexes(offline)
		for _, q := range queues {
			l.ok(l.Submit(offline, q.ID, gpumodel.Packet{Duration: time.Millisecond, Occupancy: 0.2}))
		}
		mqds, err := debugfs.ParseMQDs(l.read(debugfs.MQDs))
		l.ok(err)
		i := slices.IndexFunc(mqds.Processes, func(p debugfs.MQDProcess) bool { return p.PID == offline.PID })
		for j, q := range queues {
			// The dumps are newest first.
			c, err := debugfs.DecodeCompute(mqds.Processes[i].Queues[1-j].XCCs[0])
			l.ok(err)
			if q.Read == 0 || q.Read == q.Write {
				t.Fatalf("%s: queue %d is not in the middle of its work: %+v", name, q.ID, q)
			}
			if got := (gpumodel.QueueIndexes{ID: q.ID, Read: uint64(c.ReadPosition) / packetDwords, Write: c.WritePosition / packetDwords}); got != q {
				t.Errorf("%s: the MQD has %+v, want %+v", name, got, q)
			}
			n, _, err := l.QueueBacklog(offline, q.ID)
			l.ok(err)
			if n != q.Write-q.Read+1 {
				t.Errorf("%s: backlog of queue %d = %d, want %d", name, q.ID, n, q.Write-q.Read+1)
			}
		}

		l.Resume(offline, nil, nil)
		l.AdvanceTo(l.Now() + 5*time.Millisecond)
		want("resumed", map[gpreempt.ProcessKey]int{online: 2, offline: 2})
		l.ok(l.EndProcess(offline))
		l.AdvanceTo(l.Now() + 5*time.Millisecond)
		want("after the process left", map[gpreempt.ProcessKey]int{online: 2})
	}
}

package server

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// ListHqds returns the hardware slots.
func (a adminService) ListHqds(ctx context.Context, req *gpreemptv1.ListHqdsRequest) (*gpreemptv1.ListHqdsResponse, error) {
	var only gpreempt.ProcessKey
	var on []gpreempt.GPUID // the GPUs of its queues
	if req.GetTargetId() != "" {
		proc, err := a.s.resolve(req.GetTargetId())
		if err != nil {
			return nil, err
		}
		only, on = proc.Key, proc.GPUs()
	}
	h, err := a.s.cfg.Observer.HQDs(ctx, a.s.lastChange(only))
	if err != nil {
		return nil, err
	}
	m := &gpreemptv1.ListHqdsResponse{ReadAt: timestamppb.New(h.ReadAt), Took: durationpb.New(h.Took)}
	for n := range h.Slots {
		slot, match := &h.Slots[n], h.Matches[n]
		var owner *gpreempt.QueueEntry
		if match.Owner >= 0 {
			owner = &h.Owners[match.Owner]
		}
		switch {
		case !req.GetAll() && slot.State != debugfs.Live,
			req.GetGpuId() != 0 && req.GetGpuId() != uint32(slot.GPU),
			!only.IsZero() && (owner == nil || owner.Process != only):
			continue
		}
		m.Hqds = append(m.Hqds, hqdMessage(slot, owner, match.How))
	}
	if unmatched := unmatchedSlots(h, on); unmatched > 0 {
		m.Notes = append(m.Notes, fmt.Sprintf("the queues of %d live slots could not be identified, and may be queues of the target", unmatched))
	}
	m.StoppedGpuIds = gpuIDs(h.Stopped)
	for _, w := range h.Warnings {
		m.Notes = append(m.Notes, fmt.Sprintf("line %d of hqds: %s", w.Line, w.Text))
	}
	return m, nil
}

// lastChange returns when the state of a target or a queue changed last, or with a zero key that of any: a
// reading of the slots from before shows what is not so by now.
func (s *Server) lastChange(only gpreempt.ProcessKey) (at time.Time) {
	clocks := s.clocks()
	s.cfg.Scheduler.View(func(c *scheduler.Core) {
		for _, t := range c.Targets() {
			if only.IsZero() || t.Key == only {
				at = later(at, clocks.at(t.Since).AsTime())
			}
		}
	})
	queues, _ := s.cfg.Inventory.Queues()
	for _, q := range queues {
		if only.IsZero() || q.Process == only {
			at = later(at, later(q.FirstSeen, q.ChangedAt))
		}
	}
	return at
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// unmatchedSlots returns the number of live slots of GPUs whose queue is not known.
func unmatchedSlots(h *inventory.HQDs, gpus []gpreempt.GPUID) (n int) {
	for i := range h.Slots {
		s := &h.Slots[i]
		if s.State == debugfs.Live && s.Kind != debugfs.SlotHIQ && h.Matches[i].Owner < 0 && slices.Contains(gpus, s.GPU) {
			n++
		}
	}
	return n
}

// quantumRegister is the index of CP_HQD_QUANTUM among the registers of a slot.
const quantumRegister = 7

func hqdMessage(s *debugfs.Slot, owner *gpreempt.QueueEntry, how string) *gpreemptv1.Hqd {
	m := &gpreemptv1.Hqd{
		GpuId: uint32(s.GPU), Node: uint32(s.Node), Kind: s.Kind.String(), Xcc: uint32(s.XCC), Mec: uint32(s.MEC),
		Pipe: uint32(s.Pipe), Slot: uint32(s.Queue), State: gpreemptv1.HqdState(s.State) + 1, Match: how,
	}
	if s.Kind == debugfs.SlotSDMA {
		m.Vmid = uint32(s.SDMA.VMID)
		m.RingAddress, m.RingBytes = known(s.SDMA.RingBase), s.SDMA.RingBytes
		m.ReadPointer, m.WritePointer = s.SDMA.ReadPosition, s.SDMA.WritePosition
		m.DoorbellOffset = s.SDMA.Doorbell
	} else {
		c := &s.Compute
		m.Vmid, m.QueuePriority, m.PipePriority = uint32(c.VMID), c.QueuePriority, c.PipePriority
		m.RingAddress, m.RingBytes, m.Aql, m.MqdAddress = known(c.RingBase), c.RingBytes, c.AQL, known(c.MQD)
		m.ReadPointer, m.WritePointer, m.DoorbellOffset = uint64(c.ReadPosition), c.WritePosition, c.Doorbell
		if len(c.Registers) > quantumRegister {
			m.Quantum = c.Registers[quantumRegister]
		}
	}
	if owner != nil {
		m.TargetId, m.QueueId = owner.Process.String(), owner.ID
	}
	return m
}

func sourceMessage(s inventory.Source) *gpreemptv1.Source {
	m := &gpreemptv1.Source{
		Name: s.Name, Available: s.Available, Every: durationpb.New(s.Every), Took: durationpb.New(s.Took),
		Readings: s.Readings, Note: s.Note,
	}
	if !s.ReadAt.IsZero() {
		m.ReadAt = timestamppb.New(s.ReadAt)
	}
	return m
}

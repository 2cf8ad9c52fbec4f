package gpumodel

import (
	"errors"
	"testing"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestFirmwareTakesItsOwnKindOfChanges(t *testing.T) {
	byRunlist, byQueue := newRig(t, hws(), 1), newRig(t, mes(), 1)
	b, c := byRunlist.attached("b", 1), byQueue.attached("c", 1)
	gpu := byQueue.facts[0].ID
	for what, err := range map[string]error{
		"add to runlist":         byRunlist.AddQueue(QueueRef{b, 0}, nil),
		"remove from runlist":    byRunlist.RemoveQueue(QueueRef{b, 0}, nil),
		"unmap queue by queue":   byQueue.Unmap(gpu, 0, nil),
		"runlist queue by queue": byQueue.Map(gpu, []QueueRef{{c, 0}}, nil),
	} {
		if !errors.Is(err, ErrScheduler) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestWhatADriverCannotMeanIsRefused(t *testing.T) {
	r := newRig(t, hws(), 2)
	key := r.attached("p", 1)
	spec := func(change func(*QueueSpec)) QueueSpec {
		s := r.at(1, 0, gpreempt.QueueCompute)
		change(&s)
		return s
	}
	for what, c := range map[string]struct{ err, want error }{
		"taken id":           {r.AttachQueue(key, r.at(0, 0, gpreempt.QueueCompute)), nil},
		"odd ring":           {r.AttachQueue(key, spec(func(s *QueueSpec) { s.RingBytes = 1025 })), nil},
		"small ring":         {r.AttachQueue(key, spec(func(s *QueueSpec) { s.RingBytes = 512 })), nil},
		"no type":            {r.AttachQueue(key, spec(func(s *QueueSpec) { s.Type = gpreempt.QueueUnknown })), nil},
		"priority":           {r.AttachQueue(key, spec(func(s *QueueSpec) { s.Priority = 16 })), nil},
		"attach to no GPU":   {r.AttachQueue(key, spec(func(s *QueueSpec) { s.GPU = 1 })), ErrNoGPU},
		"attach to nobody":   {r.AttachQueue(gpreempt.ProcessKey{PID: 1}, spec(func(*QueueSpec) {})), ErrNoProcess},
		"detach nothing":     {r.DetachQueue(key, 1), ErrNoQueue},
		"unmap no GPU":       {r.Unmap(1, 0, nil), ErrNoGPU},
		"clear no GPU":       {r.ClearGPU(1), ErrNoGPU},
		"map nobody's":       {r.Map(r.facts[0].ID, []QueueRef{{gpreempt.ProcessKey{PID: 1}, 0}}, nil), ErrNoProcess},
		"map nothing":        {r.Map(r.facts[0].ID, []QueueRef{{key, 1}}, nil), ErrNoQueue},
		"map another GPU's":  {r.Map(r.facts[1].ID, []QueueRef{{key, 0}}, nil), ErrNoQueue},
		"submit to nothing":  {r.Submit(key, 1, Packet{Duration: 1, Occupancy: 1}), ErrNoQueue},
		"remove of nobody's": {r.RemoveQueue(QueueRef{gpreempt.ProcessKey{PID: 1}, 0}, nil), ErrNoProcess},
	} {
		if c.err == nil || c.want != nil && !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v, want %v", what, c.err, c.want)
		}
	}
	if _, ok := r.Progress(QueueRef{key, 1}); ok {
		t.Error("a queue that does not exist progresses")
	}
	// Nothing of that has happened.
	if next, ok := r.Next(); ok {
		t.Errorf("something happens at %v", next)
	}
	if n := len(r.Indexes(key)); n != 1 {
		t.Errorf("%d queues", n)
	}
}

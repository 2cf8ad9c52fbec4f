package gpumodel

import (
	"errors"
	"testing"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestFaultsOfADrivenMachine(t *testing.T) {
	for _, spec := range []Spec{hws(), mes()} {
		r := newRig(t, spec, 1)
		key := r.attached("p", 1)
		ref := QueueRef{key, 0}
		on := func() *clock { return r.mapAll(key, ref) }
		takeOff := func() *clock { return r.unmap(key) }
		fixed := spec.Costs.Unmap + spec.Costs.RemoveQueue
		if spec.MES {
			on, takeOff = func() *clock { return r.add(ref) }, func() *clock { return r.remove(ref) }
		}
		on()
		r.rest()
		// These have nobody to be reported to.
		r.fault(FaultSuspendError, 0, 0)
		r.fault(FaultResumeError, 0, 0)
		r.fault(FaultSuspendStuck, 0, 7*ms)
		began := r.Now()
		c := takeOff()
		r.rest()
		r.done(c, began+fixed+7*ms)
		on()
		r.rest()
		r.kernel(key, 0, ms, 0.5)
		r.AdvanceTo(r.Now() + ms/2)
		r.fault(FaultLosePacket, 0, 0)
		takeOff()
		r.rest()
		on()
		r.rest()
		if c := r.counters(key); c.Lost != 1 || len(r.gpus[0].faults) != 2 {
			t.Errorf("%s: %+v, and %v are left to happen", spec.Name, c, r.gpus[0].faults)
		}
	}
}

func TestOnlyOneDecides(t *testing.T) {
	gpu := newRig(t, hws(), 1).facts[0].ID
	own, driven, queueWise := newRig(t, hws(), 1), newRig(t, hws(), 1), newRig(t, mes(), 1)
	a := own.start("a", 1, 0)
	b := driven.attached("b", 1)
	c := queueWise.attached("c", 1)
	other := queueWise.facts[0].ID
	for what, err := range map[string]error{
		"attach to own":          own.AttachQueue(a, own.ownSpec(1, 0, gpreempt.QueueCompute)),
		"detach from own":        own.DetachQueue(a, 0),
		"unmap own":              own.Unmap(gpu, a, nil),
		"map own":                own.Map(gpu, a, nil, nil),
		"add to own":             own.AddQueue(QueueRef{a, 0}, nil),
		"clear own":              own.ClearGPU(gpu),
		"suspend driven":         driven.Suspend(b, nil, nil),
		"resume driven":          driven.Resume(b, nil, nil),
		"destroy driven":         driven.DestroyQueue(b, 0),
		"add to runlist":         driven.AddQueue(QueueRef{b, 0}, nil),
		"remove from runlist":    driven.RemoveQueue(QueueRef{b, 0}, nil),
		"unmap queue by queue":   queueWise.Unmap(other, c, nil),
		"runlist queue by queue": queueWise.Map(other, c, []QueueRef{{c, 0}}, nil),
	} {
		if !errors.Is(err, ErrScheduler) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := driven.CreateQueue(b, gpu, gpreempt.QueueCompute, 64); !errors.Is(err, ErrScheduler) {
		t.Errorf("create on driven: %v", err)
	}
}

func TestWhatADriverCannotMeanIsRefused(t *testing.T) {
	r := newRig(t, hws(), 2)
	key := r.attached("p", 1)
	spec := func(change func(*QueueSpec)) QueueSpec {
		s := r.ownSpec(1, 0, gpreempt.QueueCompute)
		change(&s)
		return s
	}
	for what, c := range map[string]struct{ err, want error }{
		"taken id":           {r.AttachQueue(key, r.ownSpec(0, 0, gpreempt.QueueCompute)), nil},
		"odd ring":           {r.AttachQueue(key, spec(func(s *QueueSpec) { s.RingBytes = 1025 })), nil},
		"small ring":         {r.AttachQueue(key, spec(func(s *QueueSpec) { s.RingBytes = 512 })), nil},
		"no type":            {r.AttachQueue(key, spec(func(s *QueueSpec) { s.Type = gpreempt.QueueUnknown })), nil},
		"priority":           {r.AttachQueue(key, spec(func(s *QueueSpec) { s.Priority = 16 })), nil},
		"attach to no GPU":   {r.AttachQueue(key, spec(func(s *QueueSpec) { s.GPU = 1 })), ErrNoGPU},
		"attach to nobody":   {r.AttachQueue(gpreempt.ProcessKey{PID: 1}, spec(func(*QueueSpec) {})), ErrNoProcess},
		"detach nothing":     {r.DetachQueue(key, 1), ErrNoQueue},
		"unmap no GPU":       {r.Unmap(1, key, nil), ErrNoGPU},
		"clear no GPU":       {r.ClearGPU(1), ErrNoGPU},
		"map nobody's":       {r.Map(r.facts[0].ID, key, []QueueRef{{gpreempt.ProcessKey{PID: 1}, 0}}, nil), ErrNoProcess},
		"map nothing":        {r.Map(r.facts[0].ID, key, []QueueRef{{key, 1}}, nil), ErrNoQueue},
		"map another GPU's":  {r.Map(r.facts[1].ID, key, []QueueRef{{key, 0}}, nil), ErrNoQueue},
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
	if b, err := r.Backlog(key); err != nil || len(b.Queues) != 1 {
		t.Errorf("backlog %+v, %v", b, err)
	}
}

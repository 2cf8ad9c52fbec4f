package gpumodel

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// mirror is a machine that decides itself, and one that is driven to do the same.
type mirror struct {
	own, driven rig
	// procs are the same of both, active the queues its driver wants to run.
	procs  []gpreempt.ProcessKey
	active map[QueueRef]bool
	spans  [2][]*span
}

// runlist is what is to run on a GPU.
func (m *mirror) runlist(gpu int) []QueueRef {
	var all []QueueRef
	for _, key := range m.procs {
		for _, q := range m.driven.byKey[key].queues {
			if ref := (QueueRef{key, q.id}); q.gpu.index == gpu && m.active[ref] {
				all = append(all, ref)
			}
		}
	}
	return all
}

// cycle is what a driver does about a GPU that takes runlists.
func (m *mirror) cycle(gpu int, by gpreempt.ProcessKey, change, then func()) {
	id := m.driven.facts[gpu].ID
	m.driven.ok(m.driven.Unmap(id, by, func() {
		change()
		m.driven.ok(m.driven.Map(id, by, m.runlist(gpu), then))
	}))
}

// control does to the driven machine what Suspend or Resume does, from a GPU on.
func (m *mirror) control(kind opKind, key gpreempt.ProcessKey, gpu int, then func()) {
	for ; gpu < len(m.driven.gpus); gpu++ {
		var refs []QueueRef
		for _, q := range m.driven.byKey[key].queues {
			if q.gpu.index == gpu {
				refs = append(refs, QueueRef{key, q.id})
			}
		}
		if len(refs) == 0 {
			continue
		}
		change := func() {
			for _, ref := range refs {
				m.active[ref] = kind == opResume
			}
		}
		next := func() { m.control(kind, key, gpu+1, then) }
		if m.driven.spec.MES {
			change()
			m.oneByOne(kind, refs, next)
		} else {
			m.cycle(gpu, key, change, next)
		}
		return
	}
	then()
}

func (m *mirror) oneByOne(kind opKind, refs []QueueRef, then func()) {
	if len(refs) == 0 {
		then()
		return
	}
	step := m.driven.RemoveQueue
	if kind == opResume {
		step = m.driven.AddQueue
	}
	m.driven.ok(step(refs[0], func() { m.oneByOne(kind, refs[1:], then) }))
}

func (m *mirror) start() {
	key, err := m.own.StartProcess(ProcSpec{Comm: "p"})
	m.own.ok(err)
	same, err := m.driven.StartProcess(ProcSpec{Comm: "p"})
	m.driven.ok(err)
	if key != same {
		m.own.Fatalf("processes %v and %v", key, same)
	}
	m.procs = append(m.procs, key)
}

func (m *mirror) create(key gpreempt.ProcessKey, gpu int, typ gpreempt.QueueType) {
	id, err := m.own.CreateQueue(key, m.own.facts[gpu].ID, typ, 64)
	m.own.ok(err)
	q, err := m.own.Machine.queue(key, id)
	m.own.ok(err)
	spec := m.driven.ownSpec(id, gpu, typ)
	spec.Doorbell = (q.memory.doorbell - q.memory.page) * 4
	m.driven.ok(m.driven.AttachQueue(key, spec))
	ref := QueueRef{key, id}
	m.active[ref] = true
	if m.driven.spec.MES {
		m.driven.ok(m.driven.AddQueue(ref, nil))
	} else {
		m.cycle(gpu, key, func() {}, nil)
	}
}

// destroy takes away a queue that is not suspended.
func (m *mirror) destroy(ref QueueRef, gpu int) {
	m.own.ok(m.own.DestroyQueue(ref.Process, ref.ID))
	m.driven.ok(m.driven.DetachQueue(ref.Process, ref.ID))
	delete(m.active, ref)
	if !m.driven.spec.MES {
		m.cycle(gpu, ref.Process, func() {}, nil)
	}
}

func (m *mirror) end(i int) {
	key := m.procs[i]
	m.procs = slices.Delete(m.procs, i, i+1)
	queues := m.driven.byKey[key].queues
	m.own.ok(m.own.EndProcess(key))
	m.driven.ok(m.driven.EndProcess(key))
	if m.driven.spec.MES {
		return
	}
	for gpu, g := range m.driven.gpus {
		if slices.ContainsFunc(queues, func(q *queue) bool { return q.gpu == g }) {
			m.cycle(gpu, key, func() {}, nil)
		}
	}
}

func (m *mirror) submit(ref QueueRef, k Packet) {
	m.spans[0] = append(m.spans[0], m.own.packet(ref.Process, ref.ID, k))
	m.spans[1] = append(m.spans[1], m.driven.packet(ref.Process, ref.ID, k))
}

// pass lets the same time pass for both, and compares them.
func (m *mirror) pass(t *rapid.T, d time.Duration, texts bool) {
	for _, r := range []rig{m.own, m.driven} {
		r.AdvanceTo(r.Now() + d)
	}
	same := func(what string, own, driven any) {
		// cmp is for people: it takes long to find nothing in this much.
		if !reflect.DeepEqual(own, driven) {
			t.Fatalf("%v: %s (-own +driven):\n%s", m.own.Now(), what, cmp.Diff(own, driven))
		}
	}
	same("packets", m.spans[0], m.spans[1])
	same("processes", m.own.Counters(), m.driven.Counters())
	same("GPUs", m.own.GPUCounters(), m.driven.GPUCounters())
	if texts {
		same("truth", m.own.Truth(), m.driven.Truth())
		for _, name := range []string{"mqds", "hqds", "rls"} {
			same(name, m.own.text(name), m.driven.text(name))
		}
	}
}

// step does one random thing to both.
func (m *mirror) step(t *rapid.T) {
	draw := func(n int, label string) int { return rapid.IntRange(0, n-1).Draw(t, label) }
	what := draw(16, "what")
	if what == 0 && len(m.procs) < 5 {
		m.start()
		return
	}
	// The first process keeps what it has, so that the driver always has somebody to map.
	i := draw(len(m.procs), "process")
	key := m.procs[i]
	p := m.driven.byKey[key]
	var q *queue
	var ref QueueRef
	if len(p.queues) > 0 {
		q = p.queues[draw(len(p.queues), "queue")]
		ref = QueueRef{key, q.id}
	}
	switch {
	case what == 1 && i > 0 && draw(3, "end") == 0:
		m.end(i)
	case what < 5 && len(p.queues) < 4:
		m.create(key, draw(len(m.own.gpus), "gpu"), []gpreempt.QueueType{gpreempt.QueueCompute, gpreempt.QueueCompute, gpreempt.QueueSDMA}[draw(3, "type")])
	case what == 5 && i > 0 && q != nil && m.active[ref]:
		m.destroy(ref, q.gpu.index)
	case what < 10 && i > 0:
		var own *outcome
		kind := opSuspend
		if draw(2, "resume") == 0 {
			kind = opResume
			own = m.own.resume(key)
		} else {
			own = m.own.suspend(key)
		}
		at := time.Duration(-1)
		m.control(kind, key, 0, func() { at = m.driven.Now() })
		m.pass(t, 10*ms, false)
		if at != own.At {
			t.Fatalf("%v of %v over at %v, driven at %v", kind, key, own.At, at)
		}
	case q != nil && q.write-q.read < 60 && q.typ == gpreempt.QueueCompute:
		m.submit(ref, Packet{
			Duration: time.Duration(1+draw(9000, "duration")) * us, Occupancy: float64(1+draw(100, "occupancy")) / 100,
			Jitter: 0.2, Overlap: draw(4, "overlap") == 0,
		})
	case q != nil && q.write-q.read < 60:
		m.submit(ref, Packet{Bytes: int64(1+draw(100, "bytes")) << 20})
	}
}

// TestDrivenMachineIsTheSameAsOneThatDecidesItself: costs, jitter included, counters and
// texts.
func TestDrivenMachineIsTheSameAsOneThatDecidesItself(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		spec := rapid.SampledFrom([]Spec{hws(), mes()}).Draw(rt, "spec")
		spec.Costs.Jitter, spec.XCCs, spec.Slots = 0.1, 2, 24
		gpus := rapid.IntRange(1, 3).Draw(rt, "gpus")
		seed := rapid.Uint64().Draw(rt, "seed")
		m := &mirror{own: rig{t, New(spec, gpus, seed)}, driven: rig{t, New(spec, gpus, seed)}, active: map[QueueRef]bool{}}
		m.start()
		for gpu := range gpus {
			m.create(m.procs[0], gpu, gpreempt.QueueCompute)
			m.pass(rt, ms, false)
		}
		for i := range 40 {
			m.step(rt)
			m.pass(rt, time.Duration(rapid.IntRange(3000, 9000).Draw(rt, "advance"))*us, i%20 == 19)
		}
	})
}

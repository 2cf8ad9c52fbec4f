package gpumodel

import (
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Result is what became of one queue in a suspend or a resume.
type Result uint8

// The results.
const (
	// ResultOK: the queue is as asked, possibly before already.
	ResultOK Result = iota
	// ResultGone: there is no such queue, or no longer.
	ResultGone
	// ResultError: the hardware reported an error; the queue's state is not to be
	// relied upon.
	ResultError
)

// QueueResult is what became of one queue in a suspend or a resume.
type QueueResult struct {
	ID uint32
	// GPU is the queue's; 0 when there was no such queue.
	GPU    gpreempt.GPUID
	Result Result
}

// request is a suspend or a resume of queues of one process.
type request struct {
	m    *Machine
	p    *process
	kind opKind
	ids  []uint32
	all  bool
	done func([]QueueResult)

	queues  []*queue
	results []QueueResult
	gpu     int
}

// Suspend takes queues of a process off their GPUs, all of them when ids is nil,
// GPU by GPU. done, which may be nil, gets one result for each queue, in the order
// of ids; for all, by id. It is called when the last GPU is through, at once
// when that takes no time. Requests for one process are carried out one by one.
// Suspending what is suspended is harmless, and costs a cycle like any other.
func (m *Machine) Suspend(key gpreempt.ProcessKey, ids []uint32, done func([]QueueResult)) error {
	return m.control(opSuspend, key, ids, done)
}

// Resume puts queues back, as Suspend takes them off.
func (m *Machine) Resume(key gpreempt.ProcessKey, ids []uint32, done func([]QueueResult)) error {
	return m.control(opResume, key, ids, done)
}

func (m *Machine) control(kind opKind, key gpreempt.ProcessKey, ids []uint32, done func([]QueueResult)) error {
	if err := m.ruledBy(ruleOwn); err != nil {
		return err
	}
	p, err := m.process(key)
	if err != nil {
		return err
	}
	r := &request{m: m, p: p, kind: kind, ids: slices.Clone(ids), all: ids == nil, done: done}
	p.requests = append(p.requests, r)
	if len(p.requests) == 1 {
		r.start()
	}
	m.callBack()
	return nil
}

// start resolves the ids and goes to the first GPU.
func (r *request) start() {
	if r.all {
		r.queues = slices.Clone(r.p.queues)
	}
	for i, id := range r.ids {
		q, ok := r.p.queue(id)
		if !ok || slices.Contains(r.ids[:i], id) {
			q = nil
		}
		r.queues = append(r.queues, q)
	}
	r.results = make([]QueueResult, len(r.queues))
	for i, q := range r.queues {
		switch {
		case q == nil:
			r.results[i] = QueueResult{ID: r.ids[i], Result: ResultGone}
		case q.doomed && r.kind == opSuspend:
			r.results[i] = QueueResult{ID: q.id, GPU: r.m.facts[q.gpu.index].ID, Result: ResultGone}
			r.queues[i] = nil
		default:
			r.results[i] = QueueResult{ID: q.id, GPU: r.m.facts[q.gpu.index].ID}
		}
	}
	r.next()
}

// next goes to the next GPU that has some of the queues, or ends.
func (r *request) next() {
	for ; r.gpu < len(r.m.gpus); r.gpu++ {
		g := r.m.gpus[r.gpu]
		var queues []*queue
		for _, q := range r.queues {
			if q != nil && q.gpu == g {
				queues = append(queues, q)
			}
		}
		if len(queues) > 0 {
			g.enqueue(&op{kind: r.kind, proc: r.p, queues: queues, request: r})
			return
		}
	}
	if r.done != nil {
		r.m.calls = append(r.m.calls, call{control: r.done, results: r.results})
	}
	r.p.requests = slices.Delete(r.p.requests, 0, 1)
	if len(r.p.requests) > 0 {
		r.p.requests[0].start()
	}
}

// finished takes the outcome on one GPU.
func (r *request) finished(o *op) {
	for i, q := range o.queues {
		r.results[slices.Index(r.queues, q)].Result = o.result(i)
	}
	r.gpu++
	r.next()
}

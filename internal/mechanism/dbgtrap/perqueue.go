package dbgtrap

import (
	"context"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// perQueue is a Mechanism whose sessions make a call for each queue.
type perQueue struct{ *Mechanism }

// PerQueue returns the mechanism as design documents describe it: each queue is suspended and
// resumed by a call of its own, and on HWS each of them interrupts all processes on its GPU. It
// exists to be compared with. It shares the sessions of m, so that a process has one at most.
func (m *Mechanism) PerQueue() mechanism.Mechanism { return perQueue{m} }

// Name implements mechanism.Mechanism.
func (perQueue) Name() string { return "dbgtrap-per-queue" }

// Attach implements mechanism.Mechanism.
func (p perQueue) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	return p.attach(ctx, target, true)
}

// eachQueue makes a call for each of some queues, up to the first that fails.
func eachQueue(ids []uint32, call func(id []uint32) ([]kfd.QueueResult, error)) (results []kfd.QueueResult, err error) {
	for i := range ids {
		one, err := call(ids[i : i+1])
		if err != nil {
			return nil, err
		}
		results = append(results, one...)
	}
	return results, nil
}

// resumeCall has the driver resume every queue, and returns how many it resumed.
func (d *debuggee) resumeCall() (n int, err error) {
	if !d.perQueue {
		return d.m.cfg.Device.ResumeAll(d.pid)
	}
	results, err := eachQueue(idsOf(*d.seen.Load()), func(id []uint32) ([]kfd.QueueResult, error) { return d.m.cfg.Device.Resume(d.pid, id) })
	for _, r := range results {
		if r.Status == kfd.QueueOK {
			n++
		}
	}
	return n, err
}

package gpumodel

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ProcSpec describes a process to start.
type ProcSpec struct {
	// PID is its process id; 0: the next simulated one, which is above every pid
	// a real process can have.
	PID int32
	// Start is its start time in clock ticks since boot; 0: the virtual time now.
	Start uint64
	// Comm is its command name; the kernel keeps 15 bytes.
	Comm string
	// UID and GID are its user and group.
	UID, GID uint32
}

// ProcessCounters is what became of the packets of a process. At any time
// Submitted = Executed + Lost + Abandoned + Pending.
type ProcessCounters struct {
	Process gpreempt.ProcessKey
	Comm    string
	// Ended tells that the process has left.
	Ended bool
	// Submitted is the packets put on its rings.
	Submitted uint64
	// Executed is the packets that left a ring after they ran to the end.
	Executed uint64
	// Lost is the packets that left a ring and never ran to the end.
	Lost uint64
	// Repeated is the packets among Executed that ran more than once.
	Repeated uint64
	// Abandoned is the packets that never ran to the end because the process
	// itself destroyed their queue or ended.
	Abandoned uint64
	// Pending is the packets on its rings.
	Pending uint64
	// Work is the time the work done takes alone, times occupancy; copies are
	// left out. What a packet does a second time does not count.
	Work time.Duration
}

// GPUCounters is what a GPU did.
type GPUCounters struct {
	GPU gpreempt.GPUID
	// SchedulerCycles is runlist cycles (HWS), or removals and additions of
	// queues (MES).
	SchedulerCycles uint64
}

// process is a living process.
type process struct {
	m    *Machine
	key  gpreempt.ProcessKey
	spec ProcSpec
	// birth orders processes.
	birth uint64
	dead  bool
	// queues by id.
	queues   []*queue
	counters ProcessCounters
}

// maxEnded is how many processes that left are remembered by their counters.
const maxEnded = 4096

// StartProcess starts a process, which has no queues yet. It fails when a living
// process has the pid.
func (m *Machine) StartProcess(spec ProcSpec) (gpreempt.ProcessKey, error) {
	if spec.PID < 0 {
		return gpreempt.ProcessKey{}, fmt.Errorf("start a simulated process: pid %d is negative", spec.PID)
	}
	key := gpreempt.ProcessKey{PID: spec.PID, Start: spec.Start}
	if key.PID == 0 {
		for next := true; next; next = m.processByPID(m.lastPID) != nil {
			m.lastPID++
		}
		key.PID = m.lastPID
	} else if p := m.processByPID(key.PID); p != nil {
		return gpreempt.ProcessKey{}, fmt.Errorf("start a simulated process: pid %d is taken by %q, started at tick %d", key.PID, p.spec.Comm, p.key.Start)
	}
	if key.Start == 0 {
		m.lastStart = max(m.lastStart+1, bootTicks+uint64(m.now/(time.Second/ticksPerSecond)))
		key.Start = m.lastStart
	}
	m.births++
	p := &process{m: m, key: key, spec: spec, birth: m.births, counters: ProcessCounters{Process: key, Comm: spec.Comm}}
	m.procs = append(m.procs, p)
	m.byKey[key] = p
	m.moves++
	return key, nil
}

// EndProcess ends a process as SIGKILL does: its queues go, whatever is on them
// is abandoned, and no suspension holds it.
func (m *Machine) EndProcess(key gpreempt.ProcessKey) error {
	p, err := m.process(key)
	if err != nil {
		return err
	}
	p.dead = true
	delete(m.byKey, key)
	m.procs = slices.DeleteFunc(m.procs, func(o *process) bool { return o == p })
	for _, g := range m.gpus {
		for _, q := range p.queues {
			if q.gpu == g {
				q.drop()
			}
		}
		if i := slices.Index(g.pages, p); i >= 0 {
			g.pages[i] = nil
		}
	}
	p.queues = nil
	m.moves++
	p.counters.Ended = true
	if len(m.ended) == maxEnded {
		m.ended = slices.Delete(m.ended, 0, maxEnded/4)
	}
	m.ended = append(m.ended, p.counters)
	m.callBack()
	return nil
}

// Counters returns the counters of every process, those that left included as far
// as they are remembered (the last 3072 at least), by pid, then start.
func (m *Machine) Counters() []ProcessCounters {
	all := slices.Clone(m.ended)
	for _, p := range m.procs {
		all = append(all, p.count())
	}
	slices.SortStableFunc(all, func(a, b ProcessCounters) int { return a.Process.Compare(b.Process) })
	return all
}

// ProcessCounters returns the counters of one process, also after it left; false
// when it is not known or no longer remembered.
func (m *Machine) ProcessCounters(key gpreempt.ProcessKey) (ProcessCounters, bool) {
	if p := m.byKey[key]; p != nil {
		return p.count(), true
	}
	for _, c := range slices.Backward(m.ended) {
		if c.Process == key {
			return c, true
		}
	}
	return ProcessCounters{}, false
}

// count adds what is in flight to the counters, without settling it: looking
// must not change what happens.
func (p *process) count() ProcessCounters {
	c := p.counters
	for _, q := range p.queues {
		c.Pending += q.write - q.read
		for _, k := range q.inflight {
			c.Work += k.workDone()
		}
	}
	return c
}

// GPUCounters returns the counters of every GPU, in node order.
func (m *Machine) GPUCounters() []GPUCounters {
	var all []GPUCounters
	for i, g := range m.gpus {
		all = append(all, GPUCounters{GPU: m.facts[i].ID, SchedulerCycles: g.cycles})
	}
	return all
}

// QueueBacklog returns how many packets wait or run on a queue: write index minus read
// index.
func (m *Machine) QueueBacklog(key gpreempt.ProcessKey, id uint32) (packets, written uint64, err error) {
	q, err := m.queue(key, id)
	if err != nil {
		return 0, 0, err
	}
	return q.write - q.read, q.write, nil
}

// queue finds one of the process's.
func (p *process) queue(id uint32) (*queue, bool) {
	i, ok := p.search(id)
	if !ok {
		return nil, false
	}
	return p.queues[i], true
}

// search reports where one of the process's is, or would be.
func (p *process) search(id uint32) (int, bool) {
	return slices.BinarySearchFunc(p.queues, id, func(q *queue, id uint32) int { return cmp.Compare(q.id, id) })
}

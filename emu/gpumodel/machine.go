package gpumodel

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Errors of Machine and Realtime.
var (
	// ErrNoProcess: no living simulated process has that key.
	ErrNoProcess = errors.New("no such simulated process")
	// ErrNoQueue: the process has no queue with that id.
	ErrNoQueue = errors.New("no such simulated queue")
	// ErrRingFull: the packet does not fit the queue's ring.
	ErrRingFull = errors.New("the ring of the simulated queue is full")
	// ErrNoGPU: the machine has no GPU with that id.
	ErrNoGPU = errors.New("no such simulated GPU")
	// ErrScheduler: the GPU has the other kind of scheduling firmware.
	ErrScheduler = errors.New("not how the simulated GPU is scheduled")
)

// Machine is a host with GPUs in virtual time. It is not safe for concurrent
// use; see Realtime.
//
// Functions given to it, such as Packet.Done, are called from within AdvanceTo
// or whichever call made them due, after that event has been handled. They may
// call every method except AdvanceTo.
type Machine struct {
	spec Spec
	rng  *rand.Rand
	now  time.Duration
	// pauses counts the calls of Pause without their Resume.
	pauses int
	timers timers
	fired  uint64
	gpus   []*gpu
	// facts describes gpus, index by index.
	facts    []gpreempt.GPU
	cpuNodes int
	// procs are the living, in order of birth; ended is what is left of the others.
	procs  []*process
	byKey  map[gpreempt.ProcessKey]*process
	ended  []ProcessCounters
	births uint64
	// moves is what Moves returns.
	moves   uint64
	onUnmap func(QueueRef)
	// lastPID and lastStart make keys unique.
	lastPID   int32
	lastStart uint64

	// calls are the functions to call once the current event has been handled.
	calls   []func()
	calling bool
	// kernel is whose texts the file tree imitates.
	kernel Kernel
	// topology and debugfs are parts of the file tree that do not change by
	// themselves.
	topology, debugfs *node
}

// firstPID is above the largest pid Linux can give (2^22), so that a simulated
// process is never taken for a real one, least of all by kill.
const firstPID = 5_000_000

// bootTicks is how long the host had been up when the simulation started, in
// clock ticks.
const bootTicks = 100_000

// ticksPerSecond is the unit of process start times.
const ticksPerSecond = 100

// New makes a machine at virtual time 0 with gpus GPUs of one kind. The seed
// decides all jitter. It panics when spec.Validate(gpus) fails.
func New(spec Spec, gpus int, seed uint64) *Machine {
	if err := spec.Validate(gpus); err != nil {
		panic("gpumodel: " + err.Error())
	}
	m := &Machine{
		spec:      spec,
		rng:       rand.New(rand.NewPCG(seed, 0x6770726565)),
		facts:     spec.gpus(gpus),
		cpuNodes:  firstGPUNode,
		byKey:     map[gpreempt.ProcessKey]*process{},
		lastPID:   firstPID - 1,
		lastStart: bootTicks - 1,
	}
	for i := range m.facts {
		m.gpus = append(m.gpus, newGPU(m, i))
	}
	m.debugfs = m.debugfsDir()
	m.SetKernel(Linux612)
	return m
}

// Spec reports what kind of GPU the machine has.
func (m *Machine) Spec() Spec { return m.spec }

// GPUs describes the GPUs, as their topology files do.
func (m *Machine) GPUs() []gpreempt.GPU { return slices.Clone(m.facts) }

// Now is the virtual time since the machine was made.
func (m *Machine) Now() time.Duration { return m.now }

// Next is when something happens next by itself; false when nothing will.
func (m *Machine) Next() (time.Duration, bool) {
	t := m.timers.first()
	if t == nil {
		return 0, false
	}
	return t.at, true
}

// AdvanceTo lets virtual time run to t, in order through all that happens until
// then, t included. A t in the past only does what is due.
func (m *Machine) AdvanceTo(t time.Duration) { m.advance(t, 0) }

// Pause stops virtual time, until Resume was called as often: AdvanceTo does nothing. A
// function given to the machine may call it, and then its time is that of what it reports.
func (m *Machine) Pause() { m.pauses++ }

// Resume ends one Pause.
func (m *Machine) Resume() { m.pauses-- }

// advance is AdvanceTo, but stops short of t after limit events, unless limit is 0.
func (m *Machine) advance(t time.Duration, limit int) {
	for n := 0; m.pauses == 0; n++ {
		next := m.timers.first()
		if next == nil || next.at > t {
			m.now = max(m.now, t)
			return
		}
		if limit > 0 && n == limit {
			return
		}
		m.timers.stop(next)
		m.now = max(m.now, next.at)
		m.fired++
		next.fire()
		m.callBack()
	}
}

// callBack calls what became due, and what becomes due by that.
func (m *Machine) callBack() {
	if m.calling {
		return
	}
	m.calling = true
	for len(m.calls) > 0 { // a call may add others
		calls := m.calls
		m.calls = nil
		for _, call := range calls {
			call()
		}
	}
	m.calling = false
}

// cost returns a modelled cost with its jitter.
func (m *Machine) cost(mean time.Duration) time.Duration { return m.spread(mean, m.spec.Costs.Jitter) }

// share returns the cost of parts millionths of a whole context, with its jitter.
func (m *Machine) share(whole time.Duration, parts int64) time.Duration {
	return m.cost(time.Duration(float64(whole) * float64(min(parts, full)) / full))
}

func (m *Machine) spread(mean time.Duration, jitter float64) time.Duration {
	if mean <= 0 || jitter <= 0 {
		return mean
	}
	return time.Duration(float64(mean) * (1 + jitter*(2*m.rng.Float64()-1)))
}

func (m *Machine) gpu(id gpreempt.GPUID) (*gpu, error) {
	i := slices.IndexFunc(m.facts, func(g gpreempt.GPU) bool { return g.ID == id })
	if i < 0 {
		return nil, fmt.Errorf("%w: gpu_id %v", ErrNoGPU, id)
	}
	return m.gpus[i], nil
}

// process finds a living one.
func (m *Machine) process(key gpreempt.ProcessKey) (*process, error) {
	if p := m.byKey[key]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%w: %v", ErrNoProcess, key)
}

// queue finds one of a living process.
func (m *Machine) queue(key gpreempt.ProcessKey, id uint32) (*queue, error) {
	p, err := m.process(key)
	if err != nil {
		return nil, err
	}
	q, ok := p.queue(id)
	if !ok {
		return nil, fmt.Errorf("%w: %d of %v", ErrNoQueue, id, key)
	}
	return q, nil
}

func (m *Machine) processByPID(pid int32) *process {
	i := slices.IndexFunc(m.procs, func(p *process) bool { return p.key.PID == pid })
	if i < 0 {
		return nil
	}
	return m.procs[i]
}

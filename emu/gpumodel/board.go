package gpumodel

import (
	"fmt"
	"sync"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Board connects the rules of package driver with the model of its GPUs: a step that the
// driver takes changes the modelled schedule and takes the modelled time. Its methods may be called by several
// goroutines at once, and with the driver's lock held.
type Board struct {
	rt *Realtime

	mu     sync.Mutex                        // guards all below; rt is locked inside it
	procs  map[driver.MM]gpreempt.ProcessKey // that the model knows
	queues map[uint64]QueueRef               // by serial
}

// NewBoard returns a board with n GPUs of a kind that run along the wall clock, whose files
// have the texts of a driver: profile is a name of driver.Profiles. The seed decides the
// jitter of modelled durations. The caller must Close the board.
func NewBoard(spec Spec, n int, profile string, seed uint64) (*Board, error) {
	kernel, ok := profileKernels[profile]
	if !ok {
		return nil, fmt.Errorf("no driver profile %q; there are %q", profile, driver.Profiles())
	}
	if err := spec.Validate(n); err != nil {
		return nil, err
	}
	m := New(spec, n, seed)
	m.SetKernel(kernel)
	timer, err := hrtimer.New()
	if err != nil {
		return nil, err
	}
	return &Board{rt: Start(m, timer), procs: map[driver.MM]gpreempt.ProcessKey{}, queues: map[uint64]QueueRef{}}, nil
}

// profileKernels has whose files a profile of the driver shows.
var profileKernels = map[string]Kernel{
	"6.5": Linux61, "6.12": Linux612, driver.KmapProfile: Linux612, "6.12.103": Linux612, "6.12.117": Linux612,
	"amd-dkms": DKMS, "7.2": Linux72, "7.3": Linux73,
}

// Model returns the modelled GPUs.
func (b *Board) Model() *Realtime { return b.rt }

// Close stops the model's time.
func (b *Board) Close() error { return b.rt.Close() }

// Nodes describes the GPUs to the driver.
func (b *Board) Nodes() []driver.Node {
	var spec Spec
	b.rt.Do(func(m *Machine) { spec = m.Spec() })
	var nodes []driver.Node
	for _, g := range b.rt.GPUs() {
		nodes = append(nodes, driver.Node{
			ID: g.ID, GFX: g.GFX, XCCs: g.XCCs,
			MECFirmware: uint32(spec.topology.firmware), SaveArea: spec.saveArea(),
			SDMAQueues: spec.SDMAEngines * spec.SDMAQueuesPerEngine, XGMIQueues: spec.XGMIEngines * spec.SDMAQueuesPerEngine,
		})
	}
	return nodes
}

// Step has the modelled GPU do what the driver does to the real one. ended is called once
// the step has taken its time, possibly before Step returns, with the model, which is locked.
// It is not called when Step returns an error.
func (b *Board) Step(s driver.Step, ended func(*Machine)) (err error) {
	refs := b.refs(s.Queues)
	b.rt.Do(func(m *Machine) {
		done := func() { ended(m) }
		switch s.Kind {
		case driver.StepUnmap:
			err = m.Unmap(s.GPU, m.spec.grace(s.Grace), done)
		case driver.StepMap:
			err = m.Map(s.GPU, refs, done)
		case driver.StepAdd, driver.StepRemove:
			switch {
			case len(refs) == 0: // the model does not know the queue
				done()
			case s.Kind == driver.StepAdd:
				err = m.AddQueue(refs[0], done)
			default:
				err = m.RemoveQueue(refs[0], done)
			}
		case driver.StepShaderDebugger:
			done()
		}
	})
	return err
}

// refs returns those of the queues that the model knows.
func (b *Board) refs(queues []driver.MappedQueue) (refs []QueueRef) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, q := range queues {
		if ref, ok := b.queues[q.Serial]; ok {
			refs = append(refs, ref)
		}
	}
	return refs
}

// StartProcess makes the process with an address space known to the model. started, which
// may be nil, is called with the model locked, before anything else sees the process. It
// reports whether the process is new: the model knows one process by a key at a time,
// also while a process that executes a program has two address spaces.
func (b *Board) StartProcess(mm driver.MM, spec ProcSpec, started func(*Machine) error) (isNew bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for known, key := range b.procs {
		if known == mm || key == (gpreempt.ProcessKey{PID: spec.PID, Start: spec.Start}) {
			return false, nil
		}
	}
	b.rt.Do(func(m *Machine) {
		var key gpreempt.ProcessKey
		if key, err = m.StartProcess(spec); err != nil {
			return
		}
		if started != nil {
			if err = started(m); err != nil {
				_ = m.EndProcess(key) // it lives: it was started above
				return
			}
		}
		b.procs[mm] = key
	})
	return err == nil, err
}

// EndProcess has the model forget a process; unknown ones are ignored.
func (b *Board) EndProcess(mm driver.MM) (err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	key, known := b.procs[mm]
	if !known {
		return nil
	}
	delete(b.procs, mm)
	b.rt.Do(func(m *Machine) { err = m.EndProcess(key) })
	return err
}

// PASID returns the PASID of a process, 0 if the model does not know it.
func (b *Board) PASID(mm driver.MM) (pasid uint32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rt.Do(func(m *Machine) {
		if p, err := m.process(b.procs[mm]); err == nil {
			pasid = p.pasid()
		}
	})
	return pasid
}

// Processes returns the address spaces that the model knows.
func (b *Board) Processes() map[driver.MM]bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make(map[driver.MM]bool, len(b.procs))
	for mm := range b.procs {
		all[mm] = true
	}
	return all
}

// AttachQueue adds a queue of a known process to the model.
func (b *Board) AttachQueue(q driver.MappedQueue) (QueueRef, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ref := QueueRef{Process: b.procs[q.MM], ID: q.ID}
	spec := QueueSpec{
		ID: q.ID, GPU: q.GPU, Type: QueueType(q.Type), PM4: q.Type == kfd.QueueTypeCompute, RingBytes: uint64(q.Size), Ring: q.Ring,
		Read: q.Read, Write: q.Write, Save: q.Ctx, SaveBytes: q.CtxSize, Doorbell: q.Doorbell, Priority: gpreempt.Priority(q.Priority),
	}
	var err error
	b.rt.Do(func(m *Machine) { err = m.AttachQueue(ref.Process, spec) })
	if err == nil {
		b.queues[q.Serial] = ref
	}
	return ref, err
}

// DetachQueue has the model forget a queue; unknown ones are ignored.
func (b *Board) DetachQueue(serial uint64) (err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ref, known := b.queues[serial]
	if !known {
		return nil
	}
	delete(b.queues, serial)
	b.rt.Do(func(m *Machine) { err = m.DetachQueue(ref.Process, ref.ID) })
	return err
}

// Queue returns the model's name of a queue, false if the model does not know it.
func (b *Board) Queue(serial uint64) (QueueRef, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ref, known := b.queues[serial]
	return ref, known
}

// QueueCount returns how many queues the model knows.
func (b *Board) QueueCount() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.queues)
}

// QueueType returns the model's word for a number of the uAPI.
func QueueType(number uint32) gpreempt.QueueType {
	switch number {
	case kfd.QueueTypeCompute, kfd.QueueTypeComputeAQL:
		return gpreempt.QueueCompute
	case kfd.QueueTypeSDMA:
		return gpreempt.QueueSDMA
	case kfd.QueueTypeSDMAXGMI:
		return gpreempt.QueueSDMAXGMI
	}
	return gpreempt.QueueUnknown
}

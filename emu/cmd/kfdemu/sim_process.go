package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Process is a simulated process that uses the driver as a ROCm program does.
type Process struct {
	m      *Machine
	os     *kfdtest.Process
	thread *kfdtest.Thread // that makes the calls
	fd     int             // of the driver
	key    gpreempt.ProcessKey
	// waiting are the packets that wait for room on the ring of a queue, by its id. The
	// model's lock guards it.
	waiting map[uint32][]gpumodel.Packet
}

// Start starts a process without queues. Its pid is above any that Linux gives.
func (m *Machine) Start(comm string) (*Process, error) {
	p := m.os.Spawn()
	return m.start(&Process{m: m, os: p, thread: p.Main(), key: p.Key()}, comm)
}

// Join makes the calling process one of the machine, so that a daemon finds the queues of
// the client that calls it. It lasts until Close.
func (m *Machine) Join(comm string) (*Process, error) {
	handle, err := proc.Open("/", gpreempt.ProcessKey{PID: int32(os.Getpid())})
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	p := m.os.Self()
	return m.start(&Process{m: m, os: p, thread: p.NewThread(), key: handle.Key()}, comm)
}

func (m *Machine) start(p *Process, comm string) (_ *Process, err error) {
	p.waiting = map[uint32][]gpumodel.Packet{}
	if p.fd, err = p.thread.StartRuntime(); err != nil {
		return nil, fmt.Errorf("start simulated process %q: %w", comm, err)
	}
	spec := gpumodel.ProcSpec{PID: p.key.PID, Start: p.key.Start, Comm: comm, UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}
	state, _ := p.os.KFD()
	_, err = m.board.StartProcess(state.MM, spec, func(model *gpumodel.Machine) error { return m.writeProc(model, p.key.PID) })
	if err != nil {
		p.os.Kill()
		return nil, fmt.Errorf("start simulated process %q: %w", comm, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.procs[p] = true
	return p, nil
}

// Key returns the process's pid and start time.
func (p *Process) Key() gpreempt.ProcessKey { return p.key }

// CreateQueue makes a compute queue of AQL packets on a GPU, and returns its id.
func (p *Process) CreateQueue(gpu gpreempt.GPUID) (id uint32, err error) {
	if id, err = p.thread.CreateQueue(p.fd, gpu, kfd.QueueTypeComputeAQL); err != nil {
		return 0, fmt.Errorf("create a queue of simulated process %v on GPU %v: %w", p.key, gpu, err)
	}
	return id, nil
}

// Run puts packets on a queue, as there is room on its ring, and waits until all have run, or
// ctx ends, which returns its cause.
func (p *Process) Run(ctx context.Context, queue uint32, packets ...gpumodel.Packet) (err error) {
	over := make(chan struct{})
	left := len(packets)
	p.m.rt.Do(func(model *gpumodel.Machine) {
		for _, k := range packets {
			k.Done = func(_, _ time.Duration) {
				_ = p.submit(model, queue) // fails only when the process ends at this moment
				if left--; left == 0 {
					close(over)
				}
			}
			p.waiting[queue] = append(p.waiting[queue], k)
		}
		err = p.submit(model, queue)
	})
	if err != nil {
		return err
	}
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// submit submits the packets that wait for a queue until its ring is full: a packet that has
// run makes room.
func (p *Process) submit(model *gpumodel.Machine, queue uint32) error {
	for len(p.waiting[queue]) > 0 {
		switch err := model.Submit(p.key, queue, p.waiting[queue][0]); {
		case errors.Is(err, gpumodel.ErrRingFull):
			return nil
		case err != nil:
			delete(p.waiting, queue)
			return err
		}
		p.waiting[queue] = p.waiting[queue][1:]
	}
	return nil
}

// End kills the process and returns its counters: what was on its rings is Abandoned. That
// of Join ends with the machine only.
func (p *Process) End() (gpumodel.ProcessCounters, error) {
	m := p.m
	m.mu.Lock()
	known := m.procs[p]
	delete(m.procs, p)
	m.mu.Unlock()
	if known {
		state, _ := p.os.KFD()
		// The kernel's files of a process go before the driver releases it.
		gone := os.RemoveAll(m.procDir(p.key.PID))
		p.os.Kill()
		// The driver releases its queues once the hardware has stopped them, and after a
		// call of a debugger that is under way.
		_ = m.os.Await(context.Background(), func() bool { return p.os.Dead() && !p.hasQueues() }) // ends with cond only
		if err := errors.Join(gone, m.board.EndProcess(state.MM)); err != nil {
			return gpumodel.ProcessCounters{}, fmt.Errorf("end simulated process %v: %w", p.key, err)
		}
	}
	return p.Counters()
}

// hasQueues reports whether the driver has queues of the process.
func (p *Process) hasQueues() bool {
	return slices.ContainsFunc(p.m.os.Processes(), func(s driver.ProcessState) bool { return s.PID == p.key.PID && len(s.Queues) > 0 })
}

// Counters returns what became of the process's packets.
func (p *Process) Counters() (c gpumodel.ProcessCounters, err error) {
	known := false
	p.m.rt.Do(func(model *gpumodel.Machine) { c, known = model.ProcessCounters(p.key) })
	if !known {
		return c, fmt.Errorf("the counters of simulated process %v are forgotten", p.key)
	}
	return c, nil
}

// Job is a process that is always busy.
type Job struct {
	Comm string
	// Queues is how many compute queues it has on each of GPUs; without GPUs, on the
	// machine's first.
	Queues int
	GPUs   []gpreempt.GPUID
	// Kernel is each of the packets. A queue holds jobDepth: as each runs to its end, the
	// next follows.
	Kernel gpumodel.Packet
}

// StartJob starts a job.
func (m *Machine) StartJob(job Job) (*Process, error) {
	p, err := m.Start(job.Comm)
	if err != nil {
		return nil, err
	}
	if err := p.fill(job); err != nil {
		_, end := p.End()
		return nil, errors.Join(fmt.Errorf("start simulated job %q: %w", job.Comm, err), end)
	}
	return p, nil
}

// fill makes the queues of a job, and gives them their packets.
func (p *Process) fill(job Job) error {
	gpus := job.GPUs
	if len(gpus) == 0 {
		gpus = []gpreempt.GPUID{p.m.GPUs()[0].ID}
	}
	for _, gpu := range gpus {
		for range job.Queues {
			id, err := p.CreateQueue(gpu)
			if err != nil {
				return err
			}
			p.m.rt.Do(func(model *gpumodel.Machine) {
				k := job.Kernel
				k.Done = func(_, _ time.Duration) {
					_ = model.Submit(p.key, id, k) // fails only when the process ends at this moment
				}
				for range jobDepth {
					err = errors.Join(err, model.Submit(p.key, id, k))
				}
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

package main

// The simulated machine: the fake operating system of package kfdtest, the driver's rules,
// and modelled GPUs that run along the wall clock, in this program. The daemon works on it
// as it does on hardware, with the mechanism dbgtrap; see Machine.Host. No hardware is
// involved: every figure taken on a Machine is SIMULATED.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/daemon"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Config says what machine to simulate.
type Config struct {
	// Spec is the kind of GPU, and GPUs how many of it there are, 1 if 0.
	Spec gpumodel.Spec
	GPUs int
	// Profile is the driver: a name of driver.Profiles; "" is 6.12.
	Profile string
	// Seed decides the jitter of modelled durations.
	Seed uint64
}

// Machine is a simulated machine. Its methods may be called by several goroutines at once.
type Machine struct {
	spec  gpumodel.Spec
	os    *kfdtest.Machine
	rt    *gpumodel.Realtime
	board *gpumodel.Board
	dir   string // with the directory proc of Host.Dir

	// wake asks the worker to have the driver ask again whether its steps are done.
	wake   chan struct{}
	closed chan struct{}
	worker sync.WaitGroup

	mu    sync.Mutex // guards procs
	procs map[*Process]bool
}

// New starts a machine without processes. The caller must Close it.
func New(cfg Config) (*Machine, error) {
	cfg.GPUs = cmp.Or(cfg.GPUs, 1)
	cfg.Profile = cmp.Or(cfg.Profile, "6.12")
	b, err := gpumodel.NewBoard(cfg.Spec, cfg.GPUs, cfg.Profile, cfg.Seed)
	if err != nil {
		return nil, fmt.Errorf("simulated machine: %w", err)
	}
	m := &Machine{
		spec: cfg.Spec, rt: b.Model(), board: b, wake: make(chan struct{}, 1), closed: make(chan struct{}), procs: map[*Process]bool{},
	}
	if m.dir, err = os.MkdirTemp("", "gpreempt-sim-"); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	m.os = kfdtest.New(kfdtest.Config{Profile: cfg.Profile, Nodes: b.Nodes(), Hardware: m.step, Queue: m.queue})
	m.worker.Go(func() {
		for {
			select {
			case <-m.wake:
				m.os.Wake()
			case <-m.closed:
				return
			}
		}
	})
	return m, nil
}

// Close ends all processes and stops the machine's time. No daemon may work on it any
// more.
func (m *Machine) Close() error {
	m.mu.Lock()
	procs := maps.Clone(m.procs)
	m.mu.Unlock()
	var errs []error
	for p := range procs {
		_, err := p.End()
		errs = append(errs, err)
	}
	close(m.closed)
	m.worker.Wait()
	return errors.Join(append(errs, m.board.Close(), os.RemoveAll(m.dir))...)
}

// Host returns the machine for a daemon in this process to work on.
func (m *Machine) Host() daemon.Host {
	return daemon.Host{
		Simulated: m.spec.Name,
		Dir:       m.dir,
		Files:     m.rt.FS(),
		Open:      func() (*kfd.Device, error) { return kfd.OpenWith(m.os.Self().Main(), kfd.DevicePath) },
		Attach: func(_ context.Context, pid int32, _ uint64) (dbgtrap.Thread, error) {
			t, err := m.os.Trace(pid) // no pid is used twice
			if err != nil {
				return nil, err // an interface with a nil *Tracing would not be nil
			}
			return t, nil
		},
		Backlogs: m.backlogs,
	}
}

// GPUs describes the GPUs, as their topology files do.
func (m *Machine) GPUs() []gpreempt.GPU { return m.rt.GPUs() }

// Counters returns the counters of every process, also of those that have ended, as far
// as the model remembers them, and of every GPU, all of one moment.
func (m *Machine) Counters() (now time.Duration, processes []gpumodel.ProcessCounters, gpus []gpumodel.GPUCounters) {
	m.rt.Do(func(model *gpumodel.Machine) {
		now, processes, gpus = model.Now(), model.Counters(), model.GPUCounters()
	})
	return now, processes, gpus
}

// backlogs is a daemon.ReadBacklogs.
func (m *Machine) backlogs(_ context.Context, key gpreempt.ProcessKey, queues []gpreempt.QueueEntry) (all []inventory.Backlog, err error) {
	all = make([]inventory.Backlog, len(queues))
	m.rt.Do(func(model *gpumodel.Machine) {
		for i, q := range queues {
			var packets, written uint64
			if packets, written, err = model.QueueBacklog(key, q.ID); err != nil {
				return
			}
			all[i] = inventory.Backlog{Known: true, Value: packets, Unit: inventory.Packets, Written: written}
		}
	})
	return all, err
}

// step does a step of the driver's hardware. The driver's lock is held.
func (m *Machine) step(s driver.Step) driver.Outcome {
	var ended atomic.Bool
	err := m.board.Step(s, func(*gpumodel.Machine) {
		ended.Store(true)
		select {
		case m.wake <- struct{}{}:
		default: // the worker is asked already
		}
	})
	if err != nil {
		panic(fmt.Sprintf("kfdemu: the model refuses a step of the driver's: %v", err))
	}
	return driver.Outcome{Held: func() bool { return !ended.Load() }}
}

// queue follows the driver's queues. The driver's lock is held.
func (m *Machine) queue(q driver.MappedQueue, born bool) {
	var err error
	if born {
		_, err = m.board.AttachQueue(q)
	} else {
		err = m.board.DetachQueue(q.Serial)
	}
	if err != nil {
		panic(fmt.Sprintf("kfdemu: the model refuses a queue of the driver's: %v", err))
	}
}

// procFiles are the files of a process that the daemon keeps open; see daemon.Host.Dir.
var procFiles = []string{"stat", "status"}

// writeProc copies them from the model. The model is locked.
func (m *Machine) writeProc(model *gpumodel.Machine, pid int32) error {
	from, to := "proc/"+strconv.Itoa(int(pid)), m.procDir(pid)
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, name := range procFiles {
		text, err := fs.ReadFile(model.FS(), from+"/"+name)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name), text, 0o600)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *Machine) procDir(pid int32) string {
	return filepath.Join(m.dir, "proc", strconv.Itoa(int(pid)))
}

package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/emu/seccomp"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// emulations are the drivers and the machines of kfdtest that the emulator is compared as:
// each driver and each machine once, or with -short the first.
var emulations = []struct{ profile, machine, preset string }{
	{"6.12.117", "gfx942", "mi300x"},
	{"7.2", "two gfx1100", "rx7900xtx"},
	{"7.3", "gfx942", "mi300x"},
	{driver.KmapProfile, "two gfx90a", "mi210"},
	{"6.5", "gfx90a", "mi210"},
	{"6.12", "gfx1100", "rx7900xtx"},
	{"6.12.103", "two gfx90a", "mi210"},
	{"amd-dkms", "gfx908", "mi210"},
	{"6.12.117", "gfx1201", "rx7900xtx"},
}

// The emulator must meet the expectations for the fake, and also those for the real driver
// about real processes, real ptrace and sysfs.
func TestEmulatedDriverMeetsTheTable(t *testing.T) {
	if err := seccomp.Supported(); err != nil {
		t.Skip("no emulated machine: ", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("no emulated machine: several programs on one need root")
	}
	agent := filepath.Join(t.TempDir(), "agent")
	// Without the race detector, whose processes start slowly.
	if out, err := exec.Command("go", "test", "-c", "-vet=off", "-o", agent, ".").CombinedOutput(); err != nil {
		t.Fatalf("build the agent: %v\n%s", err, out)
	}
	asked := emulations
	if testing.Short() {
		asked = asked[:1]
	}
	for _, a := range asked {
		name := a.profile + ", " + a.machine
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := machines[slices.IndexFunc(machines, func(m machine) bool { return m.name == a.machine })]
			cfg := kfdemu.Config{Profile: a.profile, GPUs: len(m.nodes), Shim: agent}
			var err error
			if cfg.Spec, err = gpumodel.PresetByName(a.preset); err != nil {
				t.Fatal(err)
			}
			cfg.Spec.GFX = m.nodes[0].GFX
			holds := m.tags(a.profile)
			holds["real"], holds["emulated"], holds["faults"] = true, true, false
			e := newEmulation(t, cfg)
			compare(t, "kfdemu "+name, holds, func(*testing.T) host { return e.host(holds) })
		})
	}
}

// emulation is an emulated machine with a process that starts the actors.
type emulation struct {
	*kfdemu.Emulator
	agents   *kernelHost
	launcher *kernelProcess
}

func newEmulation(t *testing.T, cfg kfdemu.Config) *emulation {
	t.Helper()
	cfg.Dir = testutil.TempSocketDir(t)
	cfg.Event = func(v kfdemu.Event) {
		// Faults of the GPU are expected: the rings of the table's queues are unmapped.
		if v.Kind == kfdemu.EventTrouble {
			t.Errorf("the emulator reports an error: %+v", v)
		}
	}
	e := &emulation{}
	var err error
	if e.Emulator, err = kfdemu.New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	e.agents = testHost(t, nil)
	if e.launcher, err = e.agents.start(e.Command(context.Background(), cfg.Shim, AgentCommand)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.agents.agents = []*kernelProcess{e.launcher}
		if err := e.agents.end(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// host is the machine for one expectation.
func (e *emulation) host(holds tags) host {
	h := &emulatedHost{kernelHost: e.agents, e: e, seen: map[gpreempt.GPUID]driver.GPUState{}}
	h.holds, h.agents, h.ids = holds, nil, nil
	for _, g := range e.GPUs() {
		h.ids = append(h.ids, uint32(g.ID))
		h.seen[g.ID], _ = e.Driver().GPU(g.ID)
	}
	return h
}

// emulatedHost plays the table on the emulator: an actor is an agent on its machine.
type emulatedHost struct {
	*kernelHost
	e    *emulation
	seen map[gpreempt.GPUID]driver.GPUState
}

func (h *emulatedHost) spawn() (process, error) { return h.fork(h.e.launcher) }

func (h *emulatedHost) fork(parent *kernelProcess) (process, error) {
	p, err := parent.child()
	return &emulatedProcess{kernelProcess: p, host: h}, err
}

// end also waits until the driver has removed their processes.
func (h *emulatedHost) end() error {
	return errors.Join(h.kernelHost.end(), eventually("the emulated driver keeps processes that are dead", func() (bool, error) {
		return len(h.e.Driver().Processes()) == 0, nil
	}))
}

func (h *emulatedHost) look(gpu uint32) reply {
	id := gpreempt.GPUID(gpu)
	now, _ := h.e.Driver().GPU(id)
	before := h.seen[id]
	h.seen[id] = now
	return lookReply(before, now)
}

// hang is not possible here: the model preempts everything.
func (h *emulatedHost) hang(uint32) error { return errNobody }

func (h *emulatedHost) reset(gpu uint32) error {
	h.e.Driver().StartReset(gpreempt.GPUID(gpu))
	h.e.Driver().EndReset(gpreempt.GPUID(gpu))
	return nil
}

func (h *emulatedHost) recover(uint32) error { return errNobody }

type emulatedProcess struct {
	*kernelProcess
	host *emulatedHost
	free func() // of its lock, while it holds it
}

func (p *emulatedProcess) fork() (process, error) { return p.host.fork(p.kernelProcess) }

func (p *emulatedProcess) exec() error { return p.ending(p.kernelProcess.exec) }
func (p *emulatedProcess) exit() error { return p.ending(p.kernelProcess.exit) }
func (p *emulatedProcess) kill() error { return p.ending(p.kernelProcess.kill) }

// ending ends a program, and waits until the driver has removed its process and its files.
func (p *emulatedProcess) ending(end func() error) error {
	shown := fmt.Sprintf("/proc/%d/root/sys/class/kfd/kfd/proc/%d", p.host.e.launcher.id, p.id)
	return errors.Join(end(), eventually("the emulated driver keeps what has ended", func() (bool, error) {
		if _, there := p.state(); there {
			return false, nil
		}
		_, err := os.Stat(shown)
		return errors.Is(err, fs.ErrNotExist), ignore(err, fs.ErrNotExist)
	}))
}

func (p *emulatedProcess) thread(n int) (thread, error) {
	t, err := p.kernelProcess.thread(n)
	if err != nil {
		return nil, err
	}
	return &emulatedThread{t.(*kernelThread), p.host.e}, nil
}

// state returns the driver's state of the process.
func (p *emulatedProcess) state() (driver.ProcessState, bool) {
	states := p.host.e.Driver().Processes()
	i := slices.IndexFunc(states, func(s driver.ProcessState) bool { return s.PID == p.id && !s.Secondary })
	if i < 0 {
		return driver.ProcessState{}, false
	}
	return states[i], true
}

func (p *emulatedProcess) raise(gpu, queue uint32, mask uint64) error {
	if s, ok := p.state(); ok {
		p.host.e.Driver().Raise(s.MM, gpreempt.GPUID(gpu), queue, kfd.ExceptionMask(mask))
	}
	return nil
}

func (p *emulatedProcess) evict() error {
	s, _ := p.state()
	return p.host.e.Driver().Evict(s.MM, kfdabi.TriggerUserptr)
}

func (p *emulatedProcess) restore() error {
	s, _ := p.state()
	return p.host.e.Driver().Restore(s.MM)
}

func (p *emulatedProcess) hold() error {
	s, _ := p.state()
	free, ok := p.host.e.Driver().HoldMutex(s.MM)
	if !ok {
		return fmt.Errorf("the driver does not know process %d", p.id)
	}
	p.free = free
	return nil
}

func (p *emulatedProcess) release() error {
	p.free()
	return nil
}

func (p *emulatedProcess) fault(gpu uint32, address uint64) error {
	s, _ := p.state()
	p.host.e.Driver().Fault(s.MM, gpreempt.GPUID(gpu), driver.MemoryFault{VA: address, NotPresent: true})
	return nil
}

func (p *emulatedProcess) signal(_, event uint32) error {
	s, _ := p.state()
	p.host.e.Driver().SignalEvent(s.MM, event)
	return nil
}

func (p *emulatedProcess) queue(id uint32) reply {
	s, _ := p.state()
	for _, q := range s.Queues {
		if q.ID == id {
			return queueReply(q)
		}
	}
	return reply{}
}

type emulatedThread struct {
	*kernelThread
	e *emulation
}

// blocked uses the driver's state: a thread sleeps in any call until it is answered. Steps
// of the hardware take time here, and the wait for them is uninterruptible.
func (t *emulatedThread) blocked() (bool, error) {
	_, interruptible := t.e.Waiting(t.id)
	return interruptible, nil
}

func (t *emulatedThread) stuck() (bool, error) {
	waiting, interruptible := t.e.Waiting(t.id)
	return waiting && !interruptible, nil
}

// shim makes this process a program on an emulated machine, for kfdemu.Config.Shim.
func shim(args []string) error {
	if len(args) < 5 || args[1] != "--socket" || args[3] != "--" {
		return errors.New("want exec --socket SOCKET -- PROGRAM")
	}
	return kfdemu.Exec(args[2], args[4], args[4:], os.Environ())
}

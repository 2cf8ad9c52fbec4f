package conformance

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The GPUs g0 and g1 of scripts.
const (
	firstGPU  gpreempt.GPUID = 0x8a31
	secondGPU gpreempt.GPUID = 0x1f04
)

// machine is a kind of machine, on which the table is played in every profile.
type machine struct {
	name  string
	nodes []driver.Node
	noHWS bool
	holds []string
}

var machines = []machine{
	{name: "without a GPU"},
	{
		name:  "gfx90a",
		nodes: []driver.Node{{ID: firstGPU, GFX: 90010, XCCs: 1}},
		holds: []string{"gpu", "queues", "hws", "per-vmid"},
	},
	{
		name:  "gfx942",
		nodes: []driver.Node{{ID: firstGPU, GFX: 90402, XCCs: 8}},
		holds: []string{"gpu", "queues", "hws", "per-vmid"},
	},
	{
		name:  "gfx950",
		nodes: []driver.Node{{ID: firstGPU, GFX: 90500, XCCs: 8}},
		holds: []string{"gpu", "queues", "hws"},
	},
	{
		name:  "gfx908",
		nodes: []driver.Node{{ID: firstGPU, GFX: 90008, XCCs: 1}},
		holds: []string{"gpu", "queues", "hws", "one-vmid"},
	},
	{
		name:  "gfx1100",
		nodes: []driver.Node{{ID: firstGPU, GFX: 110000, XCCs: 1}},
		holds: []string{"gpu", "queues", "mes", "per-vmid", "cu-workaround"},
	},
	{
		name:  "gfx1201",
		nodes: []driver.Node{{ID: firstGPU, GFX: 120001, XCCs: 1}},
		holds: []string{"gpu", "queues", "mes", "per-vmid"},
	},
	{
		name:  "two gfx90a",
		nodes: []driver.Node{{ID: firstGPU, GFX: 90010, XCCs: 1}, {ID: secondGPU, GFX: 90010, XCCs: 1}},
		holds: []string{"gpu", "two-gpus", "queues", "hws", "per-vmid"},
	},
	{
		name:  "two gfx1100",
		nodes: []driver.Node{{ID: firstGPU, GFX: 110000, XCCs: 1}, {ID: secondGPU, GFX: 110000, XCCs: 1}},
		holds: []string{"gpu", "two-gpus", "queues", "mes", "per-vmid", "cu-workaround"},
	},
	{
		name:  "gfx90a that cannot debug GWS",
		nodes: []driver.Node{{ID: firstGPU, GFX: 90010, XCCs: 1, NoGWSDebug: true}},
		holds: []string{"only", "gpu", "queues", "no-gws-debug"},
	},
	{name: "gfx90a without the hardware scheduler", nodes: []driver.Node{{ID: firstGPU, GFX: 90010}}, noHWS: true, holds: []string{"only", "no-hws"}},
}

func TestFakeDriversMeetTheTable(t *testing.T) {
	for _, profile := range append(driver.Profiles(), driver.KmapProfile) {
		for _, m := range machines {
			name, holds := profile+", "+m.name, m.tags(profile)
			t.Run(name, func(t *testing.T) {
				// In a bubble, no lease and no timeout takes time.
				compareBy(t, "kfdtest "+name, holds, func(t *testing.T, e expectation) (err error) {
					synctest.Test(t, func(*testing.T) { err = e.perform(newFakeHost(profile, m, holds)) })
					return err
				})
			})
		}
	}
}

// tags returns the conditions of the machine with the driver of a profile.
func (m machine) tags(profile string) tags {
	holds := profileTags(profile)
	holds["fake"], holds["faults"] = true, true
	for _, name := range m.holds {
		holds[name] = true
	}
	if m.name == "gfx950" { // it is newer than some drivers
		holds["per-vmid"], holds["one-vmid"] = holds["7.2"], !holds["7.2"]
	}
	if profile == driver.KmapProfile { // the rest is 6.12
		holds["only"] = true
	}
	if holds["7.2"] && len(m.nodes) == 0 {
		holds["only"], holds["no-gpu-no-open"] = true, true
	}
	return holds
}

// fakeHost plays the table on a machine of kfdtest.
type fakeHost struct {
	machine *kfdtest.Machine
	holds   tags
	ids     []uint32
	procs   []*kfdtest.Process
	seen    map[gpreempt.GPUID]driver.GPUState
	oopses  []error // writes to freed memory
}

func newFakeHost(profile string, m machine, holds tags) *fakeHost {
	nodes := slices.Clone(m.nodes)
	for i := range nodes {
		nodes[i].XCCs, nodes[i].SaveArea = 1, saveArea
	}
	h := &fakeHost{holds: holds, seen: map[gpreempt.GPUID]driver.GPUState{}}
	h.machine = kfdtest.New(kfdtest.Config{Profile: profile, Nodes: nodes, NoHWS: m.noHWS, Oops: func(what string) {
		h.oopses = append(h.oopses, errors.New("the kernel reports: "+what))
	}})
	for _, n := range m.nodes {
		h.ids = append(h.ids, uint32(n.ID))
	}
	return h
}

func (h *fakeHost) tags() tags     { return h.holds }
func (h *fakeHost) gpus() []uint32 { return h.ids }

func (h *fakeHost) spawn() (process, error) { return h.enter(h.machine.Spawn()), nil }

func (h *fakeHost) enter(p *kfdtest.Process) process {
	h.procs = append(h.procs, p)
	f := &fakeProcess{host: h, Process: p, threads: map[int]*fakeThread{}, self: h.newProgram(p)}
	f.threads[0] = &fakeThread{p.Main(), f}
	return f
}

// end also returns what a real driver would have done to the kernel's memory: no
// expectation may.
func (h *fakeHost) end() error {
	for _, p := range h.procs {
		p.Kill()
	}
	return errors.Join(h.oopses...)
}

// look returns the driver's operations on a GPU since the last look.
func (h *fakeHost) look(gpu uint32) reply {
	id := gpreempt.GPUID(gpu)
	now, before := h.machine.GPU(id), h.seen[id]
	h.seen[id] = now
	return lookReply(before, now)
}

// hang uses the driver's timeout as an error of the next unmap.
func (h *fakeHost) hang(gpu uint32) error {
	h.machine.Inject(kfdtest.Fault{Stage: kfdtest.Hardware, GPU: gpreempt.GPUID(gpu), Step: driver.StepUnmap, Errno: unix.ETIME})
	return nil
}

func (h *fakeHost) reset(gpu uint32) error {
	h.machine.StartReset(gpreempt.GPUID(gpu))
	h.machine.EndReset(gpreempt.GPUID(gpu))
	return nil
}

// recover is a reset: the fake makes none by itself.
func (h *fakeHost) recover(gpu uint32) error { return h.reset(gpu) }

// lookReply returns the changes of a GPU between two looks.
func lookReply(before, now driver.GPUState) reply {
	// The processes whose queues the cycles unmapped.
	var cycled []string
	for _, pid := range slices.Sorted(maps.Keys(now.Cycled)) {
		if now.Cycled[pid] > before.Cycled[pid] {
			cycled = append(cycled, strconv.Itoa(int(pid)))
		}
	}
	grace := make([]string, 0, len(now.Grace))
	for _, g := range now.Grace[len(before.Grace):] {
		if g == driver.DefaultGrace {
			grace = append(grace, "default")
		} else {
			grace = append(grace, strconv.FormatUint(uint64(g), 10))
		}
	}
	return reply{R: int64(now.Unmaps - before.Unmaps), Out: map[string]string{
		"removes": strconv.Itoa(now.Removes - before.Removes),
		"adds":    strconv.Itoa(now.Adds - before.Adds),
		"cycled":  strings.Join(cycled, ","),
		"grace":   strings.Join(grace, ","),
	}}
}

// fakeNode describes any fake GPU as the topology does: a quarter of one of an MI300X's
// XCCs. saveArea has the same sizes.
var (
	fakeNode = node{
		"cwsr_size": 6103040, "ctl_stack_size": 4096, "num_xcc": 1, "gfx_target_version": 90402,
		"simd_count": 40, "simd_per_cu": 4, "array_count": 1, "simd_arrays_per_engine": 1,
	}
	saveArea = driver.SaveArea{Stack: 4096, Bytes: 6103040, Debug: 12800}
)

// newProgram returns a program whose memory nobody uses: addresses that are never used
// twice.
func (h *fakeHost) newProgram(p *kfdtest.Process) *program {
	var next atomic.Uint64
	next.Store(0x7000_0000_0000)
	return &program{
		node: func(gpu uint32) (node, error) {
			if !slices.Contains(h.ids, gpu) {
				return nil, fmt.Errorf("GPU %d: %w", gpu, unix.ENODEV)
			}
			return fakeNode, nil
		},
		reserve: func(bytes uint64) (uint64, error) {
			return next.Add(bytes) - bytes, nil
		},
		renew: func(at, bytes uint64) error {
			p.Unmap(at, bytes)
			return nil
		},
		store:   func(uint64, uint64) error { return nil },
		renders: map[uint32]int{}, rings: map[uint32]uint64{},
	}
}

type fakeProcess struct {
	*kfdtest.Process
	host    *fakeHost
	threads map[int]*fakeThread
	self    *program
	free    func() // of its lock, while it holds it
}

func (p *fakeProcess) pid() int32 { return p.PID() }

func (p *fakeProcess) thread(n int) (thread, error) {
	if p.threads[n] == nil {
		p.threads[n] = &fakeThread{p.NewThread(), p}
	}
	return p.threads[n], nil
}

func (p *fakeProcess) fork() (process, error) { return p.host.enter(p.Fork()), nil }

func (p *fakeProcess) exec() error {
	p.Exec()
	p.self = p.host.newProgram(p.Process)
	return nil
}

func (p *fakeProcess) exit() error {
	p.Kill()
	return nil
}

func (p *fakeProcess) kill() error {
	p.Kill()
	return nil
}

// raise raises exceptions of a queue as the hardware does.
func (p *fakeProcess) raise(gpu uint32, queue uint32, mask uint64) error {
	p.host.machine.Raise(p.MM(), gpreempt.GPUID(gpu), queue, kfd.ExceptionMask(mask))
	return nil
}

func (p *fakeProcess) evict() error   { return p.host.machine.Evict(p.MM(), kfdabi.TriggerUserptr) }
func (p *fakeProcess) restore() error { return p.host.machine.Restore(p.MM()) }

func (p *fakeProcess) hold() error {
	p.free = p.HoldMutex()
	return nil
}

func (p *fakeProcess) release() error {
	p.free()
	return nil
}

func (p *fakeProcess) fault(gpu uint32, address uint64) error {
	p.host.machine.Fault(p.MM(), gpreempt.GPUID(gpu), driver.MemoryFault{VA: address, NotPresent: true})
	return nil
}

func (p *fakeProcess) signal(_, event uint32) error {
	p.host.machine.SignalEvent(p.MM(), event)
	return nil
}

// queue returns the state of a queue; the answer is 1 if it exists.
func (p *fakeProcess) queue(id uint32) reply {
	q, ok := p.Queues()[id]
	if !ok {
		return reply{}
	}
	return queueReply(q)
}

func queueReply(q driver.QueueState) reply {
	flag := func(b bool) string {
		if b {
			return "1"
		}
		return "0"
	}
	return reply{R: 1, Out: map[string]string{
		"suspended": flag(q.Suspended), "active": flag(q.Active), "running": flag(q.Running), "evicted": flag(q.Evicted),
		"destroying": flag(q.Destroying), "status": showMask(q.Exceptions), "sent": showMask(q.Sent),
		"gpu": strconv.FormatUint(uint64(q.GPU), 10),
	}}
}

type fakeThread struct {
	*kfdtest.Thread
	p *fakeProcess
}

func (t *fakeThread) program() *program { return t.p.self }

func (t *fakeThread) Unmapped() (kfd.Pointer, error) { return kfdtest.Unmapped(), nil }

func (t *fakeThread) tid() int32 { return t.TID() }

func (t *fakeThread) do(c call) (reply, error) { return perform(t, c), nil }

func (t *fakeThread) blocked() (bool, error) { return t.Blocked(), nil }

func (t *fakeThread) stuck() (bool, error) {
	return t.p.host.machine.WaitsIn(int(t.TID())) == targetLock, nil
}

func (t *fakeThread) interrupt() error {
	t.Interrupt()
	return nil
}

func (t *fakeThread) end() error {
	t.Exit()
	return nil
}

func (t *fakeThread) dropCaps() error {
	t.Process().SetCaps(driver.CapSysPtrace)
	return nil
}

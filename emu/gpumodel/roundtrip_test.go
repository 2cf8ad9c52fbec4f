package gpumodel_test

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/discovery/registers"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

var kernels = []gpumodel.Kernel{gpumodel.Linux61, gpumodel.Linux612, gpumodel.Linux72, gpumodel.Linux73, gpumodel.DKMS}

// exactPriority reports whether MQDs have the priority of the queue itself.
func exactPriority(k gpumodel.Kernel) bool { return k != gpumodel.Linux72 && k != gpumodel.Linux73 }

// specs are the presets, and one GPU for every layout that no preset has. Turns are
// short and slots few, so that queues are taken off often.
func specs() []gpumodel.Spec {
	all := gpumodel.Presets()
	for name, gfx := range map[string]uint32{"gfx1010": 100100, "gfx1030": 100300, "gfx1201": 120001} {
		s := all[3]
		if gfx >= 110000 {
			s = all[4]
		}
		s.Name, s.GFX = name, gfx
		all = append(all, s)
	}
	for i := range all {
		all[i].Quantum = time.Millisecond
		all[i].Slots = min(all[i].Slots, 10)
		all[i].VMIDs = 3
	}
	return all
}

// TestWhatDebugfsShowsReadsAsWhatIsTrue renders random machines, parses the text and
// compares with what the machine knows, again and again during its life.
func TestWhatDebugfsShowsReadsAsWhatIsTrue(t *testing.T) {
	for _, spec := range specs() {
		for i, kernel := range kernels {
			t.Run(fmt.Sprintf("%s/%v", spec.Name, kernel), func(t *testing.T) {
				t.Parallel()
				l := newLife(t, spec, kernel, uint64(i)+1)
				for round := range 9 {
					for range 12 {
						l.step()
					}
					l.check()
					if round%3 == 0 {
						// Long enough for the schedule to be through with all that was asked.
						l.AdvanceTo(l.Now() + 50*time.Millisecond)
						l.check()
					}
				}
				if l.seen != sawAll {
					t.Errorf("the checks met %05b of %05b only", l.seen, sawAll)
				}
				for len(l.procs) > 0 {
					l.end(0)
				}
				l.rest()
				l.check()
			})
		}
	}
}

// What the checks must have met.
const (
	sawLive = 1 << iota
	sawStale
	sawSaved
	sawSuspended
	sawSDMAOwner

	sawAll = 1<<iota - 1
)

// life is a machine things happen to.
type life struct {
	testing.TB
	*gpumodel.Lab
	kernel gpumodel.Kernel
	rng    *rand.Rand
	procs  []gpreempt.ProcessKey
	seen   int
}

func newLife(t testing.TB, spec gpumodel.Spec, kernel gpumodel.Kernel, seed uint64) *life {
	t.Helper()
	gpus := 2
	if spec.XCCs > 4 {
		gpus = 1
	}
	l := &life{TB: t, Lab: gpumodel.NewLab(spec, gpus, seed), kernel: kernel, rng: rand.New(rand.NewPCG(seed, 0))}
	l.SetKernel(kernel)
	return l
}

func (l *life) ok(err error) {
	l.Helper()
	if err != nil {
		l.Fatal(err)
	}
}

// rest runs until nothing is left to happen.
func (l *life) rest() {
	for next, ok := l.Next(); ok; next, ok = l.Next() {
		l.AdvanceTo(next)
	}
}

func (l *life) end(i int) {
	l.ok(l.EndProcess(l.procs[i]))
	l.procs = append(l.procs[:i], l.procs[i+1:]...)
}

// step does one random thing.
func (l *life) step() {
	what := l.rng.IntN(16)
	if len(l.procs) == 0 || what == 0 && len(l.procs) < 5 {
		key, err := l.StartProcess(gpumodel.ProcSpec{Comm: "p"})
		l.ok(err)
		l.procs = append(l.procs, key)
		return
	}
	i := l.rng.IntN(len(l.procs))
	key := l.procs[i]
	queues := l.Indexes(key)
	switch n := len(queues); {
	case what == 1 && l.rng.IntN(4) == 0:
		l.end(i)
	case what < 5 || n == 0:
		types := []gpreempt.QueueType{gpreempt.QueueCompute, gpreempt.QueueCompute, gpreempt.QueueSDMA, gpreempt.QueueSDMAXGMI}
		gpus := l.GPUs()
		// The only reason not to is that there are no more.
		_, _ = l.CreateQueue(key, gpus[l.rng.IntN(len(gpus))].ID, types[l.rng.IntN(4)], 64<<l.rng.IntN(9))
	case what == 5:
		l.ok(l.DestroyQueue(key, queues[l.rng.IntN(n)].ID))
	case what < 8:
		l.Suspend(key, nil, nil)
	case what == 8:
		l.Resume(key, nil, nil)
	case what < 13:
		l.submit(key, queues[l.rng.IntN(n)].ID)
	default:
		l.AdvanceTo(l.Now() + time.Duration(l.rng.IntN(800))*time.Microsecond)
	}
}

func (l *life) submit(key gpreempt.ProcessKey, id uint32) {
	for range 1 + l.rng.IntN(40) {
		kernel := gpumodel.Packet{Duration: time.Duration(1+l.rng.IntN(200)) * time.Microsecond, Occupancy: 0.3}
		if l.Submit(key, id, kernel) != nil {
			// It is of SDMA, or full.
			_ = l.Submit(key, id, gpumodel.Packet{Bytes: 1 << 20})
		}
	}
}

func (l *life) read(name string) []byte {
	l.Helper()
	b, err := fs.ReadFile(l.FS(), name)
	l.ok(err)
	return b
}

// check compares what the files read as with the truth.
func (l *life) check() {
	l.Helper()
	truth := l.Truth()
	mqds, err := debugfs.ParseMQDs(l.read(debugfs.MQDs))
	l.ok(err)
	hqds, err := debugfs.ParseHQDs(l.read(debugfs.HQDs))
	l.ok(err)
	if diff := cmp.Diff([][]debugfs.Warning{nil, nil}, [][]debugfs.Warning{mqds.Warnings, hqds.Warnings}); diff != "" {
		l.Errorf("warnings (-want +got):\n%s", diff)
	}
	// cmp is for people: it takes long to find nothing in this much.
	if want, got := l.wantMQDs(truth), l.gotMQDs(mqds); !reflect.DeepEqual(want, got) {
		l.Fatalf("mqds (-want +got):\n%s", cmp.Diff(want, got))
	}
	slots := hqds.Slots()
	if want, got := l.wantSlots(truth), l.gotSlots(slots); !slices.Equal(want, got) {
		l.Fatalf("hqds (-want +got):\n%s", cmp.Diff(want, got))
	}
	l.checkOwners(truth, mqds, slots)
}

// shownXCCs is how many XCCs the kernel tells of.
func (l *life) shownXCCs() int {
	if l.kernel == gpumodel.Linux61 {
		return 1
	}
	return l.Spec().XCCs
}

// block is a process of mqds.
type block struct {
	PID    int32
	PASID  uint32
	Queues []image
}

// image is the part of an MQD that is compared.
type image struct {
	SDMA bool
	GPU  gpreempt.GPUID
	// XCCs are a compute queue's dumps.
	XCCs []computeImage
	DMA  sdmaImage
}

type computeImage struct {
	Valid                               bool
	MQD                                 uint64
	VMID                                int
	Priority                            gpreempt.Priority
	Exact                               bool
	RingBase, RingBytes                 uint64
	AQL, Empty                          bool
	Read                                uint32
	Write, ReadPointer, WritePointer    uint64
	Doorbell                            uint32
	SaveArea, SaveBytes                 uint64
	ControlStackBytes, WaveStateOffset  uint32
	Quantum                             discovery.Quantum
	Backlog                             uint64
	ReportsReadPosition, DoorbellEnable bool
}

type sdmaImage struct {
	VMID                      int
	RingBase, RingBytes       uint64
	Read, Write               uint64
	ReadPointer, WritePointer uint64
	Doorbell                  uint32
	Engine, Queue             int
}

const (
	packetBytes  = 64
	packetDwords = 16
)

func (l *life) wantMQDs(truth gpumodel.Truth) []block {
	var all []block
	for _, p := range truth.Processes {
		b := block{PID: p.Process.PID, PASID: uint32(p.Process.PID)}
		if l.kernel == gpumodel.Linux61 || l.kernel == gpumodel.Linux612 {
			b.PASID = p.PASID
		}
		for _, q := range p.Queues {
			var at gpumodel.Position
			if q.Saved != nil {
				at = *q.Saved
				l.seen |= sawSaved
			}
			if q.Suspended {
				l.seen |= sawSuspended
			}
			i := image{GPU: q.GPU}
			if q.Type != gpreempt.QueueCompute {
				i.SDMA = true
				i.DMA = sdmaImage{
					VMID: at.VMID, RingBase: q.Info.RingBase, RingBytes: q.RingBytes, Read: at.Read * packetBytes, Write: at.Write * packetBytes,
					ReadPointer: q.Info.ReadPointer, Doorbell: q.Doorbell, Engine: q.Engine, Queue: q.EngineQueue,
				}
				if l.Spec().GFX >= 110000 {
					i.DMA.WritePointer = q.Info.WritePointer
				}
				b.Queues = append(b.Queues, i)
				continue
			}
			for xcc := range l.shownXCCs() {
				c := computeImage{
					Valid: true, MQD: q.MQDs[xcc], VMID: at.VMID, Priority: q.Info.Priority, Exact: true,
					RingBase: q.Info.RingBase, RingBytes: q.RingBytes, AQL: true,
					Empty: q.Saved != nil && at.Read == at.Write,
					Read:  uint32(at.Read * packetDwords % (q.RingBytes / 4)), Write: at.Write * packetDwords,
					ReadPointer: q.Info.ReadPointer, WritePointer: q.Info.WritePointer, Doorbell: q.Doorbell,
					SaveArea: q.SaveAreas[xcc], SaveBytes: uint64(q.SaveBytes), ControlStackBytes: q.StackBytes, WaveStateOffset: q.StackBytes,
					Quantum:             discovery.Quantum{Enabled: true, Scale: 1, Duration: 1},
					Backlog:             (at.Write - at.Read) % (q.RingBytes / packetBytes),
					ReportsReadPosition: l.Spec().XCCs > 1 && xcc == 0,
					DoorbellEnable:      q.Saved != nil,
				}
				if !exactPriority(l.kernel) {
					c.Priority, c.Exact = class(c.Priority), false
				}
				i.XCCs = append(i.XCCs, c)
			}
			b.Queues = append(b.Queues, i)
		}
		all = append(all, b)
	}
	return all
}

// class returns the priority that HIP sets for a queue of that priority's class.
func class(p gpreempt.Priority) gpreempt.Priority {
	for _, c := range []gpreempt.Priority{gpreempt.PriorityHigh, gpreempt.PriorityNormal} {
		if p >= c {
			return c
		}
	}
	return gpreempt.PriorityLow
}

func (l *life) gotMQDs(dump debugfs.MQDDump) []block {
	var all []block
	for _, p := range dump.Processes {
		b := block{PID: p.PID, PASID: p.PASID}
		for _, q := range p.Queues {
			i := image{SDMA: q.Kind == debugfs.KindSDMA, GPU: q.GPU}
			if i.SDMA {
				i.DMA = l.decodeSDMA(q.XCCs[0])
				b.Queues = append(b.Queues, i)
				continue
			}
			for _, words := range q.XCCs {
				c, err := registers.DecodeCompute(words)
				l.ok(err)
				got := computeImage{
					Valid: c.Valid, MQD: c.MQD, VMID: c.VMID, RingBase: c.RingBase, RingBytes: c.RingBytes, AQL: c.AQL, Empty: c.Empty,
					Read: c.ReadPosition, Write: c.WritePosition, ReadPointer: c.ReadPointer, WritePointer: c.WritePointer,
					Doorbell: c.Doorbell, SaveArea: c.SaveArea, SaveBytes: c.SaveBytes,
					ControlStackBytes: c.ControlStackBytes, WaveStateOffset: c.WaveStateOffset, Quantum: c.Quantum,
					ReportsReadPosition: !c.NoUpdateReadPointer, DoorbellEnable: c.DoorbellEnabled,
				}
				got.Priority, got.Exact = c.Priority(exactPriority(l.kernel))
				got.Backlog, _ = c.BacklogPackets()
				i.XCCs = append(i.XCCs, got)
			}
			b.Queues = append(b.Queues, i)
		}
		all = append(all, b)
	}
	return all
}

// decodeSDMA reads an SDMA MQD, which must be the same with and without knowing the
// GPU.
func (l *life) decodeSDMA(words []uint32) sdmaImage {
	l.Helper()
	view := func(gfx uint32) sdmaImage {
		d, err := debugfs.DecodeSDMA(words, gfx)
		l.ok(err)
		return sdmaImage{
			VMID: d.VMID, RingBase: d.RingBase, RingBytes: d.RingBytes, Read: d.ReadPosition, Write: d.WritePosition,
			ReadPointer: d.ReadPointer, WritePointer: d.WritePointer, Doorbell: d.Doorbell, Engine: d.Engine, Queue: d.Queue,
		}
	}
	known := view(l.Spec().GFX)
	if diff := cmp.Diff(known, view(0)); diff != "" {
		l.Errorf("SDMA MQD, GPU known and not (-known +not):\n%s", diff)
	}
	return known
}

package gpumodel_test

import (
	"fmt"
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

// runs has these queues of the first GPU run, and no others, and lets that be done.
func (l *life) runs(all []gpumodel.QueueRef, run bool) {
	l.Helper()
	switch gpu := l.GPUs()[0].ID; {
	case l.Spec().MES:
		for _, ref := range all {
			step := l.RemoveQueue
			if run {
				step = l.AddQueue
			}
			l.ok(step(ref, nil))
		}
	case run:
		l.ok(l.Map(gpu, all, nil))
	default:
		l.ok(l.Unmap(gpu, 0, nil))
	}
	l.AdvanceTo(l.Now() + time.Millisecond)
}

// TestAttachedQueuesAreShownAsTheirDriverMadeThem reads what sysfs and debugfs show of a
// process with a real pid.
func TestAttachedQueuesAreShownAsTheirDriverMadeThem(t *testing.T) {
	for _, name := range []string{"mi300x", "rx7900xtx"} {
		for _, kernel := range kernels {
			t.Run(fmt.Sprintf("%s/%v", name, kernel), func(t *testing.T) {
				spec, err := gpumodel.PresetByName(name)
				if err != nil {
					t.Fatal(err)
				}
				l := newLife(t, spec, kernel, 1)
				gpu := l.GPUs()[0].ID
				key, err := l.StartProcess(gpumodel.ProcSpec{PID: 4242, Start: 99, Comm: "client"})
				l.ok(err)
				specs := []gpumodel.QueueSpec{
					{
						ID: 0, Type: gpreempt.QueueCompute, Ring: 0x7f12_3450_0000, RingBytes: 1 << 20, Read: 0x7f12_0000_0080, Write: 0x7f12_0000_0038,
						EOP: 0x7f12_0100_0000, Save: 0x7f13_0000_0000, SaveBytes: 0x2bea000, Doorbell: 0x18, Priority: 11,
					},
					{
						ID: 7, Type: gpreempt.QueueSDMA, Ring: 0x7f12_4440_0000, RingBytes: 4096, Read: 0x7f12_1000_0000, Write: 0x7f12_1000_0008,
						Doorbell: 0x38, Priority: 7,
					},
					{
						ID: 5, Type: gpreempt.QueueCompute, PM4: true, Ring: 0x7f12_5550_0000, RingBytes: 8192, Read: 0x7f12_2000_0000, Write: 0x7f12_2000_0008,
						Doorbell: 0x28, Priority: 7,
					},
				}
				var refs []gpumodel.QueueRef
				for i := range specs {
					specs[i].GPU = gpu
					l.ok(l.AttachQueue(key, specs[i]))
					refs = append(refs, gpumodel.QueueRef{Process: key, ID: specs[i].ID})
				}
				l.runs(refs, true)
				// One packet of each is over, one in flight and one waits.
				for range 3 {
					l.ok(l.Submit(key, 0, gpumodel.Packet{Duration: 2 * time.Millisecond, Occupancy: 0.2}))
					l.ok(l.Submit(key, 7, gpumodel.Packet{Bytes: spec.CopyRate / 500, RingBytes: 28}))
					l.ok(l.Submit(key, 5, gpumodel.Packet{Duration: 2 * time.Millisecond, Occupancy: 0.2, RingBytes: 128}))
				}
				l.AdvanceTo(l.Now() + 3*time.Millisecond)
				l.runs(refs, false)
				l.checkAttached(key, specs)
			})
		}
	}
}

func (l *life) checkAttached(key gpreempt.ProcessKey, specs []gpumodel.QueueSpec) {
	l.Helper()
	snapshot, err := discovery.NewFS(l.FS()).Scan()
	l.ok(err)
	var want []gpreempt.Queue
	for _, s := range specs {
		want = append(want, gpreempt.Queue{Process: key, ID: s.ID, GPU: s.GPU, Type: s.Type, RingBytes: s.RingBytes})
	}
	slices.SortFunc(want, func(a, b gpreempt.Queue) int { return int(a.ID) - int(b.ID) })
	if diff := cmp.Diff(want, snapshot.Processes[0].Queues); diff != "" || len(snapshot.Warnings) > 0 {
		l.Errorf("queues, warnings %v (-want +got):\n%s", snapshot.Warnings, diff)
	}

	mqds, err := debugfs.ParseMQDs(l.read(debugfs.MQDs))
	l.ok(err)
	if got := mqds.Processes[0].PID; got != key.PID || len(mqds.Processes[0].Queues) != len(specs) {
		l.Fatalf("mqds has %d queues of process %d", len(mqds.Processes[0].Queues), got)
	}
	// The first page of doorbells of a process is the GPU's third.
	const page = 2 * 2048
	for i, s := range slices.Backward(specs) {
		dump := mqds.Processes[0].Queues[len(specs)-1-i]
		read, write := uint64(64), uint64(192)
		switch {
		case s.Type != gpreempt.QueueCompute:
			read, write = 28, 84
			got := l.decodeSDMA(dump.XCCs[0])
			want := sdmaImage{
				RingBase: s.Ring, RingBytes: s.RingBytes, Read: read, Write: write, ReadPointer: s.Read, Doorbell: page + s.Doorbell/4,
				VMID: got.VMID, WritePointer: got.WritePointer, Engine: got.Engine, Queue: got.Queue,
			}
			if diff := cmp.Diff(want, got); diff != "" {
				l.Errorf("queue %d (-want +got):\n%s", s.ID, diff)
			}
			continue
		case s.PM4:
			read, write = 128, 384
		}
		type image struct {
			RingBase, RingBytes, ReadPointer, WritePointer, SaveArea, SaveBytes uint64
			Read, Write                                                         uint64
			Doorbell, ControlStackBytes, ReadIndex                              uint32
			AQL                                                                 bool
		}
		c, err := registers.DecodeCompute(dump.XCCs[0])
		l.ok(err)
		// One AQL packet is over; PM4 is not counted in packets, and that queue saves nothing.
		want := image{s.Ring, s.RingBytes, s.Read, s.Write, s.Save, uint64(s.SaveBytes), read, write, page + s.Doorbell/4, c.WaveStateOffset, 1, true}
		if s.PM4 {
			want.ControlStackBytes, want.ReadIndex, want.AQL = 0, 0, false
		}
		const readIndex = 96
		got := image{
			c.RingBase, c.RingBytes, c.ReadPointer, c.WritePointer, c.SaveArea, c.SaveBytes, uint64(c.ReadPosition) * 4, c.WritePosition * 4,
			c.Doorbell, c.ControlStackBytes, dump.XCCs[0][readIndex], c.AQL,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			l.Errorf("queue %d (-want +got):\n%s", s.ID, diff)
		}
		if p, exact := c.Priority(exactPriority(l.kernel)); p != class(s.Priority) || !exact && exactPriority(l.kernel) {
			l.Errorf("queue %d has priority %v, want %v", s.ID, p, s.Priority)
		}
	}
}

// TestWhatDebugfsShowsOfADrivenMachineReadsAsWhatIsTrue is as for machines that decide
// themselves: again and again during a life, turns and resets included.
func TestWhatDebugfsShowsOfADrivenMachineReadsAsWhatIsTrue(t *testing.T) {
	for _, spec := range specs() {
		t.Run(spec.Name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t, spec, gpumodel.Linux612, 1)
			gpu := l.GPUs()[0].ID
			var all []gpumodel.QueueRef
			for range 4 {
				key, err := l.StartProcess(gpumodel.ProcSpec{Comm: "p"})
				l.ok(err)
				l.procs = append(l.procs, key)
			}
			for id := range uint32(16) {
				s := gpumodel.QueueSpec{
					ID: id, GPU: gpu, Type: []gpreempt.QueueType{gpreempt.QueueCompute, gpreempt.QueueSDMA}[id/12],
					Ring: 0x7f00_0000_0000 + uint64(id)<<32, RingBytes: 4096 << (id % 3), Doorbell: id * 8, Priority: gpreempt.Priority(id),
				}
				s.Read, s.Write = s.Ring+0x10_0000, s.Ring+0x10_0008
				if s.Type == gpreempt.QueueCompute {
					s.Save, s.SaveBytes = s.Ring+0x100_0000, 1<<20
				}
				// One process more than have a VMID.
				key := l.procs[id%4]
				l.ok(l.AttachQueue(key, s))
				all = append(all, gpumodel.QueueRef{Process: key, ID: id})
				l.check()
			}
			for round := range 10 {
				for _, ref := range all {
					l.submit(ref.Process, ref.ID)
				}
				l.rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
				l.runs(all[:8+l.rng.IntN(9)], true)
				l.AdvanceTo(l.Now() + time.Duration(l.rng.IntN(4000))*time.Microsecond)
				l.check()
				if round%3 == 2 {
					l.ok(l.ClearGPU(gpu))
				} else {
					l.runs(all, false)
				}
				l.check()
			}
			l.ok(l.DetachQueue(all[0].Process, all[0].ID))
			l.check()
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

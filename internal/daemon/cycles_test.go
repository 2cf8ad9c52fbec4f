package daemon

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The end of a helper, and the attach to a process on one GPU, cost other GPUs a cycle that
// have a runlist with queues.
func TestCyclesAreCountedOnGPUsWithARunlistThatHasQueues(t *testing.T) {
	d := newDaemon(t, "# defaults\n")
	const used, own, idle, mes = 1, 2, 3, 4
	d.inventory.SetGPUs([]gpreempt.GPU{{ID: used}, {ID: own}, {ID: idle}, {ID: mes, MES: true}})
	proc := func(pid int32, gpus ...gpreempt.GPUID) discovery.Proc {
		p := discovery.Proc{Process: gpreempt.Process{Key: gpreempt.ProcessKey{PID: pid, Start: 1}}}
		for i, gpu := range gpus {
			p.Queues = append(p.Queues, gpreempt.Queue{Process: p.Key, ID: uint32(i), GPU: gpu, Type: gpreempt.QueueCompute})
		}
		return p
	}
	job := proc(10, own)
	d.inventory.Apply(time.Now(), discovery.Snapshot{Processes: []discovery.Proc{job, proc(11, used, mes)}})

	others, known := d.bystanders(job.Key)
	if diff := cmp.Diff([]gpreempt.GPUID{used}, others); diff != "" || !known {
		t.Errorf("an attach to the job disturbs (-want +got), known %v:\n%s", known, diff)
	}
	d.helperEnded()
	want := map[gpreempt.GPUID]uint64{used: 1, own: 1}
	if diff := cmp.Diff(want, d.events.Totals(0).AttachCycles); diff != "" {
		t.Errorf("the end of a helper costs (-want +got):\n%s", diff)
	}
}

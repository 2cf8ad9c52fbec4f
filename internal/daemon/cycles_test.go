package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/gpreempt/gpreempt/internal/events"
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
	d.countHelperExit()
	cycles := map[string]float64{}
	metrics := make(chan prometheus.Metric, 1000)
	events.NewCollector(func() events.MetricsSnapshot { return events.MetricsSnapshot{Log: d.events} }).Collect(metrics)
	close(metrics)
	for m := range metrics {
		var v dto.Metric
		if strings.Contains(m.Desc().String(), `"gpreempt_gpu_attach_cycles_total"`) && m.Write(&v) == nil {
			cycles[v.GetLabel()[0].GetValue()] = v.GetCounter().GetValue()
		}
	}
	if diff := cmp.Diff(map[string]float64{"1": 1, "2": 1}, cycles); diff != "" {
		t.Errorf("the end of a helper costs (-want +got):\n%s", diff)
	}
}

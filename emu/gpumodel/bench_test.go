package gpumodel

import (
	"io/fs"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// busy returns a machine whose processes keep all their queues busy.
func busy(b *testing.B, spec Spec, procs, queues int) (rig, []gpreempt.ProcessKey) {
	b.Helper()
	r := newRig(b, spec, 1)
	var keys []gpreempt.ProcessKey
	for range procs {
		key := r.start("busy", queues, 0)
		keys = append(keys, key)
	}
	for _, key := range keys {
		for q := range queues {
			k := Packet{Duration: ms, Occupancy: 0.2, Jitter: 0.1}
			k.Done = func(_, _ time.Duration) { r.ok(r.Submit(key, uint32(q), k)) }
			r.ok(r.Submit(key, uint32(q), k))
			r.ok(r.Submit(key, uint32(q), k))
		}
	}
	return r, keys
}

func BenchmarkEvents(b *testing.B) {
	r, _ := busy(b, hws(), 4, 4)
	b.ReportAllocs()
	before := r.fired
	for b.Loop() {
		next, _ := r.Next()
		r.AdvanceTo(next)
	}
	b.ReportMetric(float64(r.fired-before)/b.Elapsed().Seconds(), "events/s")
}

func BenchmarkEventsWhileTakingTurns(b *testing.B) {
	spec := hws()
	spec.Slots = 8
	r, _ := busy(b, spec, 8, 4)
	b.ReportAllocs()
	before := r.fired
	for b.Loop() {
		next, _ := r.Next()
		r.AdvanceTo(next)
	}
	b.ReportMetric(float64(r.fired-before)/b.Elapsed().Seconds(), "events/s")
}

// BenchmarkDebugfs reads the files of a host with 8 GPUs on which 20 processes have 4
// queues each.
func BenchmarkDebugfs(b *testing.B) {
	spec, err := PresetByName("mi300x")
	if err != nil {
		b.Fatal(err)
	}
	r := newRig(b, spec, 8)
	for i := range 20 {
		r.start("p", 4, i%8)
	}
	for _, name := range []string{"mqds", "hqds"} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				text, err := fs.ReadFile(r.FS(), "sys/kernel/debug/kfd/"+name)
				if err != nil {
					b.Fatal(err)
				}
				b.SetBytes(int64(len(text)))
			}
		})
	}
	// How long the machine is held meanwhile.
	b.Run("looking", func(b *testing.B) {
		for b.Loop() {
			r.viewMQDs()
			r.viewHQDs()
		}
	})
}

package engine

import (
	"testing"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// BenchmarkPackets is one process that puts the shortest kernels on a ring as fast as
// they are taken. What is measured is the engine, not a GPU.
func BenchmarkPackets(b *testing.B) {
	const packets = 20_000
	for b.Loop() {
		w := realWorld(b, "mi300x")
		cmd, out := startChild(b, w, packets, 1)
		got, err := out.ReadString('\n')
		if want := expected(packets) + "\n"; got != want || err != nil {
			b.Fatalf("the process sees %q, want %q: %v", got, want, err)
		}
		if err := cmd.Wait(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(packets*b.N)/b.Elapsed().Seconds(), "packets/s")
}

// BenchmarkIdleDoorbells is one look at the doorbells of 80 queues nobody rings: the
// poller does it a thousand times a second.
func BenchmarkIdleDoorbells(b *testing.B) {
	w := realWorld(b, "mi300x")
	for range 80 {
		w.unmapped(gpreempt.QueueCompute, 1024)
	}
	for b.Loop() {
		if _, idle := w.rung(nil); idle {
			b.Fatal("there is nothing to watch")
		}
	}
}

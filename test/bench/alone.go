package main

import (
	"context"
	"fmt"
)

// step is section j.
func (b *bench) step(ctx context.Context) error {
	all, err := b.goBenchmark(ctx, "./pkg/scheduler", "^Benchmark(Step|Round)$", b.benchtime())
	if err != nil {
		return err
	}
	b.figure("j", "Core.Step, p50", "ns", all["Step"]["p50-ns/step"]).atMost(2000)
	b.figure("j", "Core.Step, allocations", "allocs", all["Step"]["allocs/op"]).atMost(0)
	b.figure("j", "the one Step that takes 64 targets off, p50", "ns", all["Round/64-targets-lease-on-8-gpus"]["p50-ns/announce"])
	return nil
}

// discovery is section k.
func (b *bench) discovery(ctx context.Context) error {
	parsers, err := b.goBenchmark(ctx, "./pkg/discovery/debugfs", "^BenchmarkParse", b.benchtime())
	if err != nil {
		return err
	}
	for _, p := range []struct{ what, benchmark string }{{"mqds", "ParseMQDs/xccs=4"}, {"hqds", "ParseHQDs"}} {
		b.figure("k", "parse "+p.what, "MB/s", parsers[p.benchmark]["best-MB/s"]).atLeast(400)
		b.figure("k", "parse "+p.what+" / read the numbers", "x", parsers[p.benchmark]["x-reading"])
	}
	sizes, pattern := []int{10, 100, 1000}, "^BenchmarkScan$"
	if b.quick {
		sizes, pattern = []int{100}, "^BenchmarkScan$/^processes=100$/^unchanged$"
	}
	scans, err := b.goBenchmark(ctx, "./pkg/discovery", pattern, b.benchtime())
	if err != nil {
		return err
	}
	for _, processes := range sizes {
		name := fmt.Sprintf("scan %d processes x 5 queues, ", processes)
		unchanged := scans[fmt.Sprintf("Scan/processes=%d/unchanged", processes)]
		b.figure("k", name+"unchanged / fewest system calls, CPU", "x", unchanged["times-least"])
		took := b.figure("k", name+"unchanged, CPU", "ms", unchanged["cpu-ms/scan"])
		if processes == 1000 {
			took.atMost(25)
		}
		if !b.quick {
			b.figure("k", name+"the first, CPU", "ms", scans[fmt.Sprintf("Scan/processes=%d/first", processes)]["cpu-ms/scan"])
		}
	}
	return nil
}

// idle is section l.
func (b *bench) idle(ctx context.Context) error {
	all, err := b.goBenchmark(ctx, "./internal/daemon", "^BenchmarkIdle$", "3x")
	if err != nil {
		return err
	}
	for _, queues := range []int{80, 1000} {
		v := all[fmt.Sprintf("Idle/queues=%d", queues)]
		name := fmt.Sprintf("idle daemon, %d queues, ", queues)
		b.figure("l", name+"CPU", "% of a core", v["%core"]).atMost(0.3)
		b.figure("l", name+"resident", "MiB", v["resident-MiB"]).atMost(40)
	}
	return nil
}

// benchtime is how long each Go benchmark runs in each repeat.
func (b *bench) benchtime() string {
	if b.quick {
		return "30ms"
	}
	return "100ms"
}

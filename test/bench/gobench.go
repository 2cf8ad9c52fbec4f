package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// goBenchmark runs benchmarks of a package, and returns the values of each repeat by
// name and unit. Their output goes into bench.txt unchanged.
func (b *bench) goBenchmark(ctx context.Context, dir, pattern, benchtime string) (map[string]map[string][]float64, error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", pattern, "-benchmem",
		"-benchtime", benchtime, "-count", strconv.Itoa(b.repeats), dir)
	// Files on a tmpfs are closest to those of sysfs and /proc.
	cmd.Env = append(os.Environ(), "TMPDIR=/dev/shm")
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			out = append(out, exit.Stderr...)
		}
		return nil, fmt.Errorf("%v: %w\n%s", cmd.Args, err, out)
	}
	b.report.GoBenchmarks += string(out)
	all := parseBenchmarks(string(out))
	if len(all) == 0 {
		return nil, fmt.Errorf("%v ran no benchmark:\n%s", cmd.Args, out)
	}
	return all, nil
}

// parseBenchmarks reads lines such as "BenchmarkRound/1-target-2  100  5 ns/op  3 allocs/op".
func parseBenchmarks(text string) map[string]map[string][]float64 {
	all := map[string]map[string][]float64{}
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		name := strings.TrimPrefix(fields[0], "Benchmark")
		if dash := strings.LastIndexByte(name, '-'); dash >= 0 { // GOMAXPROCS, absent when it is 1
			if _, err := strconv.Atoi(name[dash+1:]); err == nil {
				name = name[:dash]
			}
		}
		if all[name] == nil {
			all[name] = map[string][]float64{}
		}
		for i := 2; i+1 < len(fields); i += 2 {
			if v, err := strconv.ParseFloat(fields[i], 64); err == nil {
				all[name][fields[i+1]] = append(all[name][fields[i+1]], v)
			}
		}
	}
	return all
}

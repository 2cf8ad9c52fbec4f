// Command fleetscale measures what a fleet's metrics cost a real Prometheus. The hosts are
// SIMULATED: each is the daemon's own scheduler, event log and metrics, with invented work,
// and all are served by this process. docs/lab/fleet-scale.md describes the figures.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Stdout, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "fleetscale:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	hosts, gpus, repeats int
	interval, window     time.Duration
	native               bool
	grafana              string
	prometheus           string // the path of the program
}

func run(ctx context.Context, out io.Writer, args []string) error {
	var o options
	flags := flag.NewFlagSet("fleetscale", flag.ContinueOnError)
	flags.IntVar(&o.hosts, "hosts", 1000, "simulated hosts")
	flags.IntVar(&o.gpus, "gpus", 8, "GPUs of each host")
	flags.DurationVar(&o.interval, "interval", 15*time.Second, "between two scrapes of a host; rules are evaluated as often")
	flags.DurationVar(&o.window, "time", 5*time.Minute, "how long scraping is measured, and the range of queries; at least four intervals")
	flags.IntVar(&o.repeats, "repeats", 3, "how often each query is made")
	flags.BoolVar(&o.native, "native", false, "scrape native histograms, which the dashboard does not read: no queries")
	flags.StringVar(&o.grafana, "grafana", "deploy/grafana", "`directory` of dashboard and alert rules")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if o.hosts < 1 || o.gpus < 1 || o.repeats < 1 || o.interval < time.Second || o.window < 4*o.interval {
		return errors.New("at least one host, GPU and repeat, an interval of 1s and a time of four intervals are needed")
	}
	var err error
	if o.prometheus, err = exec.LookPath("prometheus"); err != nil {
		_, err := fmt.Fprintln(out, "SKIP fleet-scale: prometheus is not installed: apt-get install --no-install-recommends prometheus")
		return err
	}
	r, err := measure(ctx, o)
	if err != nil {
		return err
	}
	return r.write(out)
}

// measure makes one run.
func measure(ctx context.Context, o options) (r *report, err error) {
	began := time.Now()
	say := func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "%4.0f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	dir, err := os.MkdirTemp("", "gp-fleet-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	f, err := startFleet(ctx, o.hosts, o.gpus)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	text, err := f.scrape(ctx, 0)
	if err != nil {
		return nil, err
	}
	r = &report{options: o, taken: began, cpus: runtime.GOMAXPROCS(0), kinds: kinds(text), plain: len(text)}
	if err := f.writeTargets(filepath.Join(dir, targetsFile), "first"); err != nil {
		return nil, err
	}
	p, err := startPrometheus(ctx, o, dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	say("%d simulated hosts with %d GPUs", o.hosts, o.gpus)
	if err := p.awaitUp(ctx, o, "first"); err != nil {
		return nil, err
	}

	say("measuring scrapes for %v", o.window)
	if r.from, err = p.usage(ctx); err != nil {
		return nil, err
	}
	sent := f.sent()
	if err := sleep(ctx, o.window); err != nil {
		return nil, err
	}
	if r.to, err = p.usage(ctx); err != nil {
		return nil, err
	}
	r.traffic = f.sent().since(sent)
	if r.down, r.slowest, err = p.scrapes(ctx, o); err != nil {
		return nil, err
	}
	if !o.native {
		say("queries")
		if err := p.ask(ctx, r); err != nil {
			return nil, err
		}
	}
	if r.disk, err = p.snapshot(ctx); err != nil {
		return nil, err
	}

	say("every host gets another label, as by a rollout of pods")
	if r.before, err = p.usage(ctx); err != nil {
		return nil, err
	}
	if err := f.writeTargets(filepath.Join(dir, targetsFile), "second"); err != nil {
		return nil, err
	}
	if err := p.awaitUp(ctx, o, "second"); err != nil {
		return nil, err
	}
	if r.after, err = p.usage(ctx); err != nil {
		return nil, err
	}
	r.load = loadAverage()
	say("done")
	return r, nil
}

// sleep waits for d, or for the end of ctx, whose cause it returns.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}

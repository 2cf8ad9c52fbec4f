// Command bench measures what the daemon adds to gRPC, to the driver and to an idle
// machine. Every figure is a ratio inside one run, or is printed beside one: the two
// sides are interleaved, so a noisy machine disturbs both alike. docs/performance.md
// describes each section.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// The servers run as children of this program.
const (
	serveEchoCommand   = "serve-echo"
	serveDaemonCommand = "serve-daemon"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 2 {
		switch args[0] {
		case serveEchoCommand:
			return serve(ctx, func(ctx context.Context) error { return serveEcho(ctx, args[1]) })
		case serveDaemonCommand:
			var spec hostSpec
			if err := json.Unmarshal([]byte(args[1]), &spec); err != nil {
				return err
			}
			return serve(ctx, func(ctx context.Context) error { return serveDaemon(ctx, spec) })
		}
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	quick := flags.Bool("quick", false, "measure the guarded ratios only, in under a minute, and fail when one has grown by half")
	only := flags.String("only", "", "measure these sections only, such as de")
	other := flags.String("other", "", "interleave with the checkout at this `path`, of an earlier commit, and print new / old (with -only)")
	pairs := flags.Int("pairs", 5, "with -other, how often both are measured")
	out := flags.String("o", "build", "directory for bench.txt, or bench-quick.txt")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *quick {
		r, verdicts, err := guard(ctx, *only)
		if err != nil {
			return err
		}
		if err := errors.Join(writeVerdicts(os.Stdout, verdicts), r.write(filepath.Join(*out, "bench-quick.txt")), r.whole()); err != nil {
			return err
		}
		if regressed(verdicts) != "" {
			return errors.New("a ratio has grown by half: run make bench for details; if the growth is intended, update the reference in test/bench/guard.go")
		}
		return nil
	}
	if *other != "" {
		if *only == "" || *pairs < 1 {
			return errors.New("-other needs the sections: -only defh, and at least one pair")
		}
		return compare(ctx, os.Stdout, *other, *only, *pairs)
	}
	r, err := measure(ctx, false, *only)
	if err != nil {
		return err
	}
	return errors.Join(r.writeTable(os.Stdout), r.write(filepath.Join(*out, "bench.txt")), r.whole())
}

// serve runs a server until standard input ends.
func serve(ctx context.Context, server func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends with the process
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return server(ctx)
}

// bench is a run.
type bench struct {
	self    string // the path of this program
	dir     string // for sockets and logs
	quick   bool
	repeats int
	hosts   int // that were started
	began   time.Time
	report  report
}

// sections lists the measurements in order; the quick ones have guarded ratios.
var sections = []struct {
	letters string
	what    string
	quick   bool
	measure func(*bench, context.Context) error
}{
	{"abcde", "calls", true, (*bench).calls},
	{"f", "targets at no cost", true, (*bench).manyTargets},
	{"g", "targets at a modelled cost", false, (*bench).parallel},
	{"h", "through the emulated driver", false, (*bench).throughDriver},
	{"i", "many clients", false, (*bench).crowds},
	{"j", "Core.Step", false, (*bench).step},
	{"k", "discovery", true, (*bench).discovery},
	{"l", "an idle daemon", false, (*bench).idle},
	{"m", "gpctl top", false, (*bench).top},
	{"n", "several hosts at once", false, (*bench).groups},
	{"o", "a fleet", false, (*bench).fleet},
	{"p", "reading the driver's dumps", false, (*bench).dumps},
}

func measure(ctx context.Context, quick bool, only string) (r *report, err error) {
	b := &bench{quick: quick, repeats: 5, began: time.Now()}
	if quick {
		b.repeats = 9
	}
	b.report = report{taken: b.began, cpus: runtime.GOMAXPROCS(0)}
	if b.self, err = os.Executable(); err != nil {
		return nil, err
	}
	if b.dir, err = os.MkdirTemp("", "gp-bench-"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	echoes, err := b.start(ctx, "echo", serveEchoCommand, b.dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, echoes.stop()) }()
	for _, s := range sections {
		if quick && !s.quick || only != "" && !strings.ContainsAny(s.letters, only) {
			continue
		}
		b.say("%s: %s", s.letters, s.what)
		if err := s.measure(b, ctx); err != nil {
			return nil, fmt.Errorf("section %s: %w", s.letters, err)
		}
	}
	b.say("done")
	return &b.report, nil
}

// say prints progress.
func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%4.0f s  %s\n", time.Since(b.began).Seconds(), fmt.Sprintf(format, args...))
}

// rounds returns the number of rounds in a repeat, given that of a full run.
func (b *bench) rounds(full int) int {
	if b.quick {
		return full / 3
	}
	return full
}

// series adds a series to the report.
func (b *bench) series(section, name string) *series {
	s := &series{Section: section, Name: name}
	b.report.Series = append(b.report.Series, s)
	return s
}

// figure adds a figure to the report.
func (b *bench) figure(section, name, unit string, all []float64) *figure {
	if len(all) == 0 { // a Go benchmark that has been renamed
		b.report.missing = append(b.report.missing, name)
		all = []float64{0}
	}
	f := newFigure(section, name, unit, all)
	b.report.Figures = append(b.report.Figures, f)
	return f
}

// writeConfig writes a config file and returns its path.
func (b *bench) writeConfig(text string) (string, error) {
	path := filepath.Join(b.dir, "gpreemptd.yaml")
	return path, os.WriteFile(path, []byte(text), 0o600)
}

// build builds programs of this module, as they are shipped, into the directory.
func (b *bench) build(ctx context.Context, programs ...string) error {
	args := append([]string{"build", "-trimpath", "-buildvcs=false", "-o", b.dir + string(filepath.Separator)}, programs...)
	if out, err := exec.CommandContext(ctx, "go", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

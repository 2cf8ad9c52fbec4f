package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/cmdline"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// exitInterrupted is what a shell reports of a program that Ctrl-C ended.
const exitInterrupted = exitStatus(128 + int(syscall.SIGINT))

func demoCommand() *cobra.Command {
	var d demoRun
	cmd := &cobra.Command{
		Use:   "demo [flags]",
		Short: "Show what gpreempt does for inference latency",
		Long: `Starts gpreemptd, a training job and an inference server on an emulated GPU, and measures
what each of the two sees alone, sharing the GPU without gpreempt, and with gpreempt.
Nothing on the host is touched and no privileges are needed. No figure is a real GPU's.

Where a machine can be emulated (kfdemu check --trace), all are processes on one: the
daemon suspends queues by the system calls that it makes on hardware, and every figure is
EMULATED. Elsewhere, and with --sim, daemon, driver, GPU and programs are in this one
process, and every figure is SIMULATED. On a machine that kfdemu emulates already the
demo uses that machine:

  kfdemu run --profile 7.2 -- kfdemu demo

Fails when a packet of the training job was lost or ran twice, when an announcement was
not answered, when nothing was suspended, or when the median latency or the throughput
misses its target. It says what it does not judge, and why: the p99; on a busy host, or
with fewer than 100 requests, all three.

With --live or --top it measures nothing and keeps everything running. A request that the
daemon does not answer in time runs unprotected there, and is counted.`,
		Args: cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if d.opts.Repeats < 1 || d.opts.Duration < 100*time.Millisecond {
				return errors.New("--repeats must be at least 1 and --duration at least 100ms")
			}
			var err error
			if d.opts.Spec, err = gpumodel.PresetByName(d.opts.Machine); err != nil {
				return fmt.Errorf("--machine: %w", err)
			}
			// The end of the terminal (SIGHUP) ends everything, as Ctrl-C does.
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			defer stop()
			if d.top {
				d.live = true
				if !isTerminal(os.Stdin) || !isTerminal(os.Stdout) {
					return errors.New("--top needs a terminal; use --live, and gpctl top --once 120x40 from elsewhere")
				}
			}
			d.opts.Progress = cmd.ErrOrStderr()
			err = d.run(ctx, cmd)
			if ctx.Err() == nil {
				return err
			}
			if d.live {
				return nil
			}
			return exitInterrupted
		},
	}
	f := cmd.Flags()
	f.StringVar(&d.opts.Machine, "machine", "mi300x", "the kind of GPU: "+strings.Join(presets(), ", "))
	f.Uint64Var(&d.opts.Seed, "seed", 1, "decides the jitter of modelled durations")
	f.IntVar(&d.opts.Repeats, "repeats", 3, "repeats of each arm")
	f.DurationVar(&d.opts.Duration, "duration", 2*time.Second, "how long one repeat lasts")
	f.StringVar(&d.opts.Daemon, "daemon", "", "the gpreemptd to start on an emulated machine; else the one beside kfdemu, or in PATH")
	f.BoolVar(&d.simulate, "sim", false, "simulate, even where a machine can be emulated")
	f.BoolVar(&d.live, "live", false, "measure nothing; keep everything running until Ctrl-C, to look at with gpctl")
	f.BoolVar(&d.top, "top", false, "as --live, with gpctl top in this terminal; its key q ends everything")
	f.StringVar(&d.file, "json", "", "write the figures and the raw samples here; - is standard output, in place of the table")
	f.StringVar(&d.picture, "svg", "", "write the bars as a picture here")
	return cmd
}

// demoRun is a run of kfdemu demo.
type demoRun struct {
	opts                demoOptions
	simulate, live, top bool
	file, picture       string
}

func (d *demoRun) run(ctx context.Context, cmd *cobra.Command) error {
	d.opts.Backend = "simulated " + d.opts.Machine
	if !d.simulate {
		if elsewhere, err := d.emulate(ctx, cmd); elsewhere || err != nil {
			return err
		}
	}
	out := cmd.OutOrStdout()
	if d.live {
		return d.playLive(ctx, out)
	}
	result, err := playDemo(ctx, d.opts)
	if err != nil {
		return err
	}
	if err := d.print(out, result); err != nil {
		return err
	}
	if failed := result.Failed(); len(failed) > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "kfdemu: the demo failed: %s\n  try: report it with the file of --json\n", strings.Join(failed, "; "))
		return exitStatus(1)
	}
	return nil
}

func (d *demoRun) print(out io.Writer, result *Result) (err error) {
	switch d.file {
	case "-":
		return encode(out, result)
	case "":
	default:
		file, err := os.OpenFile(d.file, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644) //nolint:gosec // G302: figures for everybody
		if err != nil {
			return err
		}
		if err := errors.Join(encode(file, result), file.Close()); err != nil {
			return err
		}
	}
	if err := result.Print(out); err != nil {
		return err
	}
	if d.picture != "" {
		if err := os.WriteFile(d.picture, []byte(result.svg()), 0o644); err != nil {
			return err
		}
		fmt.Fprintf(out, "\nChart: %s\n", d.picture)
	}
	if d.file != "" {
		fmt.Fprintf(out, "\nFigures and raw samples: %s\n", d.file)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	sim := ""
	if d.simulate {
		sim = " --sim"
	}
	_, err = fmt.Fprintf(out, `
Next:
  %[1]s demo --live --top%[2]s    # watch each preemption in gpctl top; q ends it
  %[1]s demo --live%[2]s          # keep it running, for gpctl and your own server in another terminal
  %[3]s doctor                # does this host have what gpreempt needs? It changes nothing
`, shortPath(self), sim, shortPath(beside(self, "gpctl")))
	return err
}

// playLive runs the live demo, with gpctl top or with advice on how to look at it.
func (d *demoRun) playLive(ctx context.Context, out io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	gpctl, missing := find(self, "gpctl")
	if d.top {
		if missing != nil {
			return fmt.Errorf("--top: %w", missing)
		}
		var report strings.Builder
		err := liveDemo(ctx, d.opts, &report, func(ctx context.Context, s *stage, _ string) error { return showTop(ctx, gpctl, s.socket) })
		_, printErr := io.WriteString(out, report.String())
		return errors.Join(err, printErr)
	}
	return liveDemo(ctx, d.opts, out, func(ctx context.Context, s *stage, log string) error {
		d.explain(out, shortPath(self), shortPath(beside(self, "gpctl")), s, log)
		<-ctx.Done()
		return nil
	})
}

// beside returns the path of a program in the directory of self.
func beside(self, name string) string { return filepath.Join(filepath.Dir(self), name) }

// shortPath returns the path of a program as a user would type it in this directory.
func shortPath(path string) string {
	dir, err := os.Getwd()
	if err != nil {
		return path
	}
	if short, err := filepath.Rel(dir, path); err == nil && filepath.IsLocal(short) {
		if !strings.Contains(short, "/") {
			return "./" + short
		}
		return short
	}
	return path
}

func encode(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// explain prints how to look at the live demo.
func (d *demoRun) explain(out io.Writer, kfdemu, gpctl string, s *stage, log string) {
	fmt.Fprintf(out, `GPU: %[1]s. A training job (process %[2]d) and an inference server
run until Ctrl-C. To watch them here, start it with %[3]s demo --live --top. From another terminal:

  export GPREEMPT_SOCKET=%[4]s
  %[5]s top                    # GPUs, processes, leases, preemptions
  %[5]s target explain %[2]d    # why the job runs or is suspended
  %[5]s stats                  # latencies
  tail -f %[6]s    # the daemon's log

`, d.opts.Backend, s.pid, kfdemu, s.socket, gpctl, log)
}

// emulate prepares the demo for the emulated machine that this process runs on. On
// another machine it runs the demo on an emulated one, if there can be one, and reports
// that it did; else it says why there can be none.
func (d *demoRun) emulate(ctx context.Context, cmd *cobra.Command) (elsewhere bool, err error) {
	self, err := os.Executable()
	if err != nil {
		return false, err
	}
	daemon, missing := d.opts.Daemon, error(nil)
	if daemon == "" {
		daemon, missing = find(self, "gpreemptd")
	}
	backend := discovery.Backend(discovery.Host("/"))
	if label, emulated := strings.CutPrefix(backend, "emulated "); emulated {
		if missing != nil {
			return false, fmt.Errorf("%w: name it with --daemon", missing)
		}
		asked := ""
		if cmd.Flags().Changed("machine") {
			asked = d.opts.Machine
		}
		d.opts.Emulator, d.opts.Daemon, d.opts.Backend = self, daemon, backend
		if d.opts.Machine, err = emulatedMachine(label, asked); err == nil {
			d.opts.Spec, err = gpumodel.PresetByName(d.opts.Machine)
		}
		if err != nil {
			return false, fmt.Errorf("this is an %s: %w", backend, err)
		}
		return false, nil
	}
	reason := missing
	if reason == nil {
		checking, cancel := context.WithTimeout(ctx, checkTime)
		defer cancel()
		reason = check(checking, d.opts.Machine, true)
	}
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	if reason != nil {
		text := strings.Join(strings.Fields(strings.TrimPrefix(reason.Error(), "kfdemu: ")), " ")
		fmt.Fprintln(cmd.ErrOrStderr(), "demo: simulated, because no machine can be emulated here:", text)
		return false, nil
	}
	cfg := kfdemu.Config{Machine: d.opts.Machine, Profile: "6.12", Seed: d.opts.Seed, Shim: self}
	return true, run(cmd.Context(), cfg, nil, append([]string{self, cmd.Name()}, again(cmd, daemon)...))
}

// again returns the flags of cmd for the same demo on an emulated machine.
func again(cmd *cobra.Command, daemon string) []string {
	args := []string{"--daemon=" + daemon}
	for _, name := range []string{"duration", "json", "live", "machine", "repeats", "seed", "svg", "top"} {
		if f := cmd.Flags().Lookup(name); f.Changed {
			args = append(args, "--"+name+"="+f.Value.String())
		}
	}
	return args
}

// find returns the path of a program: beside self, or in PATH.
func find(self, name string) (string, error) {
	if _, err := os.Stat(beside(self, name)); err == nil {
		return beside(self, name), nil
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("there is no %s beside kfdemu or in PATH", name)
	}
	return path, nil
}

// emulatedMachine returns the kind of GPU of an emulated machine, whose label begins as
// "mi300x x1", if the demo can use it. want is the kind that was asked for, if any.
func emulatedMachine(label, want string) (string, error) {
	words := strings.Fields(label)
	switch {
	case len(words) < 2:
		return "", fmt.Errorf("it calls itself %q", label)
	case want != "" && want != words[0]:
		return "", fmt.Errorf("--machine %s asks for another", want)
	case words[1] != "x1":
		return "", errors.New("the demo needs a machine with one GPU")
	}
	return words[0], nil
}

package cli

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

	"github.com/gpreempt/gpreempt/emu/demo"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
)

// demoCommand plays the product's main job on an emulated or a simulated GPU.
func (a *app) demoCommand() *cobra.Command {
	opts := demo.Options{Progress: a.Err}
	var (
		file      string
		live, sim bool
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show on an emulated GPU what gpreempt does for inference latency",
		Long: `Starts a gpreemptd of its own on a GPU that is none, a training job and an inference
server, and measures what each sees alone, sharing the GPU as it is, and with gpreempt.
Nothing on the host is touched and no rights are needed. No figure is a real GPU's.

Where kfdemu can emulate a machine (kfdemu check --trace), all are processes on that: the daemon
suspends queues by the system calls that it makes on hardware, and every figure is
EMULATED. Elsewhere, and with --sim, the daemon simulates GPU and processes itself, and
every figure is SIMULATED. On a machine that kfdemu emulates already it plays there:

  kfdemu run --profile 7.2 -- gpctl demo

Fails when a packet of the training job was lost or ran twice, or when an
expectation printed at the end was not met.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if opts.Repeats < 1 || opts.Duration < 100*time.Millisecond {
				return usage(cmd, "--repeats must be at least 1 and --duration at least 100ms")
			}
			var err error
			if opts.Spec, err = gpumodel.PresetByName(opts.Machine); err != nil {
				return usage(cmd, "--machine: %v", err)
			}
			opts.Backend = "simulated " + opts.Machine
			if opts.Daemon, err = findDaemon(opts.Daemon); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			if !sim {
				if elsewhere, err := a.emulateDemo(ctx, cmd, &opts); elsewhere || err != nil {
					return err
				}
			}
			if live {
				return demo.Live(ctx, opts, func(socket string) { a.demoIsLive(opts.Backend, socket) })
			}
			result, err := demo.Play(ctx, opts)
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err != nil {
				return err
			}
			if err := saveJSON(file, result); err != nil {
				return err
			}
			if err := a.printDemo(result, file); err != nil {
				return err
			}
			if broken := result.Broken(); len(broken) > 0 {
				return &failure{
					code: ExitFailure, message: "the demo did not keep its promise: " + strings.Join(broken, "; "),
					next: "run it again on an idle machine; if it fails there too, please report it with the JSON file",
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&opts.Machine, "machine", "mi300x", "the kind of GPU, as gpreemptd serve --sim")
	cmd.Flags().Uint64Var(&opts.Seed, "seed", 1, "seed of what is modelled")
	cmd.Flags().IntVar(&opts.Repeats, "repeats", 3, "repeats of each arm")
	cmd.Flags().DurationVar(&opts.Duration, "duration", 4*time.Second, "how long one repeat lasts")
	cmd.Flags().StringVar(&opts.Daemon, "daemon", "", "the gpreemptd to start; else the one beside gpctl, or in PATH")
	cmd.Flags().BoolVar(&sim, "sim", false, "simulate, even where a machine can be emulated")
	cmd.Flags().BoolVar(&live, "live", false, "measure nothing; keep everything running until Ctrl-C, to look at with gpctl")
	cmd.Flags().StringVar(&file, "json", "", "write the figures and the raw samples here")
	return cmd
}

func (a *app) printDemo(result *demo.Result, file string) error {
	if a.output == formatJSON {
		return encode(a.Out, result)
	}
	if err := result.Print(a.Out); err != nil {
		return err
	}
	if file != "" {
		fmt.Fprintf(a.Out, "\nFigures and raw samples: %s\n", file)
	}
	_, err := fmt.Fprintln(a.Out, "\nTry next: gpctl demo --live, and look at it with gpctl from another terminal.")
	return err
}

// demoIsLive says what there is to look at.
func (a *app) demoIsLive(backend, socket string) {
	fmt.Fprintf(a.Out, `A GPU that is none (%s), a training job and an inference
server are running until Ctrl-C. In another terminal:
  export %s=%s
  gpctl status
  gpctl target list
  gpctl target explain PID
  gpctl events --follow
  gpctl stats
`, backend, SocketEnv, socket)
}

// findDaemon returns the gpreemptd to start.
func findDaemon(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	path, err := find("gpreemptd")
	if errors.Is(err, exec.ErrNotFound) {
		return "", &failure{code: ExitFailure, message: "gpreemptd not found next to gpctl or in PATH", next: "use --daemon"}
	}
	return path, err
}

// find looks for a program of ours: beside gpctl, then in PATH.
func find(name string) (string, error) {
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), name)
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	return exec.LookPath(name)
}

func saveJSON(path string, v any) (err error) {
	if path == "" {
		return nil
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644) //nolint:gosec // G302: figures for everybody
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return encode(file, v)
}

func encode(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/demo"
	"github.com/gpreempt/gpreempt/internal/gpusim"
)

// demoCommand plays the product's main job on a simulated GPU.
func (a *app) demoCommand() *cobra.Command {
	opts := demo.Options{Progress: a.Err}
	var (
		file string
		live bool
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show on a simulated GPU what gpreempt does for inference latency",
		Long: `Starts a gpreemptd of its own on a simulated GPU, a training job and an inference
client that speaks to it over gRPC, and measures what each sees alone, sharing the
GPU as it is, and with gpreempt. Nothing on the host is touched and no rights are
needed. Every figure is simulated.

Fails when a packet of the training job was lost or ran twice, or when an
expectation printed at the end was not met.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			spec, err := gpusim.PresetByName(opts.Machine)
			if err != nil {
				return usage(cmd, "--machine: %v", err)
			}
			if opts.Repeats < 1 || opts.Duration < 100*time.Millisecond {
				return usage(cmd, "--repeats must be at least 1 and --duration at least 100ms")
			}
			if opts.Daemon, err = findDaemon(opts.Daemon); err != nil {
				return err
			}
			opts.Spec = spec
			if live {
				return demo.Live(cmd.Context(), opts, a.demoIsLive)
			}
			result, err := demo.Play(cmd.Context(), opts)
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
	cmd.Flags().StringVar(&opts.Machine, "machine", "mi300x", "the simulated machine, as gpreemptd serve --sim")
	cmd.Flags().Uint64Var(&opts.Seed, "seed", 1, "seed of the simulation")
	cmd.Flags().IntVar(&opts.Repeats, "repeats", 3, "repeats of each arm")
	cmd.Flags().DurationVar(&opts.Duration, "duration", 4*time.Second, "how long one repeat lasts")
	cmd.Flags().StringVar(&opts.Daemon, "daemon", "", "the gpreemptd to start; else the one beside gpctl, or in PATH")
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
func (a *app) demoIsLive(socket string) {
	fmt.Fprintf(a.Out, `A simulated GPU, a training job and an inference server are running until Ctrl-C.
In another terminal:
  export %s=%s
  gpctl status
  gpctl target list
  gpctl target explain PID
  gpctl events --follow
  gpctl stats
`, SocketEnv, socket)
}

// findDaemon gives the gpreemptd to start.
func findDaemon(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "gpreemptd")
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	path, err := exec.LookPath("gpreemptd")
	if errors.Is(err, exec.ErrNotFound) {
		return "", &failure{code: ExitFailure, message: "there is no gpreemptd beside gpctl or in PATH", next: "name it with --daemon"}
	}
	return path, err
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

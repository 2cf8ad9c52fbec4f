// Command kfdemu runs unmodified programs on an emulated machine with AMD GPUs.
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
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/cmdline"
)

// socketEnv is the variable with the machine's socket in the environment of its programs.
const socketEnv = "KFDEMU_SOCKET"

// exitTrouble is the exit status of kfdemu when it fails itself; else it ends as the program
// does.
const exitTrouble = 125

func main() {
	err := command().Execute()
	var ended *exec.ExitError
	var status exitStatus
	switch {
	case err == nil:
	case errors.As(err, &status):
		os.Exit(int(status))
	case errors.As(err, &ended):
		os.Exit(exitCode(ended))
	default:
		fmt.Fprintln(os.Stderr, "kfdemu:", strings.TrimPrefix(err.Error(), "kfdemu: "))
		os.Exit(exitTrouble)
	}
}

// exitCode returns the exit code of a shell: 128 and the signal for a killed program.
func exitCode(ended *exec.ExitError) int {
	if status, ok := ended.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return ended.ExitCode()
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "kfdemu",
		Short: "Run unmodified programs on an emulated machine with AMD GPUs",
		Long: `kfdemu gives programs a /dev/kfd, render nodes and the kernel's files about them, and
answers their system calls by the rules of AMD's compute driver. The packets on their
queues are executed in their memory, for the time that a model of the GPU takes.

Everything is EMULATED: no figure says anything about a real GPU.`,
		Version:       api.VersionString(),
		SilenceErrors: true, SilenceUsage: true,
		Args: cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmdline.Answer(root)
	root.AddCommand(runCommand(), withDaemonCommand(), execCommand(), checkCommand(), serveSimCommand(), demoCommand(), workCommand(), answerCommand(), softGPUCommand())
	return root
}

func runCommand() *cobra.Command {
	var (
		cfg    kfdemu.Config
		faults []string
		log    string
		daemon bool
	)
	cmd := &cobra.Command{
		Use:   "run [flags] -- PROGRAM [ARGUMENT...]",
		Short: "Emulate a machine for as long as a program runs",
		Long: `Emulates a machine, runs the program on it, and ends as the program does. What the
program starts runs on the machine, too; others join with kfdemu exec. The machine
lasts until the program and all others on it have ended.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			var injected []kfdemu.Fault
			for _, text := range faults {
				f, err := kfdemu.ParseFault(text)
				if err != nil {
					return err
				}
				injected = append(injected, f)
			}
			if cfg.Shim, err = lookBeside(); err != nil {
				return err
			}
			if log != "" {
				var closeLog func() error
				if cfg.Event, closeLog, err = logTo(log); err != nil {
					return err
				}
				defer func() { err = errors.Join(err, closeLog()) }()
			}
			if daemon {
				args = append([]string{cfg.Shim, withDaemon}, args...)
			}
			return run(cmd.Context(), cfg, injected, args)
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.StringVar(&cfg.Machine, "machine", "mi300x", "the kind of GPU: "+strings.Join(presets(), ", "))
	f.IntVar(&cfg.GPUs, "gpus", 1, "how many of them, or of their partitions")
	f.StringVar(&cfg.Profile, "profile", "6.12", "whose driver's rules: "+strings.Join(append(driver.Profiles(), driver.KmapProfile), ", "))
	f.Uint64Var(&cfg.Seed, "seed", 1, "decides the jitter of modelled durations")
	f.DurationVar(&cfg.KernelTime, "kernel-time", time.Millisecond, "the duration of a kernel that does not define its own")
	f.StringArrayVar(&faults, "fault", nil, "a fault to inject, such as SUSPEND_QUEUES#2:errno=EIO or step=unmap:delay=9s; repeat for more")
	f.BoolVar(&daemon, "daemon", false, "start the gpreemptd beside kfdemu on it first, for the program; gplab and gpctl find both")
	f.StringVar(&log, "log", "", "write events to this file, a line of JSON each; - is standard error")
	return cmd
}

func presets() []string {
	var names []string
	for _, spec := range gpumodel.Presets() {
		names = append(names, spec.Name)
	}
	return names
}

// logTo writes events to a file.
func logTo(name string) (event func(kfdemu.Event), end func() error, err error) {
	var out io.WriteCloser = os.Stderr
	if name != "-" {
		if out, err = os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600); err != nil {
			return nil, nil, err
		}
	}
	encoder := json.NewEncoder(out)
	var failed error
	event = func(v kfdemu.Event) {
		if failed == nil {
			failed = encoder.Encode(v)
		}
	}
	return event, func() error {
		if name == "-" {
			return failed
		}
		return errors.Join(failed, out.Close())
	}, nil
}

// lookBeside returns the path of this program, and puts its folder into PATH, so that the programs of a build find
// each other. A folder that is in PATH stays in its place: before it may be a virtual environment.
func lookBeside() (self string, err error) {
	if self, err = os.Executable(); err != nil {
		return "", err
	}
	path := os.Getenv("PATH")
	if slices.Contains(filepath.SplitList(path), filepath.Dir(self)) {
		return self, nil
	}
	return self, os.Setenv("PATH", filepath.Dir(self)+string(os.PathListSeparator)+path)
}

// run emulates a machine while a program runs on it.
func run(ctx context.Context, cfg kfdemu.Config, faults []kfdemu.Fault, args []string) (err error) {
	// The program receives the terminal's signals, too, and decides when to end.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)

	machine, err := kfdemu.New(cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, machine.Close()) }()
	for _, f := range faults {
		machine.Inject(f)
	}
	program := machine.Command(ctx, args[0], args[1:]...)
	program.Stdin, program.Stdout, program.Stderr = os.Stdin, os.Stdout, os.Stderr
	program.Env = append(os.Environ(), socketEnv+"="+machine.Socket())
	err = runWithSignals(program, signals, func(os.Signal) bool { return true })
	return errors.Join(err, machine.AwaitUnused())
}

// runWithSignals runs a program to its end, and passes it the signals that it is meant to have from here.
func runWithSignals(program *exec.Cmd, signals <-chan os.Signal, passes func(os.Signal) bool) error {
	if err := program.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		for {
			select {
			case s := <-signals:
				if passes(s) {
					_ = program.Process.Signal(s) // it may have ended at this moment, which Wait reports
				}
			case <-ended:
				return
			}
		}
	}()
	err := program.Wait()
	close(ended)
	return err
}

func execCommand() *cobra.Command {
	var socket string
	cmd := &cobra.Command{
		Use:   "exec [--socket PATH] -- PROGRAM [ARGUMENT...]",
		Short: "Run a program on a machine that kfdemu run emulates",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if socket == "" {
				return fmt.Errorf("no machine to join: name its socket with --socket, or run this under kfdemu run, which sets %s", socketEnv)
			}
			if _, err := lookBeside(); err != nil {
				return err
			}
			return kfdemu.Exec(socket, args[0], args, os.Environ())
		},
	}
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringVar(&socket, "socket", os.Getenv(socketEnv), "the machine's, $"+socketEnv+" if not given")
	return cmd
}

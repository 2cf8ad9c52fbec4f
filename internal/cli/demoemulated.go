package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/emu/demo"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// demoFlags are those that gpctl is given again when the emulator runs it.
var demoFlags = []string{"daemon", "duration", "json", "live", "machine", "output", "repeats", "seed"}

// emulateDemo has the demo played on an emulated machine, if that can be: on the one
// gpctl runs on, which it puts into opts, or elsewhere: gpctl becomes the emulator, which
// runs it again. Otherwise it says why not.
func (a *app) emulateDemo(ctx context.Context, cmd *cobra.Command, opts *demo.Options) (elsewhere bool, err error) {
	emulator, missing := find("kfdemu")
	backend := discovery.Backend(discovery.Host("/"))
	if label, emulated := strings.CutPrefix(backend, "emulated "); emulated {
		if missing != nil {
			return false, &failure{code: ExitFailure, message: "there is no kfdemu beside gpctl or in PATH, which has the programs to play"}
		}
		opts.Emulator, opts.Backend = emulator, backend
		if opts.Machine, err = emulatedMachine(label, given(cmd, "machine", opts.Machine)); err == nil {
			opts.Spec, err = gpumodel.PresetByName(opts.Machine)
		}
		if err != nil {
			return false, usage(cmd, "this runs on an %s: %v", backend, err)
		}
		return false, nil
	}
	reason := "there is no kfdemu beside gpctl or in PATH"
	if missing == nil {
		reason = cannotEmulate(ctx, emulator, opts.Machine)
	}
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	if reason != "" {
		fmt.Fprintln(a.Err, "demo: simulated, because no machine for it can be emulated here:", reason)
		return false, nil
	}
	self, err := os.Executable()
	if err != nil {
		return false, err
	}
	args := []string{emulator, "run", "--machine", opts.Machine, "--seed", fmt.Sprint(opts.Seed), "--", self, cmd.Name()}
	for _, name := range demoFlags {
		if f := cmd.Flags().Lookup(name); f.Changed {
			args = append(args, "--"+name+"="+f.Value.String())
		}
	}
	return true, a.become(args, a.Environ())
}

// given is the value of a flag, "" if it was not given.
func given(cmd *cobra.Command, name, value string) string {
	if cmd.Flags().Changed(name) {
		return value
	}
	return ""
}

// emulatedMachine returns the kind of GPU of an emulated machine, whose label begins as
// "mi300x x1", if the demo can be played on it. want is the kind that was asked for, if
// any.
func emulatedMachine(label, want string) (string, error) {
	words := strings.Fields(label)
	switch {
	case len(words) < 2:
		return "", fmt.Errorf("it calls itself %q", label)
	case want != "" && want != words[0]:
		return "", fmt.Errorf("--machine %s asks for another", want)
	case words[1] != "x1":
		return "", errors.New("the demo is played on a machine with one GPU")
	}
	return words[0], nil
}

// cannotEmulate says why a machine cannot be emulated, in a line; "" if it can.
func cannotEmulate(ctx context.Context, emulator, machine string) string {
	check := exec.CommandContext(ctx, emulator, "check", "--trace", "--machine", machine) //nolint:gosec // G204: our own program
	check.WaitDelay = time.Second
	out, err := check.CombinedOutput()
	if err == nil {
		return ""
	}
	text := strings.TrimPrefix(strings.TrimSpace(string(out)), "kfdemu: ")
	if text == "" {
		text = err.Error()
	}
	return strings.Join(strings.Fields(text), " ")
}

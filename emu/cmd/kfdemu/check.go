package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/cmdline"
)

// checkTime bounds a check, which takes a quarter of a second on an idle host.
const checkTime = 20 * time.Second

func checkCommand() *cobra.Command {
	var (
		machine string
		trace   bool
	)
	cmd := &cobra.Command{
		Use:   "check [--machine NAME] [--trace]",
		Short: "Check whether a machine can be emulated here",
		Long: `Emulates a machine and runs a packet on it. If that does not work, prints what is missing
and ends with 125.`,
		Args: cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), checkTime)
			defer cancel()
			if err := check(ctx, machine, trace); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s can be emulated here\n", machine)
			return err
		},
	}
	cmd.Flags().StringVar(&machine, "machine", "mi300x", "the kind of GPU: "+strings.Join(presets(), ", "))
	cmd.Flags().BoolVar(&trace, "trace", false, "and check whether its programs may trace each other, as gpreemptd must")
	return cmd
}

// check runs a packet on a machine, and with trace also checks what the program may trace.
func check(ctx context.Context, name string, trace bool) (err error) {
	shim, err := os.Executable()
	if err != nil {
		return err
	}
	machine, err := kfdemu.New(kfdemu.Config{Machine: name, Shim: shim})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, machine.Close()) }()
	var said bytes.Buffer
	program, err := startSample(ctx, &said, machine.Command(ctx, shim, "answer", "--packets", "1"))
	var untraced error
	if err == nil {
		if trace {
			untraced = tracing(program.pid()) // it waits for input
		}
		_, answered := program.ask(ctx, "", "answer")
		err = errors.Join(answered, program.finish())
	}
	if err != nil {
		return fmt.Errorf("a program on the machine failed: %w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	return untraced
}

const ptraceScopeFile = "/proc/sys/kernel/yama/ptrace_scope"

// tracing returns why a program on the machine may not trace all others there, nil if it
// may.
func tracing(pid int) error {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return fmt.Errorf("read the privileges of a program on the machine: %w", err)
	}
	scope, err := os.ReadFile(ptraceScopeFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // the security module Yama is optional
		return err
	}
	return mayTrace(string(status), strings.TrimSpace(string(scope)))
}

// mayTrace is tracing by the program's /proc/PID/status and by Yama's setting, "" without
// Yama.
func mayTrace(status, scope string) error {
	_, rest, _ := strings.Cut(status, "\nCapEff:")
	mask, _, _ := strings.Cut(rest, "\n")
	capabilities, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
	const sysPtrace = 1 << 19
	switch {
	case err != nil:
		return fmt.Errorf("read the privileges of a program on the machine: CapEff in /proc/PID/status: %w", err)
	case capabilities&sysPtrace == 0:
		return errors.New("its programs may not trace each other, as gpreemptd must: they have no CAP_SYS_PTRACE; run this as root")
	case scope == "3":
		return fmt.Errorf("its programs may not trace each other, as gpreemptd must: %s is 3 until the next boot", ptraceScopeFile)
	}
	return nil
}

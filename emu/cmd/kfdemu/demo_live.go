package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// liveDemo starts the daemon, the job and the inference server, and keeps them running until
// show returns or ctx ends. A request without an answer of the daemon runs unprotected, which
// is counted and reported on out. Daemon and programs write to a file, and not into the
// terminal; after a failure the file is printed.
func liveDemo(ctx context.Context, o demoOptions, out io.Writer, show func(ctx context.Context, s *stage, log string) error) (err error) {
	log, err := os.CreateTemp("", "gpreempt-demo-*.log")
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	terminal := o.Progress
	o.Progress = log
	defer func() {
		if err != nil && ctx.Err() == nil {
			text, readErr := os.ReadFile(log.Name())
			err = errors.Join(err, readErr)
			_, _ = terminal.Write(text) // the error that is returned matters more
		}
		err = errors.Join(err, log.Close(), os.Remove(log.Name()))
	}()
	s, err := open(ctx, o, client.Request{GPUs: client.AllGPUs(), Label: demoLabel}, client.OnUnprotected(func(cause error) { reportProtection(out, cause) }))
	if err != nil {
		return err
	}
	served, unprotected := 0, 0
	defer func() {
		err = andThen(err, s.close())
		if served > 0 {
			fmt.Fprintf(out, "%d requests were answered, %d of them unprotected.\n", served, unprotected)
		}
	}()
	if err := s.startJob(ctx, Protected); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	showing, cancel := context.WithCancel(ctx)
	defer cancel()
	shown := make(chan error, 1)
	go func() {
		defer cancel()
		shown <- show(showing, s, log.Name())
	}()
	served, unprotected, err = s.serveOn(showing, o)
	cancel()
	return errors.Join(err, <-shown)
}

// serveOn serves requests until ctx ends, and returns how many, and how many without a lease.
func (s *stage) serveOn(ctx context.Context, o demoOptions) (served, unprotected int, err error) {
	for ctx.Err() == nil {
		if s.daemon.hasEnded() {
			return served, unprotected, errors.New("demo: the daemon ended by itself")
		}
		var run Run
		if err := s.serve(ctx, &run, true, o.Duration); err != nil && ctx.Err() == nil {
			return served, unprotected, fmt.Errorf("demo: %w", err)
		}
		served += run.served
		unprotected += run.unprotected
	}
	return served, unprotected, nil
}

// reportProtection prints that requests run unprotected, or that they no longer do.
func reportProtection(out io.Writer, cause error) {
	if cause == nil {
		fmt.Fprintln(out, "Requests are protected again.")
		return
	}
	text := cause.Error()
	if refusal, ok := errors.AsType[*gpreempt.Error](cause); ok {
		text = refusal.Message // its next step is for a daemon that systemd runs
	}
	fmt.Fprintf(out, "Requests run unprotected: %s\n", text)
}

// showTop runs gpctl top in this terminal, until the user ends it or ctx ends.
func showTop(ctx context.Context, gpctl, socket string) error {
	cmd := exec.CommandContext(ctx, gpctl, "--socket", socket, "top") //nolint:gosec // G204: beside this program or in PATH
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = maxWait
	if err := cmd.Run(); err != nil && ctx.Err() == nil {
		return fmt.Errorf("gpctl top: %w", err)
	}
	return nil
}

// isTerminal reports whether a file is a character device, as terminals are.
func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

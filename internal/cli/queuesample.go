package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// leastInterval is the shortest interval of samples.
	leastInterval = 100 * time.Millisecond
	// waitInterval is the interval of --wait.
	waitInterval = 250 * time.Millisecond
)

// sampleProgress selects the queues to sample, how often and how long.
type sampling struct {
	pid                int32
	container, name    string
	all, wait          bool
	duration, interval time.Duration

	// target is the process with the pid, once found.
	target string
	// before are the processes that --all --wait ignores.
	before map[string]bool
}

func queueSample(a *term.App) *cobra.Command {
	var s sampling
	cmd := &cobra.Command{
		Use:   "sample",
		Short: "Sample queues repeatedly and summarize",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.check(cmd); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			seen := &samples{}
			var machine string
			// The connection has another context than the interruption: a request in
			// progress then is not an error of the daemon.
			err := a.Stream(context.WithoutCancel(ctx), func(_ context.Context, admin term.AdminClient) error {
				st, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.GetStatusResponse, error) {
					return admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
				})
				if err != nil {
					return err
				}
				machine = term.Simulated(st)
				return sample(ctx, a, admin, &s, seen)
			})
			interrupted := ctx.Err() != nil
			stop()
			sampleProgress(a, "")
			switch {
			case len(seen.times) > 0:
			case interrupted:
				return &term.Failure{Code: term.ExitFailure, Message: "interrupted before the first sample"}
			default:
				return err
			}
			report, failed := seen.report(s.interval)
			if failed != nil {
				return failed
			}
			report.Simulated = machine
			if failed := a.Show(report, func(p *term.Printer) { printSamples(p, seen, report) }); failed != nil || interrupted {
				return failed
			}
			return err
		},
	}
	cmd.Flags().Int32Var(&s.pid, "pid", 0, "process with this pid, on the host or in its container")
	cmd.Flags().StringVar(&s.container, "container", "", "processes in this container: name, prefix of the id, or NAMESPACE/POD")
	cmd.Flags().StringVar(&s.name, "name", "", "processes with this command name; *, ? and [a-z] match as in a shell")
	cmd.Flags().BoolVar(&s.all, "all", false, "every process")
	cmd.Flags().BoolVar(&s.wait, "wait", false, "wait for a process that matches")
	cmd.Flags().DurationVar(&s.duration, "duration", 30*time.Second, "time from the first sample to the last; 0s takes one sample")
	cmd.Flags().DurationVar(&s.interval, "interval", 5*time.Second, "time between samples")
	term.CompleteBy(cmd, "pid", a.TargetNames)
	term.CompleteBy(cmd, "container", a.ContainerNames)
	return cmd
}

func (s *sampling) check(cmd *cobra.Command) error {
	narrowed := cmd.Flags().Changed("pid") || s.container != "" || s.name != ""
	switch _, err := path.Match(s.name, ""); {
	case err != nil:
		return term.Usage(cmd, "invalid --name %q: [ without ]", s.name)
	case narrowed && s.all:
		return term.Usage(cmd, "--all and --pid, --container or --name are mutually exclusive")
	case !narrowed && !s.all:
		return term.Usage(cmd, "no process selected; use --all, --pid, --container or --name")
	case cmd.Flags().Changed("pid") && s.pid <= 0:
		return term.Usage(cmd, "invalid --pid %d; use a number greater than 0", s.pid)
	case s.interval < leastInterval:
		return term.Usage(cmd, "--interval must be at least %s", term.Duration(leastInterval))
	case s.duration < 0:
		return term.Usage(cmd, "--duration must not be negative")
	case s.duration > 0 && s.duration < s.interval:
		return term.Usage(cmd, "--duration %s is shorter than --interval %s: 0s takes one sample", term.Duration(s.duration), term.Duration(s.interval))
	}
	return nil
}

// sample takes samples until the duration is over or ctx ends.
func sample(ctx context.Context, a *term.App, admin term.AdminClient, s *sampling, seen *samples) error {
	queues, err := firstSample(ctx, a, admin, s)
	if err != nil {
		return err
	}
	began := a.Now()
	for n := int64(1); ; n++ {
		seen.add(a.Now(), queues)
		next := time.Duration(n) * s.interval
		if next > s.duration {
			return nil
		}
		sampleProgress(a, "sample %d of %d: %s, %s left", n, int64(s.duration/s.interval)+1, term.Count(len(queues), "queue"),
			term.Duration(max(0, s.duration-a.Now().Sub(began)).Round(time.Second)))
		if err := a.Sleep(ctx, max(0, next-a.Now().Sub(began))); err != nil {
			return err
		}
		if queues, err = look(ctx, a, admin, s); err != nil {
			return err
		}
	}
}

// firstSample returns the first sample with a queue, for which --wait waits.
func firstSample(ctx context.Context, a *term.App, admin term.AdminClient, s *sampling) ([]*gpreemptv1.Queue, error) {
	if s.all && s.wait {
		present, err := look(ctx, a, admin, s)
		if err != nil {
			return nil, err
		}
		s.before = map[string]bool{}
		for _, q := range present {
			s.before[q.GetTargetId()] = true
		}
	}
	for {
		queues, err := look(ctx, a, admin, s)
		f, ok := errors.AsType[*term.Failure](err)
		absent := err == nil && len(queues) == 0 || ok && f.Code == term.ExitNotFound
		switch {
		case !absent:
			return queues, err
		case !s.wait && err != nil:
			return nil, err
		case !s.wait:
			return nil, &term.Failure{Code: term.ExitNotFound, Message: "no process with KFD queues matches", Next: "gpctl target list, or --wait"}
		}
		sampleProgress(a, "waiting for a process")
		if err := a.Sleep(ctx, waitInterval); err != nil {
			return nil, err
		}
	}
}

// look lists the selected queues.
func look(ctx context.Context, a *term.App, admin term.AdminClient, s *sampling) ([]*gpreemptv1.Queue, error) {
	if s.pid > 0 && s.target == "" {
		target, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.Target, error) {
			return term.OneTarget(ctx, admin, gpreempt.ProcessKey{PID: s.pid}, s.container)
		})
		if err != nil {
			return nil, err
		}
		s.target = target.GetTargetId()
	}
	resp, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.ListQueuesResponse, error) {
		return admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{TargetId: s.target, Container: s.container, Backlog: true})
	})
	var queues []*gpreemptv1.Queue
	for _, q := range resp.GetQueues() {
		if (s.name == "" || matches(s.name, q.GetComm())) && !s.before[q.GetTargetId()] {
			queues = append(queues, q)
		}
	}
	return queues, err
}

// matches reports whether a command name matches the pattern, which is valid. A / is an
// ordinary character.
func matches(pattern, name string) bool {
	plain := strings.NewReplacer("/", "\x00")
	ok, _ := path.Match(plain.Replace(pattern), plain.Replace(name))
	return ok
}

// within calls fn with --timeout.
func within[T any](ctx context.Context, a *term.App, fn func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, a.Timeout)
	defer cancel()
	return fn(ctx)
}

// sampleProgress shows a line on the terminal, which replaces the previous one; "" removes it.
func sampleProgress(a *term.App, format string, args ...any) {
	if a.ErrTerminal && a.Getenv("TERM") != "dumb" {
		fmt.Fprintf(a.Err, "\r%s\x1b[K", strings.TrimSpace(term.Printable(fmt.Sprintf(format, args...))))
	}
}

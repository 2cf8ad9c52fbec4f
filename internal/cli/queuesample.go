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
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// leastInterval is the shortest interval of samples.
	leastInterval = 100 * time.Millisecond
	// waitInterval is the interval of --wait.
	waitInterval = 250 * time.Millisecond
)

// sampling selects the queues to sample, how often and how long.
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

func (a *app) queueSample() *cobra.Command {
	var s sampling
	cmd := &cobra.Command{
		Use:   "sample",
		Short: "Sample queues repeatedly and summarize",
		Args:  operands(),
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
			err := a.stream(context.WithoutCancel(ctx), func(_ context.Context, admin adminClient) error {
				st, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.GetStatusResponse, error) {
					return admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
				})
				if err != nil {
					return err
				}
				machine = simulated(st)
				return a.sample(ctx, admin, &s, seen)
			})
			interrupted := ctx.Err() != nil
			stop()
			a.progress("")
			switch {
			case len(seen.times) > 0:
			case interrupted:
				return &failure{code: ExitFailure, message: "interrupted before the first sample"}
			default:
				return err
			}
			report, failed := seen.report(s.interval)
			if failed != nil {
				return failed
			}
			report.Simulated = machine
			if failed := a.show(report, func(p *printer) { a.printSamples(p, seen, report) }); failed != nil || interrupted {
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
	completeBy(cmd, "pid", a.targetNames)
	completeBy(cmd, "container", a.containerNames)
	return cmd
}

func (s *sampling) check(cmd *cobra.Command) error {
	narrowed := cmd.Flags().Changed("pid") || s.container != "" || s.name != ""
	switch _, err := path.Match(s.name, ""); {
	case err != nil:
		return usage(cmd, "invalid --name %q: [ without ]", s.name)
	case narrowed && s.all:
		return usage(cmd, "--all and --pid, --container or --name are mutually exclusive")
	case !narrowed && !s.all:
		return usage(cmd, "no process selected; use --all, --pid, --container or --name")
	case cmd.Flags().Changed("pid") && s.pid <= 0:
		return usage(cmd, "invalid --pid %d; use a number greater than 0", s.pid)
	case s.interval < leastInterval:
		return usage(cmd, "--interval must be at least %s", duration(leastInterval))
	case s.duration < 0:
		return usage(cmd, "--duration must not be negative")
	case s.duration > 0 && s.duration < s.interval:
		return usage(cmd, "--duration %s is shorter than --interval %s: 0s takes one sample", duration(s.duration), duration(s.interval))
	}
	return nil
}

// sample takes samples until the duration is over or ctx ends.
func (a *app) sample(ctx context.Context, admin adminClient, s *sampling, seen *samples) error {
	queues, err := a.firstSample(ctx, admin, s)
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
		a.progress("sample %d of %d: %s, %s left", n, int64(s.duration/s.interval)+1, count(len(queues), "queue"),
			duration(max(0, s.duration-a.Now().Sub(began)).Round(time.Second)))
		if err := a.Sleep(ctx, max(0, next-a.Now().Sub(began))); err != nil {
			return err
		}
		if queues, err = a.look(ctx, admin, s); err != nil {
			return err
		}
	}
}

// firstSample returns the first sample with a queue, for which --wait waits.
func (a *app) firstSample(ctx context.Context, admin adminClient, s *sampling) ([]*gpreemptv1.Queue, error) {
	if s.all && s.wait {
		present, err := a.look(ctx, admin, s)
		if err != nil {
			return nil, err
		}
		s.before = map[string]bool{}
		for _, q := range present {
			s.before[q.GetTargetId()] = true
		}
	}
	for {
		queues, err := a.look(ctx, admin, s)
		f, ok := errors.AsType[*failure](err)
		absent := err == nil && len(queues) == 0 || ok && f.code == ExitNotFound
		switch {
		case !absent:
			return queues, err
		case !s.wait && err != nil:
			return nil, err
		case !s.wait:
			return nil, &failure{code: ExitNotFound, message: "no process with KFD queues matches", next: "gpctl target list, or --wait"}
		}
		a.progress("waiting for a process")
		if err := a.Sleep(ctx, waitInterval); err != nil {
			return nil, err
		}
	}
}

// look lists the selected queues.
func (a *app) look(ctx context.Context, admin adminClient, s *sampling) ([]*gpreemptv1.Queue, error) {
	if s.pid > 0 && s.target == "" {
		target, err := within(ctx, a, func(ctx context.Context) (*gpreemptv1.Target, error) {
			return one(ctx, admin, gpreempt.ProcessKey{PID: s.pid}, s.container)
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
func within[T any](ctx context.Context, a *app, fn func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	return fn(ctx)
}

// progress shows a line on the terminal, which replaces the previous one; "" removes it.
func (a *app) progress(format string, args ...any) {
	if a.ErrTerminal && a.Getenv("TERM") != "dumb" {
		fmt.Fprintf(a.Err, "\r%s\x1b[K", strings.TrimSpace(printable(fmt.Sprintf(format, args...))))
	}
}

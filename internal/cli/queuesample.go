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
	// leastInterval bounds how often the daemon is asked.
	leastInterval = 100 * time.Millisecond
	// waitInterval is how often --wait looks.
	waitInterval = 250 * time.Millisecond
)

// sampling is which queues to look at, how often and for how long.
type sampling struct {
	pid                int32
	container, name    string
	all, wait          bool
	duration, interval time.Duration

	// target is the process of pid, once found.
	target string
	// before are the processes that --all --wait is not about.
	before map[string]bool
}

func (a *app) queueSample() *cobra.Command {
	var s sampling
	cmd := &cobra.Command{
		Use:   "sample",
		Short: "Look at queues repeatedly and sum up what was seen",
		Long: `Looks at the queues of some processes every --interval for --duration and sums up:
in how many samples each queue was seen, its backlog, on which GPUs the queues are and
of which types, how many there were at once and whether that number is stable, within
one. Processes of one command count as runs of it; whether they have as many queues
each, give or take one, is told too: let the program run five times meanwhile.

--pid, --container and --name narrow it down together; --all is every process.
--wait waits until a process matches, with --all until one appears that was not there.
Ctrl-C ends it early and sums up what was seen until then.`,
		Example: "  gpctl queue sample --pid 4242\n  gpctl queue sample --name 'python*' --wait --duration 10m --interval 1s\n" +
			"  gpctl queue sample --container trainer -o json",
		Args: operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.check(cmd); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			seen := &samples{}
			var machine string
			// The context of the connection is not the one that is interrupted: what is
			// under way then is not an error of the daemon.
			err := a.stream(context.WithoutCancel(ctx), func(_ context.Context, admin gpreemptv1.AdminServiceClient) error {
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
				return &failure{code: ExitFailure, message: "interrupted before anything was seen"}
			default:
				return err
			}
			report, failed := seen.report(s.interval)
			if failed != nil {
				return failed
			}
			report.Simulated = machine
			if failed := a.showData(report, func(p *printer) { a.printSamples(p, seen, report) }); failed != nil || interrupted {
				return failed
			}
			return err
		},
	}
	cmd.Flags().Int32Var(&s.pid, "pid", 0, "the process with this pid, on the host or in its container")
	cmd.Flags().StringVar(&s.container, "container", "", "processes in this container: its name, the beginning of its id, or NAMESPACE/POD")
	cmd.Flags().StringVar(&s.name, "name", "", "processes of this command name; *, ? and [a-z] match as in a shell")
	cmd.Flags().BoolVar(&s.all, "all", false, "every process")
	cmd.Flags().BoolVar(&s.wait, "wait", false, "wait for a process that matches")
	cmd.Flags().DurationVar(&s.duration, "duration", 30*time.Second, "from the first sample to the last")
	cmd.Flags().DurationVar(&s.interval, "interval", 5*time.Second, "from one sample to the next")
	completeBy(cmd, "pid", a.targetNames)
	completeBy(cmd, "container", a.containerNames)
	return cmd
}

func (s *sampling) check(cmd *cobra.Command) error {
	narrowed := cmd.Flags().Changed("pid") || s.container != "" || s.name != ""
	switch _, err := path.Match(s.name, ""); {
	case err != nil:
		return usage(cmd, "--name %q is no pattern: a [ has no ]", s.name)
	case narrowed && s.all:
		return usage(cmd, "--all excludes --pid, --container and --name")
	case !narrowed && !s.all:
		return usage(cmd, "say which processes: --pid, --container, --name or --all")
	case cmd.Flags().Changed("pid") && s.pid <= 0:
		return usage(cmd, "--pid %d: a pid is more than 0", s.pid)
	case s.interval < leastInterval:
		return usage(cmd, "--interval must be at least %s", duration(leastInterval))
	case s.duration < 0:
		return usage(cmd, "--duration must not be negative")
	}
	return nil
}

// sample looks until the duration is over or ctx ends.
func (a *app) sample(ctx context.Context, admin gpreemptv1.AdminServiceClient, s *sampling, seen *samples) error {
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

// firstSample is the first that has a queue, which --wait waits for.
func (a *app) firstSample(ctx context.Context, admin gpreemptv1.AdminServiceClient, s *sampling) ([]*gpreemptv1.Queue, error) {
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
			return nil, &failure{code: ExitNotFound, message: "no process with KFD queues matches", next: "gpctl target list; --wait waits for one"}
		}
		a.progress("waiting for a process")
		if err := a.Sleep(ctx, waitInterval); err != nil {
			return nil, err
		}
	}
}

// look lists the queues that s is about.
func (a *app) look(ctx context.Context, admin gpreemptv1.AdminServiceClient, s *sampling) ([]*gpreemptv1.Queue, error) {
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

// matches reports whether a command name is of the pattern, which was checked. A / in
// it is a character like others.
func matches(pattern, name string) bool {
	plain := strings.NewReplacer("/", "\x00")
	ok, _ := path.Match(plain.Replace(pattern), plain.Replace(name))
	return ok
}

// within returns fn --timeout.
func within[T any](ctx context.Context, a *app, fn func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	return fn(ctx)
}

// progress shows on the terminal what is under way, in one line that the next one
// replaces; "" removes it.
func (a *app) progress(format string, args ...any) {
	if a.ErrTerminal && a.Getenv("TERM") != "dumb" {
		fmt.Fprintf(a.Err, "\r%s\x1b[K", strings.TrimSpace(printable(fmt.Sprintf(format, args...))))
	}
}

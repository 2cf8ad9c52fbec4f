package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

func eventsExport(a *term.App) *cobra.Command {
	var (
		path   string
		follow bool
	)
	cmd := &cobra.Command{
		Use:         "export",
		Annotations: map[string]string{term.NoData: term.NoData},
		Short:       "Write the event log with the state of the host, as JSON lines, for gplab plan",
		Args:        term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			export := func(ctx context.Context) func(io.Writer) error {
				return func(w io.Writer) error {
					return a.Stream(ctx, func(ctx context.Context, admin term.AdminClient) error {
						return (&exporting{admin: admin, w: w, follow: follow}).run(ctx, a.Now())
					})
				}
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			defer stop()
			switch {
			case path == "":
				return export(ctx)(a.Out)
			case follow:
				return recordTo(path, export(ctx))
			}
			if err := term.ReplaceRegular(path, export(ctx)); err != nil {
				return err
			}
			_, err := fmt.Fprintf(a.Out, "Wrote %s\n", term.Printable(path))
			return err
		},
	}
	cmd.Flags().StringVar(&path, "output-file", "", "write to this file instead of standard output")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "continue with new events, until interrupted")
	return cmd
}

// recordTo writes to a new file as the events arrive: it is of use although the recording is cut.
func recordTo(path string, write func(io.Writer) error) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644) //nolint:gosec // G302: as other exports, every user may read it
	if err != nil {
		return &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("cannot write %s: %v", path, err), Next: "choose another path with --output-file"}
	}
	err = write(f)
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}

// exporting is one export.
type exporting struct {
	admin  term.AdminClient
	w      io.Writer
	follow bool
	known  map[string]bool // targets that have a line
}

// run writes the state of the host, then the events. While it follows, a target that is new or has
// a new class gets a line before its event. The end of ctx is the end of a recording.
func (e *exporting) run(ctx context.Context, now time.Time) error {
	status, err := e.admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	if err := e.line(fmt.Sprintf(`"format":%d,"exported_at":%q,"status"`, term.ExportFormat, now.UTC().Format(time.RFC3339Nano)), status); err != nil {
		return err
	}
	policy, err := e.admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		return err
	}
	gpus, err := e.admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		return err
	}
	leases, err := e.admin.ListLeases(ctx, &gpreemptv1.ListLeasesRequest{})
	if err != nil {
		return err
	}
	if err := e.line(`"policy"`, policy.GetPolicy()); err != nil {
		return err
	}
	for _, g := range gpus.GetGpus() {
		if err := e.line(`"gpu"`, g); err != nil {
			return err
		}
	}
	for _, l := range leases.GetLeases() {
		// A replay does not need the owner.
		if err := e.line(`"lease"`, &gpreemptv1.Lease{LeaseId: l.GetLeaseId(), GpuIds: l.GetGpuIds(), Priority: l.GetPriority()}); err != nil {
			return err
		}
	}
	e.known = map[string]bool{}
	if err := e.targets(ctx, func(*gpreemptv1.Target) bool { return true }); err != nil {
		return err
	}
	stream, err := e.admin.WatchEvents(ctx, &gpreemptv1.WatchEventsRequest{FromStart: true, NoFollow: !e.follow})
	if err != nil {
		return err
	}
	last := status.GetEventRevision()
	err = term.Each(stream, func(m *gpreemptv1.WatchEventsResponse) error {
		// Events before the list of targets are of targets that it has, or that have left.
		if ev := m.GetEvent(); ev.GetRevision() > last && e.changesTarget(ev) {
			if err := e.targets(ctx, func(t *gpreemptv1.Target) bool { return t.GetTargetId() == ev.GetTargetId() }); err != nil {
				return err
			}
		}
		return e.line(`"event"`, m.GetEvent())
	})
	if e.follow && ctx.Err() != nil {
		return nil //nolint:nilerr // the user has ended it
	}
	return err
}

// changesTarget reports whether a target is new or has a new class or priority.
func (e *exporting) changesTarget(ev *gpreemptv1.Event) bool {
	return ev.GetKind() == gpreemptv1.EventKind_EVENT_KIND_TARGET &&
		(!e.known[ev.GetTargetId()] || ev.GetFromTarget() == ev.GetToTarget()) &&
		ev.GetToTarget() != gpreemptv1.TargetState_TARGET_STATE_GONE
}

// targets writes lines for some of the targets, without what a replay does not need: a command
// line and an environment may be private.
func (e *exporting) targets(ctx context.Context, want func(*gpreemptv1.Target) bool) error {
	list, err := e.admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return err
	}
	for _, t := range list.GetTargets() {
		if !want(t) {
			continue
		}
		e.known[t.GetTargetId()] = true
		out := &gpreemptv1.Target{
			TargetId: t.GetTargetId(), Comm: t.GetComm(), Class: t.GetClass(), Priority: t.GetPriority(), GpuIds: t.GetGpuIds(),
			QueueCount: t.GetQueueCount(), Mechanism: t.GetMechanism(),
		}
		if t.GetJob() != nil {
			out.Job = &gpreemptv1.Job{Name: t.GetJob().GetName()}
		}
		if err := e.line(`"target"`, out); err != nil {
			return err
		}
	}
	return nil
}

// line writes a line that begins with keys and has a message as the last of them.
func (e *exporting) line(keys string, m proto.Message) error {
	raw, err := term.Brief(m)
	if err != nil {
		return err
	}
	return term.WriteCompact(e.w, fmt.Appendf(nil, "{%s:%s}", keys, raw))
}

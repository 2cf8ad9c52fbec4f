package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/otlp"
)

func (a *app) traceExport() *cobra.Command {
	var (
		in   traceInput
		path string

		collector string
		follow    bool
	)
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Write what happened as a trace that Perfetto and Chrome open",
		Long: `Writes what the daemon remembers of leases, suspends and resumes as a trace in Chrome's
JSON format, for https://ui.perfetto.dev or chrome://tracing. The daemon remembers the
last changes, as gpctl events --all shows them; nothing has to be set up before.

With --otlp it sends OpenTelemetry traces of announcements to a collector instead, and
with --follow also those of the future, until it is stopped: it reconnects when the
daemon restarts, and drops spans while the collector does not take them. The spans are
below those of the client that sent a W3C traceparent with its announcement.
OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS apply.

Each lease and each process has a track. What began before the oldest change that is
kept begins there and says so (clipped); what has not ended ends with the export and
says so (open). Times are microseconds since the daemon started.`,
		Example: "  gpctl trace export --output-file /tmp/gpreempt.json --since 30s\n  gpctl trace export --otlp 127.0.0.1:4317 --follow",
		Args:    operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if in.since < 0 || cmd.Flags().Changed("since") && in.since == 0 {
				return usage(cmd, "--since must be more than 0")
			}
			switch {
			case collector == "" && follow:
				return usage(cmd, "--follow needs --otlp: a file shows what the daemon remembers")
			case collector != "" && (path != "" || cmd.Flags().Changed("since") || in.lease != ""):
				return usage(cmd, "--otlp excludes --output-file, --since and --lease")
			case collector != "":
				return a.exportOTLP(cmd, collector, follow)
			}
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				trace, err := a.fetchTrace(ctx, admin, in)
				switch {
				case err != nil:
					return err
				case path == "":
					return trace.write(a.Out)
				}
				// Replacing would remove a device or a pipe, which root may do.
				if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
					return &failure{code: ExitRefused, message: path + " is not a regular file", next: "choose another path with --output-file, or redirect standard output"}
				}
				if err := replaceFile(path, "--output-file", trace.write); err != nil {
					return err
				}
				_, err = fmt.Fprintf(a.Out, "Wrote %s; open it in https://ui.perfetto.dev\n", printable(path))
				return err
			})
		},
	}
	cmd.Flags().StringVar(&path, "output-file", "", "write it here, and not to standard output")
	cmd.Flags().DurationVar(&in.since, "since", 0, "only what was not over that long ago")
	cmd.Flags().StringVar(&in.lease, "lease", "", "only this lease and what was suspended for it")
	cmd.Flags().StringVar(&collector, "otlp", "", "send OpenTelemetry traces to this collector over gRPC: HOST:PORT, unix:PATH or https://HOST:PORT")
	cmd.Flags().BoolVar(&follow, "follow", false, "with --otlp: send traces of what happens from now on, until interrupted")
	return cmd
}

// exportOTLP sends traces to a collector.
func (a *app) exportOTLP(cmd *cobra.Command, collector string, follow bool) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	return a.stream(ctx, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
		e, err := otlp.New(ctx, otlp.Config{Endpoint: collector, Daemon: admin, Warn: func(err error) {
			if err == nil {
				fmt.Fprintln(a.Err, "gpctl: traces reach the collector again")
				return
			}
			fmt.Fprintf(a.Err, "gpctl: warning: %s\n", printable(err.Error()))
		}})
		if err != nil {
			return &failure{code: ExitUsage, message: err.Error()}
		}
		run := e.Remembered
		if follow {
			run = e.Follow
		}
		if err := run(ctx); err != nil {
			return err
		}
		if n := e.Lost(); n > 0 {
			return &failure{code: ExitFailure, message: fmt.Sprintf("%d spans did not reach %s", n, collector), next: "see whether the collector takes OTLP over gRPC there"}
		}
		return nil
	})
}

// fetchTrace asks the daemon for all that in lacks.
func (a *app) fetchTrace(ctx context.Context, admin gpreemptv1.AdminServiceClient, in traceInput) (*chromeTrace, error) {
	targets, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return nil, err
	}
	in.comms = map[string]string{}
	for _, t := range targets.GetTargets() {
		in.comms[t.GetTargetId()] = t.GetComm()
	}
	stream, err := admin.WatchEvents(ctx, &gpreemptv1.WatchEventsRequest{FromStart: true, NoFollow: true})
	if err != nil {
		return nil, err
	}
	err = each(stream, func(m *gpreemptv1.WatchEventsResponse) error {
		in.events = append(in.events, m.GetEvent())
		return nil
	})
	if err != nil {
		return nil, err
	}
	st, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	in.now = st.GetClock().AsDuration()
	known := func(e *gpreemptv1.Event) bool { return e.GetLeaseId() == in.lease }
	if in.lease != "" && !slices.ContainsFunc(in.events, known) {
		return nil, &failure{code: ExitNotFound, message: fmt.Sprintf("no event that is kept is about lease %s", in.lease), next: "gpctl events --all"}
	}
	trace := &chromeTrace{Unit: "ms", Events: traceOf(in), Other: map[string]string{
		"gpctl": api.VersionString(), "gpreemptd": st.GetVersion(), "backend": st.GetBackend(), "boot_id": st.GetBootId(),
		"exported_at": a.Now().Format(time.RFC3339Nano),
	}}
	if n := len(in.events); n > 0 {
		trace.Other["revisions"] = fmt.Sprintf("%d to %d", in.events[0].GetRevision(), in.events[n-1].GetRevision())
	}
	return trace, nil
}

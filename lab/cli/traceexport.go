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
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/spans"
)

func traceExport(a *term.App) *cobra.Command {
	var (
		in   traceInput
		path string

		collector string
		follow    bool
	)
	cmd := &cobra.Command{
		Use:         "export",
		Annotations: map[string]string{term.NoData: term.NoData},
		Short:       "Export leases, suspends and resumes as a trace for Perfetto and Chrome",
		Args:        term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if in.since < 0 || cmd.Flags().Changed("since") && in.since == 0 {
				return term.Usage(cmd, "--since must be greater than 0")
			}
			switch {
			case collector == "" && follow:
				return term.Usage(cmd, "--follow needs --otlp")
			case collector != "" && (path != "" || cmd.Flags().Changed("since") || in.lease != ""):
				return term.Usage(cmd, "--otlp and --output-file, --since or --lease are mutually exclusive")
			case collector != "":
				return exportOTLP(a, cmd, collector, follow)
			}
			return a.Call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				trace, err := fetchTrace(ctx, a, admin, in)
				switch {
				case err != nil:
					return err
				case path == "":
					return trace.write(a.Out)
				}
				if err := term.ReplaceRegular(path, trace.write); err != nil {
					return err
				}
				_, err = fmt.Fprintf(a.Out, "Wrote %s; open it in https://ui.perfetto.dev\n", term.Printable(path))
				return err
			})
		},
	}
	cmd.Flags().StringVar(&path, "output-file", "", "write to this file instead of standard output")
	cmd.Flags().DurationVar(&in.since, "since", 0, "only what ended less than this ago")
	cmd.Flags().StringVar(&in.lease, "lease", "", "only this lease and the suspends for it")
	cmd.Flags().StringVar(&collector, "otlp", "", "send OpenTelemetry traces to this collector over gRPC: HOST:PORT, unix:PATH or https://HOST:PORT")
	cmd.Flags().BoolVar(&follow, "follow", false, "with --otlp: continue with new traces, until interrupted")
	return cmd
}

// exportOTLP sends traces to a collector.
func exportOTLP(a *term.App, cmd *cobra.Command, collector string, follow bool) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	return a.Stream(ctx, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
		e, err := spans.NewExporter(ctx, spans.ExporterConfig{Endpoint: collector, Daemon: admin, Warn: func(err error) {
			if err == nil {
				fmt.Fprintln(a.Err, "gplab: the collector accepts traces again")
				return
			}
			fmt.Fprintf(a.Err, "gplab: warning: %s\n", term.Printable(err.Error()))
		}})
		if err != nil {
			return &term.Failure{Code: term.ExitUsage, Message: err.Error()}
		}
		run := e.Remembered
		if follow {
			run = e.Follow
		}
		if err := run(ctx); err != nil {
			return err
		}
		if n := e.Lost(); n > 0 {
			return &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("%d spans were not accepted by %s", n, collector), Next: "check that the collector accepts OTLP over gRPC"}
		}
		return nil
	})
}

// fetchTrace requests the data of a trace from the daemon.
func fetchTrace(ctx context.Context, a *term.App, admin gpreemptv1.AdminServiceClient, in traceInput) (*chromeTrace, error) {
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
	err = term.Each(stream, func(m *gpreemptv1.WatchEventsResponse) error {
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
		return nil, &term.Failure{Code: term.ExitNotFound, Message: fmt.Sprintf("no kept event of lease %s", in.lease), Next: "gpctl events --all"}
	}
	trace := &chromeTrace{Unit: "ms", Events: traceOf(in), Other: map[string]string{
		"gplab": api.VersionString(), "gpreemptd": st.GetVersion(), "backend": st.GetBackend(), "boot_id": st.GetBootId(),
		"exported_at": a.Now().Format(time.RFC3339Nano),
	}}
	if n := len(in.events); n > 0 {
		trace.Other["revisions"] = fmt.Sprintf("%d to %d", in.events[0].GetRevision(), in.events[n-1].GetRevision())
	}
	return trace, nil
}

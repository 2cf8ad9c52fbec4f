package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/spell"
	"github.com/gpreempt/gpreempt/internal/term"
)

func eventsCommand(a *term.App) *cobra.Command {
	var (
		follow, all bool
		last        uint64
		since       string
		only        eventFilter
	)
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show state changes: suspends, resumes, leases, breakers, admin commands",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if all && cmd.Flags().Changed("since") {
				return term.Usage(cmd, "--all and --since are mutually exclusive")
			}
			if err := only.check(cmd); err != nil {
				return err
			}
			from, age, err := parseSince(cmd, since)
			if err != nil {
				return err
			}
			ctx, cancel := cmd.Context(), context.CancelFunc(func() {})
			if !follow {
				ctx, cancel = context.WithTimeout(ctx, a.Timeout)
			}
			defer cancel()
			return a.Stream(ctx, func(ctx context.Context, admin term.AdminClient) error {
				if !all && !cmd.Flags().Changed("since") && only == (eventFilter{}) {
					st, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
					if err != nil {
						return err
					}
					from = st.GetEventRevision() - min(last, st.GetEventRevision())
				}
				// Revisions begin with 1: 0 selects all events.
				stream, err := admin.WatchEvents(ctx, &gpreemptv1.WatchEventsRequest{
					AfterRevision: from, FromStart: from == 0, NoFollow: !follow,
				})
				if err != nil {
					return err
				}
				t := a.Printer().Table("", term.Columns{"TIME:15", ">REVISION", "KIND:7", "OBJECT:20", "CHANGE:25", "REASON"})
				none := true
				begin := a.Now().Add(-age)
				err = term.Each(stream, func(m *gpreemptv1.WatchEventsResponse) error {
					if e := m.GetEvent(); age > 0 && e.GetAt().AsTime().Before(begin) || !only.has(e) {
						return nil
					}
					none = false
					return a.ShowLine(m, func(*term.Printer) { printEvent(t, m.GetEvent()) })
				})
				if err == nil && none && !a.ForPrograms() {
					t.P.Linef("No events.")
				}
				return err
			})
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "continue with new events")
	cmd.Flags().StringVar(&since, "since", "", "only events of the last duration, such as 5m, or after a revision")
	cmd.Flags().Uint64VarP(&last, "lines", "n", 20, "how many of the last events, without --all and --since")
	cmd.Flags().BoolVar(&all, "all", false, "all events that the daemon keeps")
	cmd.Flags().StringVar(&only.kind, "kind", "", "only events of this kind, such as shadow; without --since, of all that the daemon keeps")
	cmd.Flags().Int32Var(&only.pid, "pid", 0, "only events about this process; without --since, of all that the daemon keeps")
	cmd.AddCommand(eventsExport(a))
	return cmd
}

// parseSince returns the revision, or the age, of a value of --since; zero for "".
func parseSince(cmd *cobra.Command, since string) (revision uint64, age time.Duration, err error) {
	if since == "" {
		return 0, 0, nil
	}
	if revision, err = strconv.ParseUint(since, 10, 64); err == nil {
		return revision, 0, nil
	}
	if age, err = time.ParseDuration(since); err != nil || age <= 0 {
		return 0, 0, term.Usage(cmd, "invalid --since %q; use a duration, such as 5m, or a revision, such as 1200", since)
	}
	return 0, age, nil
}

// eventFilter selects events by their kind and process, unless these are zero.
type eventFilter struct {
	kind string
	pid  int32
}

// check returns an error for a kind that there is not.
func (f eventFilter) check(cmd *cobra.Command) error {
	var kinds []string
	for kind := range gpreemptv1.EventKind_name {
		kinds = append(kinds, api.EnumName(gpreemptv1.EventKind(kind)))
	}
	if slices.Contains(kinds, f.kind) {
		return nil
	}
	slices.Sort(kinds)
	kinds = slices.DeleteFunc(kinds, func(kind string) bool { return kind == "" })
	return &term.Failure{
		Code: term.ExitUsage, Message: fmt.Sprintf("no events are of the kind %q; there are %s (target: suspends and resumes)", f.kind, strings.Join(kinds, ", ")),
		Next: cmd.CommandPath() + " --kind " + term.Or(spell.Nearest(f.kind, kinds), "target"),
	}
}

func (f eventFilter) has(e *gpreemptv1.Event) bool {
	pid, _, _ := strings.Cut(e.GetTargetId(), "@")
	return (f.kind == "" || f.kind == api.EnumName(e.GetKind())) && (f.pid == 0 || pid == strconv.Itoa(int(f.pid)))
}

func printEvent(t *term.Table, e *gpreemptv1.Event) {
	var which string
	var change term.Cell
	switch e.GetKind() {
	case gpreemptv1.EventKind_EVENT_KIND_TARGET, gpreemptv1.EventKind_EVENT_KIND_SHADOW:
		which = e.GetTargetId()
		change = term.State(e.GetToTarget())
		if from := api.EnumName(e.GetFromTarget()); from != "" && e.GetFromTarget() != e.GetToTarget() {
			change.Text = from + " > " + change.Text
		}
	case gpreemptv1.EventKind_EVENT_KIND_LEASE:
		which = e.GetLeaseId()
		change.Text = api.EnumName(e.GetToLease())
		if from := api.EnumName(e.GetFromLease()); from != "" && e.GetFromLease() != e.GetToLease() {
			change.Text = from + " > " + change.Text
		}
		if end := api.EnumName(e.GetEnd()); end != "" {
			change.Text += ": " + end
		}
	case gpreemptv1.EventKind_EVENT_KIND_BREAKER, gpreemptv1.EventKind_EVENT_KIND_RESET:
		which = fmt.Sprintf("GPU %d", e.GetGpuId())
	default:
	}
	var why []string
	if e.GetCause() != "" {
		why = append(why, e.GetCause())
	}
	if e.GetKind() != gpreemptv1.EventKind_EVENT_KIND_LEASE && e.GetLeaseId() != "" {
		if e.GetCause() == "lease" {
			why = nil
		}
		why = append(why, "lease "+e.GetLeaseId())
	}
	if e.GetTook() != nil {
		why = append(why, "took "+term.Took(e.GetTook()))
	}
	if e.GetMessage() != "" {
		why = append(why, e.GetMessage())
	}
	t.Row(e.GetAt().AsTime().Local().Format("15:04:05.000000"), e.GetRevision(), api.EnumName(e.GetKind()), which, change,
		strings.Join(why, ", "))
	t.Flush()
}

package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
)

func queueWatch(a *term.App) *cobra.Command {
	var since uint64
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Show queues as they are created, changed and destroyed",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.Stream(cmd.Context(), func(ctx context.Context, admin term.AdminClient) error {
				stream, err := admin.WatchQueues(ctx, &gpreemptv1.WatchQueuesRequest{AfterRevision: since})
				if err != nil {
					return err
				}
				names := a.NameGPUs(ctx, admin)
				t := a.Printer().Table("", term.Columns{
					">REVISION", "CHANGE:8", ">PID:7", "COMMAND:15", ">QUEUE", "TYPE:9", ">HIP", ">GPU:5", "CLASS:9", "STATE:11", "+TARGET:20", "+AT:23", "DETAIL",
				})
				known := map[queueKey]*gpreemptv1.Queue{}
				return term.Each(stream, func(m *gpreemptv1.WatchQueuesResponse) error {
					return a.ShowLine(m, func(*term.Printer) {
						q := m.GetQueue()
						change := m.GetChange()
						t.Row(m.GetRevision(), term.Cell{Text: api.EnumName(change), Style: changeStyles[change]}, q.GetPid(), q.GetComm(), q.GetQueueId(), q.GetType(),
							names.HIP(q.GetGpuId()), q.GetGpuId(), api.EnumName(q.GetClass()), term.State(q.GetState()), q.GetTargetId(),
							m.GetAt().AsTime().Local().Format("2006-01-02 15:04:05.000"), strings.Join(facts(known[keyOf(q)], q), ", "))
						t.Flush()
						if change == gpreemptv1.QueueChange_QUEUE_CHANGE_REMOVED {
							delete(known, keyOf(q))
						} else {
							known[keyOf(q)] = q
						}
					})
				})
			})
		},
	}
	cmd.Flags().Uint64Var(&since, "since", 0, "only changes after this revision")
	return cmd
}

// queueKey identifies a queue while it exists.
type queueKey struct {
	target string
	id     uint32
}

func keyOf(q *gpreemptv1.Queue) queueKey { return queueKey{q.GetTargetId(), q.GetQueueId()} }

// facts returns the properties of a queue, or their changes when before is not nil.
func facts(before, q *gpreemptv1.Queue) []string {
	var list []string
	fact := func(name string, of func(*gpreemptv1.Queue) string) {
		now := of(q)
		switch {
		case before == nil && now != "-":
			list = append(list, strings.TrimSpace(name+" "+now))
		case before != nil && of(before) != now:
			list = append(list, strings.TrimSpace(name+" "+of(before)+" > "+now))
		}
	}
	if before != nil {
		fact("class", func(q *gpreemptv1.Queue) string { return term.Or(api.EnumName(q.GetClass()), "-") })
		fact("priority", func(q *gpreemptv1.Queue) string { return fmt.Sprint(q.GetPriority()) })
		fact("", func(q *gpreemptv1.Queue) string { return term.Or(api.EnumName(q.GetState()), "-") })
	}
	fact("ring", func(q *gpreemptv1.Queue) string { return term.Ring(q.GetRingAddress(), q.GetRingBytes()) })
	fact("hwprio", hardwarePriority)
	fact("doorbell", doorbell)
	fact("source", func(q *gpreemptv1.Queue) string { return term.Or(q.GetSource(), "-") })
	return list
}

var changeStyles = map[gpreemptv1.QueueChange]term.Style{
	gpreemptv1.QueueChange_QUEUE_CHANGE_ADDED: term.StyleGood, gpreemptv1.QueueChange_QUEUE_CHANGE_REMOVED: term.StyleNote,
}

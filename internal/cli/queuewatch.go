package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

func (a *app) queueWatch() *cobra.Command {
	var since uint64
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Show queues as they are created, changed and destroyed",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.stream(cmd.Context(), func(ctx context.Context, admin adminClient) error {
				stream, err := admin.WatchQueues(ctx, &gpreemptv1.WatchQueuesRequest{AfterRevision: since})
				if err != nil {
					return err
				}
				names := a.nameGPUs(ctx, admin)
				t := a.printer().table("", columns{
					">REVISION", "CHANGE:8", ">PID:7", "COMMAND:15", ">QUEUE", "TYPE:9", ">HIP", ">GPU:5", "CLASS:9", "STATE:11", "+TARGET:20", "+AT:23", "DETAIL",
				})
				known := map[queueKey]*gpreemptv1.Queue{}
				return each(stream, func(m *gpreemptv1.WatchQueuesResponse) error {
					return a.showLine(m, func(*printer) {
						q := m.GetQueue()
						change := m.GetChange()
						t.row(m.GetRevision(), cell{api.EnumName(change), changeStyles[change]}, q.GetPid(), q.GetComm(), q.GetQueueId(), q.GetType(),
							names.hip(q.GetGpuId()), q.GetGpuId(), api.EnumName(q.GetClass()), state(q.GetState()), q.GetTargetId(),
							m.GetAt().AsTime().Local().Format("2006-01-02 15:04:05.000"), strings.Join(facts(known[keyOf(q)], q), ", "))
						t.flush()
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
		fact("class", func(q *gpreemptv1.Queue) string { return or(api.EnumName(q.GetClass()), "-") })
		fact("priority", func(q *gpreemptv1.Queue) string { return fmt.Sprint(q.GetPriority()) })
		fact("", func(q *gpreemptv1.Queue) string { return or(api.EnumName(q.GetState()), "-") })
	}
	fact("ring", func(q *gpreemptv1.Queue) string { return ring(q.GetRingAddress(), q.GetRingBytes()) })
	fact("hwprio", hardwarePriority)
	fact("doorbell", doorbell)
	fact("source", func(q *gpreemptv1.Queue) string { return or(q.GetSource(), "-") })
	return list
}

// ring formats the address and the size of a ring.
func ring(at, bytes uint64) string {
	switch {
	case bytes == 0:
		return address(at)
	case at == 0:
		return size(bytes)
	}
	return address(at) + " (" + size(bytes) + ")"
}

var changeStyles = map[gpreemptv1.QueueChange]style{
	gpreemptv1.QueueChange_QUEUE_CHANGE_ADDED: styleGood, gpreemptv1.QueueChange_QUEUE_CHANGE_REMOVED: styleNote,
}

// each calls fn for each message of a stream until it ends.
func each[M any](stream grpc.ServerStreamingClient[M], fn func(*M) error) error {
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := fn(m); err != nil {
			return err
		}
	}
}

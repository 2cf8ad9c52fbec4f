package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/words"
)

func (a *app) queueCommand() *cobra.Command {
	return noun("queue", "The KFD queues", a.queueList(), a.queueFind(), a.queueWatch())
}

func (a *app) queueList() *cobra.Command {
	var f filter
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the KFD queues of the host",
		Example: "  gpctl queue list --gpu renderD128 --class offline",
		Args:    operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			class, err := parseClass(cmd, f.class)
			if err != nil {
				return err
			}
			if f.target != "" {
				if _, err := targetOperand(cmd, []string{f.target}); err != nil {
					return err
				}
			}
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				gpu, err := findGPU(ctx, cmd, admin, f.gpu)
				if err != nil {
					return err
				}
				resp, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{TargetId: f.target, GpuId: gpu, Class: class})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) {
					switch {
					case len(resp.GetQueues()) > 0:
						a.printQueues(p, resp.GetQueues())
					case f != filter{}:
						p.linef("No queue matches.")
					default:
						p.linef("There are no queues.")
					}
				})
			})
		},
	}
	f.flags(cmd)
	cmd.Flags().StringVar(&f.target, "target", "", "only this process: PID or PID@START")
	return cmd
}

func (a *app) printQueues(p *printer, list []*gpreemptv1.Queue) {
	t := p.table("", columns{
		">PID", "COMMAND", ">QUEUE", "TYPE", ">GPU", ">RING", "CLASS", ">PRIO", "STATE", ">AGE", "+TARGET",
	})
	for _, q := range list {
		t.row(text(q.GetPid()), text(q.GetComm()), text(q.GetQueueId()), text(q.GetType()), text(q.GetGpuId()), text(size(q.GetRingBytes())),
			text(words.Of(q.GetClass())), text(q.GetPriority()), state(q.GetState()), text(a.age(q.GetFirstSeen())), text(q.GetTargetId()))
	}
	t.flush()
}

func (a *app) queueFind() *cobra.Command {
	return &cobra.Command{
		Use:               "find PID",
		Short:             "Show all about the queues of one process",
		Example:           "  gpctl queue find 4242",
		Args:              operands("PID"),
		ValidArgsFunction: a.named,
		RunE: a.onTarget(func(ctx context.Context, admin gpreemptv1.AdminServiceClient, target string) error {
			resp, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{TargetId: target})
			if err != nil {
				return err
			}
			if len(resp.GetQueues()) == 0 {
				return &failure{
					code:    ExitNotFound,
					message: fmt.Sprintf("process %s has no KFD queues", target),
					next:    "gpctl target list; the pid is that of the daemon's pid namespace",
				}
			}
			if a.forPrograms() {
				return a.show(resp, nil)
			}
			owner, err := admin.ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: target})
			if err != nil {
				return err
			}
			return a.show(resp, func(p *printer) {
				a.printTarget(p, owner.GetTarget())
				p.linef("")
				t := p.table("", columns{">QUEUE", "TYPE", ">GPU", ">RING", ">AGE", "FIRST SEEN"})
				for _, q := range resp.GetQueues() {
					t.row(text(q.GetQueueId()), text(q.GetType()), text(q.GetGpuId()), text(size(q.GetRingBytes())), text(a.age(q.GetFirstSeen())),
						text(q.GetFirstSeen().AsTime().Local().Format("2006-01-02 15:04:05")))
				}
				t.flush()
			})
		}),
	}
}

func (a *app) queueWatch() *cobra.Command {
	var since uint64
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Show queues as they appear, change and go",
		Long: `Shows the present queues, then every change until interrupted. --since goes on
after a revision seen before; -o json gives one object a line.`,
		Args: operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.stream(cmd.Context(), func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				stream, err := admin.WatchQueues(ctx, &gpreemptv1.WatchQueuesRequest{AfterRevision: since})
				if err != nil {
					return err
				}
				t := a.printer().table("", columns{
					">REVISION", "CHANGE:8", ">PID:7", "COMMAND:15", ">QUEUE", "TYPE:9", ">GPU:5", "CLASS:9", "STATE:11", "+TARGET",
				})
				return each(stream, func(m *gpreemptv1.WatchQueuesResponse) error {
					return a.showLine(m, func(*printer) {
						q := m.GetQueue()
						t.row(text(m.GetRevision()), change(m.GetChange()), text(q.GetPid()), text(q.GetComm()), text(q.GetQueueId()), text(q.GetType()),
							text(q.GetGpuId()), text(words.Of(q.GetClass())), state(q.GetState()), text(q.GetTargetId()))
						t.flush()
					})
				})
			})
		},
	}
	cmd.Flags().Uint64Var(&since, "since", 0, "only changes after this revision")
	return cmd
}

func change(c gpreemptv1.QueueChange) cell {
	said := cell{text: words.Of(c)}
	switch c {
	case gpreemptv1.QueueChange_QUEUE_CHANGE_ADDED:
		said.style = styleGood
	case gpreemptv1.QueueChange_QUEUE_CHANGE_REMOVED:
		said.style = styleNote
	default:
	}
	return said
}

// each hands on what a stream brings until it ends.
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

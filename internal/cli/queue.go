package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
)

func queueCommand(a *term.App) *cobra.Command {
	return term.Noun("queue", "The KFD queues", queueList(a), queueFind(a), queueWatch(a), queueSlots(a), queueMoves(a))
}

func queueList(a *term.App) *cobra.Command {
	var (
		f       filter
		backlog bool
	)
	cmd := showing(a, &cobra.Command{
		Use:   "list",
		Short: "List the KFD queues of the host",
		Args:  term.Operands(),
	}, func(ctx context.Context, cmd *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error) {
		class, err := f.check(ctx, cmd, admin)
		if err != nil {
			return nil, nil, err
		}
		gpu, err := term.FindGPU(ctx, admin, f.gpu)
		if err != nil {
			return nil, nil, err
		}
		resp, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{
			TargetId: f.target, GpuId: gpu, Class: class, Container: f.container, Backlog: backlog,
		})
		names := a.NameGPUs(ctx, admin)
		return resp, func(p *term.Printer) {
			switch {
			case len(resp.GetQueues()) > 0:
				printQueues(a, p, resp.GetQueues(), names, backlog)
			case f != filter{}:
				p.Linef("No queue matches.")
			default:
				p.Linef("No queues.")
			}
		}, err
	})
	filterFlags(a, cmd, &f, "class", "gpu", "target", "container")
	cmd.Flags().BoolVar(&backlog, "backlog", false, "show how much is written to each queue and not yet read")
	return cmd
}

func printQueues(a *term.App, p *term.Printer, list []*gpreemptv1.Queue, names term.GPUNames, backlog bool) {
	backlogColumn := "+>BACKLOG"
	if backlog {
		backlogColumn = ">BACKLOG"
	}
	t := p.Table("", term.Columns{
		">PID", "COMMAND", ">QUEUE", "TYPE", ">HIP", ">GPU", "+PRODUCT", ">ADDRESS", ">RING", ">HWPRIO", "CLASS", ">PRIO", "STATE", ">AGE", backlogColumn, "+>CHANGED",
		"+TARGET", "+>DOORBELL", "+>MQD", "+>READ POINTER AT", "+>WRITE POINTER AT", "+PACKETS", "+SOURCE", "+NOTE",
	})
	for _, q := range list {
		t.Row(q.GetPid(), q.GetComm(), q.GetQueueId(), q.GetType(), names.HIP(q.GetGpuId()), q.GetGpuId(), names.Product(q.GetGpuId()), term.Address(q.GetRingAddress()),
			term.Size(q.GetRingBytes()), hardwarePriority(q), api.EnumName(q.GetClass()), q.GetPriority(), term.State(q.GetState()),
			a.Age(q.GetFirstSeen()), behind(q), a.Age(q.GetChangedAt()), q.GetTargetId(), doorbell(q),
			term.Address(q.GetMqdAddress()), term.Address(q.GetReadPointerAddress()), term.Address(q.GetWritePointerAddress()),
			packets(q), term.Or(q.GetSource(), "-"), term.Or(term.Cut(q.GetSourceNote(), 120), "-"))
	}
	t.Flush()
}

// packets returns the packet format of a queue.
func packets(q *gpreemptv1.Queue) string {
	switch {
	case q.GetSource() == "":
		return "-"
	case q.GetAql():
		return "AQL"
	case q.GetType() == "compute":
		return "PM4"
	}
	return "SDMA"
}

// doorbell formats where a queue's doorbell is, which only an MQD contains. 0 is valid.
func doorbell(q *gpreemptv1.Queue) string {
	if !strings.Contains(q.GetSource(), "mqds") {
		return "-"
	}
	return term.DoorbellAt(q.GetDoorbellOffset())
}

// hardwarePriority formats the priority that the process requested from the driver.
func hardwarePriority(q *gpreemptv1.Queue) string {
	if q.KfdPriority == nil {
		return "-"
	}
	return term.Inexact(q.GetKfdPriority(), q.GetKfdPriorityExact())
}

// behind formats a backlog with its unit.
func behind(q *gpreemptv1.Queue) string {
	if q.Backlog == nil {
		return "-"
	}
	return fmt.Sprintf("%d %s", q.GetBacklog(), q.GetBacklogUnit())
}

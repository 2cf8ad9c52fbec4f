package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func (a *app) queueCommand() *cobra.Command {
	return noun("queue", "The KFD queues", a.queueList(), a.queueFind(discovery.Host("/")), a.queueWatch(), a.queueSample(), a.queueAdvice())
}

func (a *app) queueList() *cobra.Command {
	var (
		f       filter
		backlog bool
	)
	cmd := a.watchable(&cobra.Command{
		Use:   "list",
		Short: "List the KFD queues of the host",
		Args:  operands(),
	}, onQueues, func(ctx context.Context, cmd *cobra.Command, admin adminClient) (proto.Message, func(*printer), error) {
		class, err := f.check(cmd)
		if err != nil {
			return nil, nil, err
		}
		gpu, err := findGPU(ctx, admin, f.gpu)
		if err != nil {
			return nil, nil, err
		}
		resp, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{
			TargetId: f.target, GpuId: gpu, Class: class, Container: f.container, Backlog: backlog,
		})
		names := a.nameGPUs(ctx, admin)
		return resp, func(p *printer) {
			switch {
			case len(resp.GetQueues()) > 0:
				a.printQueues(p, resp.GetQueues(), names, backlog)
			case f != filter{}:
				p.linef("No queue matches.")
			default:
				p.linef("No queues.")
			}
		}, err
	})
	a.filterFlags(cmd, &f, "class", "gpu", "target", "container")
	cmd.Flags().BoolVar(&backlog, "backlog", false, "show how much is written to each queue and not yet read")
	return cmd
}

func (a *app) printQueues(p *printer, list []*gpreemptv1.Queue, names gpuNames, backlog bool) {
	backlogColumn := "+>BACKLOG"
	if backlog {
		backlogColumn = ">BACKLOG"
	}
	t := p.table("", columns{
		">PID", "COMMAND", ">QUEUE", "TYPE", ">HIP", ">GPU", "+PRODUCT", ">ADDRESS", ">RING", ">HWPRIO", "CLASS", ">PRIO", "STATE", ">AGE", backlogColumn, "+>CHANGED",
		"+TARGET", "+>DOORBELL", "+>MQD", "+>READ POINTER AT", "+>WRITE POINTER AT", "+PACKETS", "+SOURCE", "+NOTE",
	})
	for _, q := range list {
		t.row(q.GetPid(), q.GetComm(), q.GetQueueId(), q.GetType(), names.hip(q.GetGpuId()), q.GetGpuId(), names.product(q.GetGpuId()), address(q.GetRingAddress()),
			size(q.GetRingBytes()), hardwarePriority(q), api.EnumName(q.GetClass()), q.GetPriority(), state(q.GetState()),
			a.age(q.GetFirstSeen()), behind(q), a.age(q.GetChangedAt()), q.GetTargetId(), doorbell(q),
			address(q.GetMqdAddress()), address(q.GetReadPointerAddress()), address(q.GetWritePointerAddress()),
			packets(q), or(q.GetSource(), "-"), or(cut(q.GetSourceNote(), 120), "-"))
	}
	t.flush()
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

// address formats a virtual address; 0 is unknown.
func address(at uint64) string {
	if at == 0 {
		return "-"
	}
	return fmt.Sprintf("0x%x", at)
}

// doorbell formats where a queue's doorbell is, which only an MQD contains. 0 is valid.
func doorbell(q *gpreemptv1.Queue) string {
	if !strings.Contains(q.GetSource(), "mqds") {
		return "-"
	}
	return doorbellAt(q.GetDoorbellOffset())
}

// doorbellAt formats the position of a doorbell in those of the GPU, in bytes. The driver and the
// API count dwords.
func doorbellAt(dwords uint32) string { return fmt.Sprintf("0x%x", 4*uint64(dwords)) }

// hardwarePriority formats the priority that the process requested from the driver.
func hardwarePriority(q *gpreemptv1.Queue) string {
	if q.KfdPriority == nil {
		return "-"
	}
	return inexact(q.GetKfdPriority(), q.GetKfdPriorityExact())
}

// inexact formats a priority and marks an approximate one.
func inexact(priority uint32, exact bool) string {
	mark := "~"
	if exact {
		mark = ""
	}
	return strconv.FormatUint(uint64(priority), 10) + mark
}

// behind formats a backlog with its unit.
func behind(q *gpreemptv1.Queue) string {
	if q.Backlog == nil {
		return "-"
	}
	return fmt.Sprintf("%d %s", q.GetBacklog(), q.GetBacklogUnit())
}

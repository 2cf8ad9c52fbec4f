package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

func (a *app) queueCommand() *cobra.Command {
	return noun("queue", "The KFD queues", a.queueList(), a.queueFind(), a.queueWatch(), a.queueSample())
}

func (a *app) queueList() *cobra.Command {
	var (
		f       filter
		backlog bool
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the KFD queues of the host",
		Long: `Lists the KFD queues of the host.

PRIO is the rank of the owner among targets. HWPRIO is the priority the driver was
given, 0 to 15: HIP's low, normal and high streams have 0, 7 and 11. Where the driver
shows no more than which of these it is close to, a ~ stands behind it. What nothing
tells is -; -o wide says why.

--backlog reads from the owners' memory what is written to the queues and not yet read.
Work that is read may still run.`,
		Example: "  gpctl queue list --gpu renderD128 --class offline\n  gpctl queue list --container trainer --backlog",
		Args:    operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			class, err := f.check(cmd)
			if err != nil {
				return err
			}
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				gpu, err := findGPU(ctx, cmd, admin, f.gpu)
				if err != nil {
					return err
				}
				resp, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{
					TargetId: f.target, GpuId: gpu, Class: class, Container: f.container, Backlog: backlog,
				})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) {
					switch {
					case len(resp.GetQueues()) > 0:
						a.printQueues(p, resp.GetQueues(), backlog)
					case f != filter{}:
						p.linef("No queue matches.")
					default:
						p.linef("There are no queues.")
					}
				})
			})
		},
	}
	a.filterFlags(cmd, &f, "class", "gpu", "target", "container")
	cmd.Flags().BoolVar(&backlog, "backlog", false, "show how much is written to each queue and not yet read")
	return cmd
}

func (a *app) printQueues(p *printer, list []*gpreemptv1.Queue, backlog bool) {
	left := "+>BACKLOG"
	if backlog {
		left = ">BACKLOG"
	}
	t := p.table("", columns{
		">PID", "COMMAND", ">QUEUE", "TYPE", ">GPU", ">ADDRESS", ">RING", ">HWPRIO", "CLASS", ">PRIO", "STATE", ">AGE", left, "+>CHANGED",
		"+TARGET", "+>DOORBELL", "+>MQD", "+>READ POINTER AT", "+>WRITE POINTER AT", "+PACKETS", "+SOURCE", "+NOTE",
	})
	for _, q := range list {
		t.row(text(q.GetPid()), text(q.GetComm()), text(q.GetQueueId()), text(q.GetType()), text(q.GetGpuId()), text(address(q.GetRingAddress())),
			text(size(q.GetRingBytes())), text(hardwarePriority(q)), text(api.EnumName(q.GetClass())), text(q.GetPriority()), state(q.GetState()),
			text(a.age(q.GetFirstSeen())), text(behind(q)), text(a.age(q.GetChangedAt())), text(q.GetTargetId()), text(doorbell(q)),
			text(address(q.GetMqdAddress())), text(address(q.GetReadPointerAddress())), text(address(q.GetWritePointerAddress())),
			text(packets(q)), text(or(q.GetSource(), "-")), text(or(cut(q.GetSourceNote(), 120), "-")))
	}
	t.flush()
}

// packets says what a queue is fed.
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

// address writes a virtual address; 0 is not known.
func address(at uint64) string {
	if at == 0 {
		return "-"
	}
	return fmt.Sprintf("0x%x", at)
}

// doorbell writes the byte offset of a queue's doorbell, which only an MQD tells; 0
// is one.
func doorbell(q *gpreemptv1.Queue) string {
	if !strings.Contains(q.GetSource(), "mqds") {
		return "-"
	}
	return fmt.Sprintf("0x%x", q.GetDoorbellOffset())
}

// hardwarePriority writes the priority the driver was given.
func hardwarePriority(q *gpreemptv1.Queue) string {
	if q.KfdPriority == nil {
		return "-"
	}
	return inexact(q.GetKfdPriority(), q.GetKfdPriorityExact())
}

// inexact marks a priority of the driver that is only near what it was given.
func inexact(priority uint32, exact bool) string {
	mark := "~"
	if exact {
		mark = ""
	}
	return strconv.FormatUint(uint64(priority), 10) + mark
}

// behind writes a backlog with its unit.
func behind(q *gpreemptv1.Queue) string {
	if q.Backlog == nil {
		return "-"
	}
	return fmt.Sprintf("%d %s", q.GetBacklog(), q.GetBacklogUnit())
}

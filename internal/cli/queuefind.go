package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// finding is the result of queue find for one process.
type finding struct {
	target *gpreemptv1.Target
	queues []foundQueue
	// revision is the inventory's, to watch from.
	revision uint64
	// notes are limits of the result.
	notes     []string
	simulated string
	file      string
	names     term.GPUNames
}

// foundQueue is a queue with the data joined to it.
type foundQueue struct {
	queue *gpreemptv1.Queue
	// active reports whether it is mapped to a hardware slot; nil is unknown, for the
	// reason why.
	active *bool
	why    string
	// slots is the number of its slots: one for each XCC.
	slots int
}

func queueFind(a *term.App) *cobra.Command {
	var container, pyfile string
	cmd := ofTarget(a, &cobra.Command{
		Use:   "find TARGET",
		Short: "Show the queues of one process in detail",
	}, func(cmd *cobra.Command, target string) error {
		if pyfile == "-" {
			return term.Usage(cmd, "invalid --python-config \"-\"; for standard output use -o json")
		}
		key, err := gpreempt.ParseProcessKey(target)
		if err != nil {
			return err
		}
		f, err := find(a, cmd, key, container)
		if err != nil {
			return err
		}
		if cmd.Flags().Changed("python-config") {
			f.file = pyfile
			if pyfile == term.PythonFile {
				f.file = strings.ReplaceAll(pyfile, "PID", strconv.Itoa(int(f.target.GetPid())))
			}
			if err := term.WritePython(f.file, f.forPython(), described(a, f)); err != nil {
				return err
			}
		}
		data, err := f.data()
		if err != nil {
			return err
		}
		return a.Show(data, func(p *term.Printer) { printFinding(a, p, f) })
	})
	operands, run := cmd.Args, cmd.RunE
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return operands(cmd, args)
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		return run(cmd, args)
	}
	cmd.Flags().StringVar(&container, "container", "", "its container: name, prefix of the id, or NAMESPACE/POD")
	cmd.Flags().StringVar(&pyfile, "python-config", "", "write the queues to a Python `FILE`")
	cmd.Flags().Lookup("python-config").NoOptDefVal = term.PythonFile
	term.CompleteBy(cmd, "container", a.ContainerNames)
	return cmd
}

// find asks the daemon.
func find(a *term.App, cmd *cobra.Command, key gpreempt.ProcessKey, container string) (*finding, error) {
	f := &finding{}
	return f, a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
		return findInDaemon(ctx, a, admin, key, container, f)
	})
}

// forPython returns the queues for a Python file.
func (f *finding) forPython() (queues []term.PythonQueue) {
	for _, q := range f.queues {
		id := q.queue.GetQueueId()
		queues = append(queues, term.PythonQueue{Address: q.queue.GetRingAddress(), ID: &id, PID: q.queue.GetPid(), Active: q.active})
	}
	return queues
}

// findInDaemon finds the process, its queues and their hardware slots.
func findInDaemon(ctx context.Context, a *term.App, admin term.AdminClient, key gpreempt.ProcessKey, container string, f *finding) error {
	target, err := term.OneTarget(ctx, admin, key, container)
	if err != nil {
		return err
	}
	list, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{TargetId: target.GetTargetId()})
	if err != nil {
		return err
	}
	if len(list.GetQueues()) == 0 {
		return &term.Failure{
			Code: term.ExitNotFound, Message: fmt.Sprintf("process %s has no KFD queues any more", target.GetTargetId()), Next: "gpctl target list",
		}
	}
	st, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	f.target, f.simulated, f.revision = target, term.Simulated(st), list.GetRevision()
	f.names = a.NameGPUs(ctx, admin)
	// Not only those of the target: a slot without a known owner may contain a queue of it.
	slots, err := admin.ListHqds(ctx, &gpreemptv1.ListHqdsRequest{})
	if err != nil {
		why := a.FromDaemon(ctx, err).Error()
		for _, q := range list.GetQueues() {
			f.queues = append(f.queues, foundQueue{queue: q, why: why})
		}
		return nil
	}
	f.notes = append(f.notes, fmt.Sprintf("activity is from a reading of the hardware slots %s ago", a.Age(slots.GetReadAt())))
	for _, q := range list.GetQueues() {
		found := foundQueue{queue: q}
		found.active, found.slots, found.why = held(q, slots)
		f.queues = append(f.queues, found)
	}
	return nil
}

// unknowns describes for which queues it is unknown whether they are active, and why. The
// numbers are those of the list.
func (f *finding) unknowns() []string {
	which := map[string][]string{}
	var order []string
	for i, q := range f.queues {
		if q.why == "" {
			continue
		}
		if which[q.why] == nil {
			order = append(order, q.why)
		}
		which[q.why] = append(which[q.why], strconv.Itoa(i+1))
	}
	for i, why := range order {
		some := ""
		if len(which[why]) < len(f.queues) {
			some = ", # " + strings.Join(which[why], ", ")
		}
		order[i] = fmt.Sprintf("unknown whether active%s: %s", some, why)
	}
	return order
}

// held reports whether q is mapped to a slot, and to how many. When that is unknown, it
// returns nil and the reason.
func held(q *gpreemptv1.Queue, slots *gpreemptv1.ListHqdsResponse) (active *bool, n int, why string) {
	kind := "sdma"
	if q.GetType() == "compute" {
		kind = "cp"
	}
	for _, h := range slots.GetHqds() {
		if h.GetState() != gpreemptv1.HqdState_HQD_STATE_LIVE || h.GetGpuId() != q.GetGpuId() {
			continue
		}
		switch {
		case h.GetTargetId() == q.GetTargetId() && h.GetQueueId() == q.GetQueueId():
			n++
		case h.GetTargetId() != "" || h.GetKind() != kind:
		case q.GetRingAddress() == 0 || h.GetRingAddress() == q.GetRingAddress():
			why = "a slot of its GPU contains a queue that could be this one: " + term.Or(h.GetMatch(), "owner unknown")
		}
	}
	yes := n > 0
	switch {
	case yes:
		return &yes, n, ""
	case slices.Contains(slots.GetStoppedGpuIds(), q.GetGpuId()):
		return nil, 0, fmt.Sprintf("the scheduler of GPU %d is stopped", q.GetGpuId())
	case why != "":
		return nil, 0, why
	}
	return &yes, 0, ""
}

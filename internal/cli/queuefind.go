package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/discovery/hiplog"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// finding is the result of queue find for one process.
type finding struct {
	// pid is that on the host, or the requested one when everything is from a log.
	pid int32
	// target is nil when everything is from a log.
	target *gpreemptv1.Target
	queues []foundQueue
	// revision is the inventory's, to watch from.
	revision uint64
	// logOnly are the queues of the log without a matching queue of the target.
	logOnly []hiplog.Address
	// notes are limits of the result.
	notes     []string
	simulated string
	file      string
	names     gpuNames
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
	// noID reports that the queue id is unknown: the queue is from a log without ids.
	noID bool
	// log is the queue in the log, or nil.
	log *hiplog.Queue
}

// queueFind searches below root without a daemon.
func (a *app) queueFind(root fs.FS) *cobra.Command {
	var (
		pid                    int32
		container, log, pyfile string
		by                     search
	)
	cmd := &cobra.Command{
		Use:   "find PID|--tag TAG|--priority RANGE",
		Short: "Show the queues of one process in detail, or find queues by tag and priority",
		Args: func(cmd *cobra.Command, args []string) error {
			searched := cmd.Flags().Changed("tag") || cmd.Flags().Changed("priority")
			switch given := cmd.Flags().Changed("pid"); {
			case searched && (len(args) > 0 || given || cmd.Flags().Changed("amd-log") || cmd.Flags().Changed("python-config")):
				return usage(cmd, "--tag and --priority search all processes: no PID, --pid, --amd-log or --python-config")
			case searched && by == (search{}):
				return usage(cmd, "--tag or --priority is empty")
			case searched:
			case len(args) > 1:
				hint := ""
				if cmd.Flags().Changed("python-config") {
					hint = "; use --python-config=FILE"
				}
				return usage(cmd, "unexpected argument %q%s", args[1], hint)
			case len(args) == 1 && given:
				return usage(cmd, "PID and --pid are mutually exclusive")
			case len(args) == 0 && !given:
				return usage(cmd, "missing argument: PID")
			}
			return nil
		},
		ValidArgsFunction: a.named,
		RunE: func(cmd *cobra.Command, args []string) error {
			if by != (search{}) {
				return a.searchQueues(cmd, by, container, root)
			}
			key := gpreempt.ProcessKey{PID: pid}
			var err error
			if len(args) == 1 {
				key, err = gpreempt.ParseProcessKey(args[0])
			}
			switch {
			case err != nil:
				return usage(cmd, "%v", err)
			case key.PID <= 0:
				return usage(cmd, "invalid --pid %d; use a number greater than 0", key.PID)
			case pyfile == "-":
				return usage(cmd, "invalid --python-config \"-\"; for standard output use -o json")
			}
			f, err := a.find(cmd, key, container, log)
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("python-config") {
				f.file = pyfile
				if pyfile == pythonFile {
					f.file = strings.ReplaceAll(pythonFile, "PID", strconv.Itoa(int(f.pid)))
				}
				if err := writePythonConfig(f.file, pythonConfig(f.queues, a.about(f))); err != nil {
					return err
				}
			}
			data, err := f.data()
			if err != nil {
				return err
			}
			return a.show(data, func(p *printer) { a.printFinding(p, f) })
		},
	}
	cmd.Flags().Int32Var(&pid, "pid", 0, "the process, as PID")
	cmd.Flags().StringVar(&by.tag, "tag", "", "processes whose "+classEnv+" or AMD_QUEUE_TAG is this")
	cmd.Flags().StringVar(&by.priority, "priority", "", "processes of this priority, or of a range such as 10-15")
	completeBy(cmd, "tag", a.completeTags)
	cmd.Flags().StringVar(&container, "container", "", "its container: name, prefix of the id, or NAMESPACE/POD")
	cmd.Flags().StringVar(&log, "amd-log", "", "a HIP log of the process, - is standard input")
	cmd.Flags().StringVar(&pyfile, "python-config", "", "write the queues to a Python `FILE`")
	cmd.Flags().Lookup("python-config").NoOptDefVal = pythonFile
	completeBy(cmd, "pid", a.targetNames)
	completeBy(cmd, "container", a.containerNames)
	return cmd
}

// pythonFile is the default file of --python-config.
const pythonFile = "queue_config_pid_PID.py"

// find asks the daemon, and reads the log, if any.
func (a *app) find(cmd *cobra.Command, key gpreempt.ProcessKey, container, logPath string) (*finding, error) {
	var logged *analyzedLog
	if logPath != "" {
		var err error
		if logged, err = a.analyzeLog(logPath); err != nil {
			return nil, err
		}
	}
	f := &finding{pid: key.PID}
	err := a.call(cmd, func(ctx context.Context, admin adminClient) error {
		return a.findInDaemon(ctx, admin, key, container, f)
	})
	if err != nil {
		unavailable, ok := errors.AsType[*failure](err)
		if logged == nil || !ok || !slices.Contains([]int{ExitUnreachable, ExitDenied, ExitNotFound}, unavailable.code) {
			return nil, err
		}
		return f.fromLog(logged, unavailable.message)
	}
	if logged != nil {
		if err := f.join(logged); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// findInDaemon finds the process, its queues and their hardware slots.
func (a *app) findInDaemon(ctx context.Context, admin adminClient, key gpreempt.ProcessKey, container string, f *finding) error {
	target, err := one(ctx, admin, key, container)
	if err != nil {
		return err
	}
	list, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{TargetId: target.GetTargetId()})
	if err != nil {
		return err
	}
	if len(list.GetQueues()) == 0 {
		return &failure{
			code: ExitNotFound, message: fmt.Sprintf("process %s has no KFD queues any more", target.GetTargetId()), next: "gpctl target list",
		}
	}
	st, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	f.target, f.pid, f.simulated, f.revision = target, target.GetPid(), simulated(st), list.GetRevision()
	f.names = a.nameGPUs(ctx, admin)
	// Not only those of the target: a slot without a known owner may contain a queue of it.
	slots, err := admin.ListHqds(ctx, &gpreemptv1.ListHqdsRequest{})
	if err != nil {
		why := a.fromDaemon(ctx, err).Error()
		for _, q := range list.GetQueues() {
			f.queues = append(f.queues, foundQueue{queue: q, why: why})
		}
		return nil
	}
	f.notes = append(f.notes, fmt.Sprintf("activity is from a reading of the hardware slots %s ago", a.age(slots.GetReadAt())))
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

// simulated returns the name of the simulated machine, "" for hardware.
func simulated(st *gpreemptv1.GetStatusResponse) string {
	machine, found := strings.CutPrefix(st.GetBackend(), "simulated")
	if !found {
		return ""
	}
	return or(strings.TrimSpace(machine), "machine")
}

// one returns the only process with the key, in the container unless that is "".
func one(ctx context.Context, admin adminClient, key gpreempt.ProcessKey, container string) (*gpreemptv1.Target, error) {
	resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Pid: key.PID, Container: container})
	if err != nil {
		return nil, err
	}
	matching := resp.GetTargets()
	name := strconv.Itoa(int(key.PID))
	if key.Start != 0 {
		name = key.String()
		matching = slices.DeleteFunc(matching, func(g *gpreemptv1.Target) bool { return g.GetTargetId() != name })
	}
	switch len(matching) {
	case 1:
		return matching[0], nil
	case 0:
		if container != "" {
			return nil, &failure{
				code: ExitNotFound, message: fmt.Sprintf("no process %s in container %s has KFD queues", name, container),
				next: "gpctl target list -o wide",
			}
		}
		return nil, &failure{
			code: ExitNotFound, message: fmt.Sprintf("process %s has no KFD queues", name),
			next: "gpctl target list; use the pid on the host or in the container",
		}
	}
	var which []string
	for _, g := range matching {
		where := "on the host"
		if len(g.GetNamespacePids()) > 0 {
			where = "pid " + ownPID(g) + " in a pid namespace"
		}
		if c := g.GetContainer(); c != nil {
			where = fmt.Sprintf("pid %s in container %s", or(strings.TrimPrefix(ownPID(g), "-"), name), containerName(c))
		}
		which = append(which, fmt.Sprintf("%s (%s, %s)", g.GetTargetId(), g.GetComm(), where))
	}
	return nil, &failure{
		code: ExitRefused, message: fmt.Sprintf("pid %s is ambiguous, %d processes have it: %s", name, len(matching), strings.Join(which, "; ")),
		next: "use PID@START, or --container",
	}
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
			why = "a slot of its GPU contains a queue that could be this one: " + or(h.GetMatch(), "owner unknown")
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

package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// tagEnv are the variables whose value is a tag, each with that of its priority.
var tagEnv = map[string]string{classEnv: priorityEnv, "AMD_QUEUE_TAG": "AMD_QUEUE_PRIORITY"}

// search selects processes by tag and priority.
type search struct {
	tag, priority string
	least, most   uint32
}

// parse sets the range of priorities.
func (s *search) parse(cmd *cobra.Command) error {
	if s.priority == "" {
		return nil
	}
	least, most, isRange := strings.Cut(s.priority, "-")
	if !isRange {
		most = least
	}
	from, err := strconv.ParseUint(least, 10, 8)
	to, failed := strconv.ParseUint(most, 10, 8)
	if err != nil || failed != nil || from > to || to > uint64(gpreempt.MaxPriority) {
		return term.Usage(cmd, "invalid --priority %q; use a priority 0 to %d, or a range such as 10-15", s.priority, gpreempt.MaxPriority)
	}
	s.least, s.most = uint32(from), uint32(to)
	return nil
}

// selects reports whether a process is searched for. priority is nil when it is unknown.
func (s *search) selects(env map[string]string, priority *uint32) bool {
	tagged := s.tag == "" || slices.ContainsFunc(slices.Collect(maps.Keys(tagEnv)), func(name string) bool { return env[name] == s.tag })
	return tagged && (s.priority == "" || priority != nil && *priority >= s.least && *priority <= s.most)
}

// searchQueues shows the queues of all processes with a tag or a priority. Without a daemon it
// finds them in sysfs below root.
func searchQueues(a *term.App, cmd *cobra.Command, s search, container string, root fs.FS) error {
	if err := s.parse(cmd); err != nil {
		return err
	}
	resp := &gpreemptv1.ListQueuesResponse{}
	var names term.GPUNames
	err := a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
		list, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Container: container})
		if err != nil {
			return err
		}
		wanted := map[string]bool{}
		for _, g := range list.GetTargets() {
			wanted[g.GetTargetId()] = s.selects(g.GetEnvironment(), &g.Priority)
		}
		if resp, err = admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{Container: container}); err != nil {
			return err
		}
		resp.Queues = slices.DeleteFunc(resp.GetQueues(), func(q *gpreemptv1.Queue) bool { return !wanted[q.GetTargetId()] })
		names = a.NameGPUs(ctx, admin)
		return nil
	})
	if f, ok := errors.AsType[*term.Failure](err); ok && f.Code == term.ExitUnreachable && a.Address == "" && container == "" {
		fmt.Fprintf(a.Err, "gpctl: %s; the result is from sysfs, with the priorities that the tags ask for\n", term.Printable(f.Message))
		var unread int
		if resp, unread, err = s.onHost(root); unread > 0 {
			fmt.Fprintf(a.Err, "gpctl: the environment of %d processes could not be read in %v: they are not searched\n", unread, readTime)
		}
	}
	switch {
	case err != nil:
		return err
	case len(resp.GetQueues()) == 0:
		return &term.Failure{Code: term.ExitNotFound, Message: "no process with KFD queues has this tag or priority", Next: "gpctl target list"}
	}
	return a.Show(resp, func(p *term.Printer) { printQueues(a, p, resp.GetQueues(), names, false) })
}

// readTime bounds how long a search without a daemon reads environments. A scan alone waits
// for milliseconds, because the daemon scans again.
const readTime = 2 * time.Second

// onHost searches the processes of this host, and returns how many could not be read in time.
// Their class is unknown; their priority is that of the tag.
func (s *search) onHost(root fs.FS) (resp *gpreemptv1.ListQueuesResponse, unread int, err error) {
	host := discovery.NewFS(root)
	host.SetEnv(slices.AppendSeq(slices.Collect(maps.Keys(tagEnv)), maps.Values(tagEnv)))
	var found discovery.Snapshot
	for until := time.Now().Add(readTime); ; <-time.After(10 * time.Millisecond) {
		if found, err = host.Scan(); err != nil {
			return nil, 0, &term.Failure{Code: term.ExitNoGPU, Message: fmt.Sprintf("cannot read the driver's processes: %v", err), Next: "gpctl doctor"}
		}
		unread = 0
		for _, process := range found.Processes {
			if process.Unread {
				unread++
			}
		}
		if unread == 0 || time.Now().After(until) {
			break
		}
	}
	resp = &gpreemptv1.ListQueuesResponse{}
	for _, process := range found.Processes {
		var priority *uint32
		for _, name := range slices.Sorted(maps.Values(tagEnv)) { // GPREEMPT_PRIORITY takes precedence
			if n, err := strconv.ParseUint(process.Env[name], 10, 8); err == nil {
				priority = new(uint32(n))
			}
		}
		if !s.selects(process.Env, priority) {
			continue
		}
		for _, q := range process.Queues {
			queue := &gpreemptv1.Queue{
				TargetId: process.Key.String(), Pid: process.Key.PID, Comm: process.Comm, QueueId: q.ID, GpuId: uint32(q.GPU), Type: q.Type.String(),
				RingBytes: q.RingBytes,
			}
			if priority != nil {
				queue.Priority = *priority
			}
			resp.Queues = append(resp.Queues, queue)
		}
	}
	return resp, unread, nil
}

// completeTags completes the tags of the present targets.
func completeTags(a *term.App) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return a.Offer(cmd, func(ctx context.Context, admin term.AdminClient) ([]cobra.Completion, error) {
			resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
			pids := map[string][]int32{}
			for _, g := range resp.GetTargets() {
				for name := range tagEnv {
					if tag := g.GetEnvironment()[name]; tag != "" {
						pids[tag] = append(pids[tag], g.GetPid())
					}
				}
			}
			var tags []cobra.Completion
			for _, tag := range slices.Sorted(maps.Keys(pids)) {
				tags = append(tags, cobra.CompletionWithDesc(term.Printable(tag), "pid "+term.Numbers(pids[tag])))
			}
			return tags, err
		})
	}
}

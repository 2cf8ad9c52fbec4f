package server

import (
	"context"
	"runtime"
	"slices"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// adminService implements gpreempt.v1.AdminService. The methods that read are here,
// those that change something in admin.go, and the streams in watch.go.
type adminService struct {
	gpreemptv1.UnimplementedAdminServiceServer
	s *Server
}

// GetStatus returns the state of the daemon.
func (a adminService) GetStatus(context.Context, *gpreemptv1.GetStatusRequest) (*gpreemptv1.GetStatusResponse, error) {
	s := a.s
	m := &gpreemptv1.GetStatusResponse{
		Version: s.cfg.Version, StartedAt: timestamppb.New(s.started), Backend: s.cfg.Backend,
		GpuCount: uint32(len(s.cfg.Inventory.GPUs())), InventoryRevision: s.cfg.Inventory.Revision(),
		EventRevision: s.cfg.Events.Revision(), BootId: s.cfg.BootID, GoroutineCount: uint32(runtime.NumGoroutine()),
		Mechanisms: s.cfg.Mechanisms,
	}
	sn := s.snapshot(func(c *scheduler.Core) {
		m.LeaseCount = uint32(c.LeaseCount())
		m.Draining, m.Policy = c.Draining(), c.Policy().Preset
	})
	m.Clock = durationpb.New(sn.clocks.scheduler)
	count := func(n *uint32, is bool) {
		if is {
			*n++
		}
	}
	for i := range sn.targets {
		t := &sn.targets[i]
		if len(t.proc.Queues) == 0 {
			continue
		}
		m.TargetCount++
		m.QueueCount += uint32(len(t.proc.Queues))
		count(&m.OfflineCount, t.class() == gpreempt.Offline)
		count(&m.CannotSuspendCount, t.info.CannotSuspend)
		count(&m.SuspendedCount, t.info.State == scheduler.TargetSuspended)
		count(&m.ShareCappedCount, t.info.Capped)
	}
	for _, w := range s.cfg.Warnings() {
		m.Warnings = append(m.Warnings, &gpreemptv1.Warning{Code: w.Code, Severity: w.Severity, Text: w.Text, Remedy: w.Remedy})
	}
	for _, source := range s.cfg.Observer.Sources() {
		m.Sources = append(m.Sources, sourceMessage(source))
	}
	return m, nil
}

// ListGpus returns the GPU nodes.
func (a adminService) ListGpus(context.Context, *gpreemptv1.ListGpusRequest) (*gpreemptv1.ListGpusResponse, error) {
	s := a.s
	infos := map[gpreempt.GPUID]scheduler.GPUInfo{}
	var targets []scheduler.TargetInfo
	s.cfg.Scheduler.View(func(c *scheduler.Core) {
		for _, info := range c.GPUs() {
			infos[info.ID] = info
		}
		targets = c.Targets()
	})
	used := s.cfg.Inventory.Occupancy(scheduler.OffGPU(targets))
	queues := map[gpreempt.GPUID]int{}
	all, _ := s.cfg.Inventory.Queues()
	for _, q := range all {
		queues[q.GPU]++
	}
	now := s.clocks()
	gpus := slices.SortedFunc(slices.Values(s.cfg.Inventory.GPUs()), func(a, b gpreempt.GPU) int { return a.Node - b.Node })
	m := &gpreemptv1.ListGpusResponse{}
	for _, g := range gpus {
		gpu := gpuMessage(g, infos[g.ID], queues[g.ID], used[g.ID], now)
		if n, known := s.cfg.Observer.MemoryEvictions(g.ID); known {
			gpu.MemoryEvictions = &n
		}
		m.Gpus = append(m.Gpus, gpu)
	}
	return m, nil
}

// ListTargets returns the processes that have queues.
func (a adminService) ListTargets(ctx context.Context, req *gpreemptv1.ListTargetsRequest) (*gpreemptv1.ListTargetsResponse, error) {
	sn := a.s.snapshot(nil)
	m := &gpreemptv1.ListTargetsResponse{}
	for i := range sn.targets {
		t := &sn.targets[i]
		if len(t.proc.Queues) > 0 && classMatches(req.GetClass(), t) && inContainer(req.GetContainer(), t) && hasPID(req.GetPid(), t) &&
			(req.GetGpuId() == 0 || slices.Contains(t.proc.GPUs(), gpreempt.GPUID(req.GetGpuId()))) {
			m.Targets = append(m.Targets, t.message(sn.clocks, a.s.mayReadMemory(ctx, t.proc.Process)))
		}
	}
	return m, nil
}

// ListQueues returns the queues, with the revision to watch from.
func (a adminService) ListQueues(ctx context.Context, req *gpreemptv1.ListQueuesRequest) (*gpreemptv1.ListQueuesResponse, error) {
	var only gpreempt.ProcessKey
	if req.GetTargetId() != "" {
		proc, err := a.s.resolve(req.GetTargetId())
		if err != nil {
			return nil, err
		}
		only = proc.Key
	}
	// The targets are read first, so a client that watches from the revision receives
	// every change that this list does not show.
	sn := a.s.snapshot(nil)
	queues, revision := a.s.cfg.Inventory.Queues()
	queues = slices.DeleteFunc(queues, func(q gpreempt.QueueEntry) bool {
		t := sn.target(q.Process)
		return !only.IsZero() && q.Process != only || req.GetGpuId() != 0 && uint32(q.GPU) != req.GetGpuId() ||
			!classMatches(req.GetClass(), t) || !inContainer(req.GetContainer(), t)
	})
	m := &gpreemptv1.ListQueuesResponse{Revision: revision}
	for _, q := range queues {
		t := sn.target(q.Process)
		qm := queueMessage(q, t)
		if t == nil { // created after the targets were read
			qm.State = gpreemptv1.TargetState_TARGET_STATE_UNSPECIFIED
		}
		m.Queues = append(m.Queues, qm)
	}
	if req.GetBacklog() {
		if err := a.s.addBacklogs(ctx, queues, m.GetQueues()); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// mayReadMemory is auth.Policy.MayReadMemory for the caller.
func (s *Server) mayReadMemory(ctx context.Context, proc gpreempt.Process) bool {
	return s.cfg.Authz().MayReadMemory(callerOf(ctx).peer, proc.Key, proc.UID)
}

// addBacklogs sets the backlogs of queues, which are ascending by process, in their
// messages. A backlog that cannot be read stays absent.
func (s *Server) addBacklogs(ctx context.Context, queues []gpreempt.QueueEntry, messages []*gpreemptv1.Queue) error {
	for len(queues) > 0 {
		n := 1
		for n < len(queues) && queues[n].Process == queues[0].Process {
			n++
		}
		for i, b := range s.cfg.Backlogs(ctx, queues[0].Process, queues[:n]) {
			if b.Known {
				messages[i].Backlog, messages[i].BacklogUnit = &b.Value, b.Unit
			}
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		queues, messages = queues[n:], messages[n:]
	}
	return nil
}

// classMatches reports whether a target has the class want. Every target has
// CLASS_UNSPECIFIED, and a nil target has no other.
func classMatches(want gpreemptv1.Class, t *target) bool {
	return want == gpreemptv1.Class_CLASS_UNSPECIFIED || t != nil && classMessage(t.class()) == want
}

// ListLeases returns the live leases, oldest first.
func (a adminService) ListLeases(context.Context, *gpreemptv1.ListLeasesRequest) (*gpreemptv1.ListLeasesResponse, error) {
	var leases []scheduler.LeaseInfo
	a.s.cfg.Scheduler.View(func(c *scheduler.Core) { leases = c.Leases() })
	now := a.s.clocks()
	m := &gpreemptv1.ListLeasesResponse{}
	for _, l := range leases {
		m.Leases = append(m.Leases, a.s.leaseMessage(l, now))
	}
	return m, nil
}

// ExplainTarget reports why a target is, or is not, suspended.
func (a adminService) ExplainTarget(ctx context.Context, req *gpreemptv1.ExplainTargetRequest) (*gpreemptv1.ExplainTargetResponse, error) {
	s := a.s
	proc, err := s.resolve(req.GetTargetId())
	if err != nil {
		return nil, err
	}
	var e scheduler.Explanation
	var leases []scheduler.LeaseInfo
	var known bool
	t := s.target(proc, func(c *scheduler.Core) {
		leases = c.Leases()
		e, known = c.Explain(proc.Key)
	})
	if !known {
		return nil, unknownTarget(proc.Key)
	}
	now := s.clocks()
	readable := s.mayReadMemory(ctx, proc.Process)
	m := &gpreemptv1.ExplainTargetResponse{Target: t.message(now, readable), Verdict: verdictText(&e)}
	for _, step := range s.cfg.Directory.Explain(proc.Key) {
		class := gpreemptv1.Class_CLASS_UNSPECIFIED
		if step.By != classify.ByAdmin || step.Matches {
			class = classMessage(step.Class)
		}
		if !readable { // the detail may quote what message leaves out
			step.Detail = "shown only to admins and to the user of the process"
		}
		m.Classification = append(m.Classification, &gpreemptv1.ClassifyStep{
			By: step.By, Class: class, Matches: step.Matches, Decides: step.Decides, Detail: step.Detail,
		})
	}
	for _, c := range e.Checks {
		m.Checks = append(m.Checks, &gpreemptv1.ExplainCheck{
			Check: c.Name, Result: gpreemptv1.CheckResult(c.Result), Decides: c.Decides, Detail: explained{e.Facts}.detail(c.Name),
		})
	}
	for _, l := range leases {
		if slices.Contains(e.Leases, l.ID) {
			m.Leases = append(m.Leases, s.leaseMessage(l, now))
		}
	}
	return m, nil
}

// GetStatistics returns counters and latencies.
func (a adminService) GetStatistics(ctx context.Context, _ *gpreemptv1.GetStatisticsRequest) (*gpreemptv1.GetStatisticsResponse, error) {
	return a.s.statistics.get(ctx, callerOf(ctx).notBefore(), func() *gpreemptv1.GetStatisticsResponse {
		return &gpreemptv1.GetStatisticsResponse{Statistics: statisticsMessage(a.s.cfg.Events.Stats(), a.s.cfg.Directory.RuleCounts(), a.s.shadowReport())}
	})
}

// Diagnose checks whether and how gpreempt can work on this host.
func (a adminService) Diagnose(ctx context.Context, _ *gpreemptv1.DiagnoseRequest) (*gpreemptv1.DiagnoseResponse, error) {
	return a.s.diagnosis.get(ctx, callerOf(ctx).notBefore(), func() *gpreemptv1.DiagnoseResponse { return a.s.cfg.Diagnose(ctx) })
}

package server

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// The scheduler's enums have the API's numbers, except that the classes differ by
// one, because the API has a value for "not set".

func classMessage(c gpreempt.Class) gpreemptv1.Class { return gpreemptv1.Class(c) + 1 }

// classOf returns a class; ok is false for UNSPECIFIED and for a value that this
// build does not know.
func classOf(c gpreemptv1.Class) (class gpreempt.Class, ok bool) {
	if c < gpreemptv1.Class_CLASS_UNMANAGED || c > gpreemptv1.Class_CLASS_OFFLINE {
		return gpreempt.Unmanaged, false
	}
	return gpreempt.Class(c - 1), true
}

// quiesceReasons has the API's value for each reason of an answer, by its name.
var quiesceReasons = func() map[gpreempt.Reason]gpreemptv1.QuiesceReason {
	values := map[gpreempt.Reason]gpreemptv1.QuiesceReason{}
	for n := range gpreemptv1.QuiesceReason_name {
		values[gpreempt.Reason(api.EnumName(gpreemptv1.QuiesceReason(n)))] = gpreemptv1.QuiesceReason(n)
	}
	delete(values, "") // UNSPECIFIED is no reason
	return values
}()

// quiesceReason returns the reason of an answer. An obstacle without a value of its own is CANNOT_SUSPEND.
func quiesceReason(why gpreempt.Reason) gpreemptv1.QuiesceReason {
	if why.Obstacle() != "" {
		return cmp.Or(quiesceReasons[why], gpreemptv1.QuiesceReason_QUIESCE_REASON_CANNOT_SUSPEND)
	}
	return quiesceReasons[why]
}

func gpuIDs(gpus []gpreempt.GPUID) []uint32 {
	ids := make([]uint32, len(gpus))
	for i, id := range gpus {
		ids[i] = uint32(id)
	}
	return ids
}

// clocks are the scheduler's clock and the wall clock at one time, which convert
// times of the scheduler.
type clocks struct {
	scheduler scheduler.Time
	wall      time.Time
}

func (s *Server) clocks() clocks { return clocks{s.cfg.Scheduler.Now(), s.cfg.Now()} }

func (c clocks) at(t scheduler.Time) *timestamppb.Timestamp {
	return timestamppb.New(c.wall.Add(t - c.scheduler))
}

// until returns the time left, not below 0.
func (c clocks) until(t scheduler.Time) *durationpb.Duration {
	return durationpb.New(max(0, t-c.scheduler))
}

func gpuMessage(g gpreempt.GPU, info scheduler.GPUInfo, queues int, used inventory.Occupancy, now clocks) *gpreemptv1.Gpu {
	m := &gpreemptv1.Gpu{
		GpuId: uint32(g.ID), Node: uint32(g.Node), Name: g.Name, GfxTargetVersion: g.GFX, Bdf: g.BDF,
		RenderMinor: uint32(g.RenderMinor), XccCount: uint32(g.XCCs), CuCount: uint32(g.CUs),
		QueueSlots: uint32(g.QueueSlots), QueueCount: uint32(queues), Mes: g.MES,
		LeaseCount: uint32(info.Leases), SuspendedCount: uint32(info.Suspended), BreakerOpen: info.BreakerOpen,
		MappedQueueCount: uint32(used.Mapped), OfflineMappedQueueCount: uint32(used.Offline),
	}
	if used.Slots > 0 {
		m.FreeSlotCount = new(uint32(used.Free()))
	}
	if info.BreakerOpen {
		m.BreakerClosesIn = now.until(info.BreakerCloses)
	}
	return m
}

// target is all that is known of one process.
type target struct {
	proc  discovery.Proc
	facts targets.Facts
	// info is the zero value until the scheduler knows the process.
	info scheduler.TargetInfo
}

// class and priority are those of the scheduler, once it knows the process.
func (t *target) class() gpreempt.Class {
	if t.info.Key.IsZero() {
		return t.facts.Decision.Class
	}
	return t.info.Class
}

func (t *target) priority() gpreempt.Priority {
	if t.info.Key.IsZero() {
		return t.facts.Decision.Priority
	}
	return t.info.Priority
}

// message returns the target; memory is whether the caller may read the memory of the process,
// which decides over what the kernel shows only to such a caller.
func (t *target) message(now clocks, memory bool) *gpreemptv1.Target {
	m := &gpreemptv1.Target{
		TargetId: t.proc.Key.String(), Pid: t.proc.Key.PID, Comm: t.proc.Comm, Cmdline: t.proc.Cmdline,
		Uid: t.proc.UID, Cgroup: t.proc.Cgroup.Path, Class: classMessage(t.class()), Priority: uint32(t.priority()),
		DecidedBy: t.facts.Decision.By, State: gpreemptv1.TargetState(t.info.State),
		GpuIds: gpuIDs(t.proc.GPUs()), QueueCount: uint32(len(t.proc.Queues)),
		Mechanism: t.facts.Mechanism, AttachError: t.facts.AttachError, MechanismWhy: t.facts.MechanismWhy, AttachCycles: t.facts.AttachCycles,
		Gid: t.proc.GID, Exe: t.proc.Exe, NamespacePids: t.proc.NamespacePIDs, Container: containerMessage(t.proc.Cgroup, t.facts.Container),
		Unit: t.proc.Cgroup.Unit, Slice: t.proc.Cgroup.Slice, UserUnit: t.proc.Cgroup.UserUnit, Environment: t.proc.Env,
		IdConflict: cmp.Or(t.proc.Cgroup.Conflict, t.facts.Container.Conflict),
		Suspends:   t.info.Suspends, SuspendedTotal: durationpb.New(t.info.SuspendedTotal),
		Job: t.jobMessage(memory),
	}
	if !memory {
		m.Cmdline, m.Exe, m.Environment = "", "", nil
	}
	if t.info.Key.IsZero() {
		return m
	}
	m.InState = durationpb.New(max(0, now.scheduler-t.info.Since))
	m.CannotSuspend, m.RefusedSuspensions = t.info.CannotSuspend, uint32(t.info.Refusals)
	if t.info.OnResist.Enforced() {
		m.OnResist = t.info.OnResist.String()
	}
	switch t.info.State {
	case scheduler.TargetSuspending, scheduler.TargetSuspended, scheduler.TargetResuming:
		m.RunsWithin = now.until(t.info.RunsBy)
	default:
	}
	if t.info.LearnedSuspend > 0 {
		m.LearnedSuspend = durationpb.New(t.info.LearnedSuspend)
	}
	if t.info.LearnedResume > 0 {
		m.LearnedResume = durationpb.New(t.info.LearnedResume)
	}
	return m
}

// jobMessage returns the job of a process; nil without one. why has the environment of its
// processes.
func (t *target) jobMessage(why bool) *gpreemptv1.Job {
	if t.facts.JobName == "" {
		return nil
	}
	m := &gpreemptv1.Job{Name: t.facts.JobName}
	if why {
		m.Why = t.facts.Job.String()
	}
	// The scheduler counts offline processes only, and may know the process by an earlier job.
	if info := t.info.Job; info.Name == m.GetName() {
		m.TargetCount = uint32(info.Targets)
		if info.Over > 0 {
			m.RunningRatio, m.MeasuredOver = &info.Ran, durationpb.New(info.Over)
		}
	}
	return m
}

// containerMessage returns the container of a process; nil without one.
func containerMessage(at gpreempt.Cgroup, c gpreempt.Container) *gpreemptv1.Container {
	if at.ContainerID == "" && at.PodUID == "" || c.Conflict != "" {
		return nil
	}
	return &gpreemptv1.Container{
		Runtime: at.Runtime, ContainerId: at.ContainerID, Name: c.Name, Image: c.Image, Labels: c.Labels,
		PodUid: at.PodUID, Namespace: c.Namespace, Pod: c.Pod, PodLabels: c.PodLabels,
	}
}

// minContainerID is the length of the shortest beginning of a container ID that
// names it.
const minContainerID = 4

// inContainer reports whether a target is in the container with a name, the beginning
// of an ID, or NAMESPACE/POD. Every target is in "", and a nil target is in no other.
func inContainer(name string, t *target) bool {
	if name == "" {
		return true
	}
	if t == nil {
		return false
	}
	c, id := &t.facts.Container, t.proc.Cgroup.ContainerID
	if c.Conflict != "" {
		return false
	}
	return name == c.Name || len(name) >= minContainerID && strings.HasPrefix(id, name) || c.Pod != "" && name == c.Namespace+"/"+c.Pod
}

// hasPID reports whether pid is 0, or the target's pid in the daemon's namespace or in
// one of its own.
func hasPID(pid int32, t *target) bool {
	return pid == 0 || t.proc.Key.PID == pid || slices.Contains(t.proc.NamespacePIDs, pid)
}

// queueMessage describes a queue; t is nil when its process has exited.
func queueMessage(q gpreempt.QueueEntry, t *target) *gpreemptv1.Queue {
	m := &gpreemptv1.Queue{
		TargetId: q.Process.String(), Pid: q.Process.PID, QueueId: q.ID, GpuId: uint32(q.GPU), Type: q.Type.String(),
		RingBytes: q.RingBytes, FirstSeen: timestamppb.New(q.FirstSeen), State: gpreemptv1.TargetState_TARGET_STATE_GONE,
	}
	if t != nil {
		m.Class, m.Priority = classMessage(t.class()), uint32(t.priority())
		m.State, m.Comm = gpreemptv1.TargetState(t.info.State), t.proc.Comm
	}
	if !q.ChangedAt.IsZero() {
		m.ChangedAt = timestamppb.New(q.ChangedAt)
	}
	info := &q.Info
	m.Source, m.SourceNote = sourceNames(info.Source), info.Note
	m.RingAddress, m.MqdAddress = known(info.RingBase), known(info.MQD)
	m.ReadPointerAddress, m.WritePointerAddress = known(info.ReadPointer), known(info.WritePointer)
	if info.Source != 0 {
		m.Aql = &info.AQL
	}
	if info.Source&gpreempt.FromMQD != 0 {
		m.DoorbellOffset = &info.Doorbell
	}
	if info.PriorityKnown {
		m.KfdPriority, m.KfdPriorityExact = new(uint32(info.Priority)), info.PriorityExact
	}
	return m
}

// known returns an address, nil for one that no source has reported.
func known(address uint64) *uint64 {
	if address == 0 {
		return nil
	}
	return &address
}

func sourceNames(s gpreempt.QueueSource) string {
	var names []string
	if s&gpreempt.FromSnapshot != 0 {
		names = append(names, "snapshot")
	}
	if s&gpreempt.FromMQD != 0 {
		names = append(names, "mqds")
	}
	return strings.Join(names, ", ")
}

func (s *Server) leaseMessage(l scheduler.LeaseInfo, now clocks) *gpreemptv1.Lease {
	m := &gpreemptv1.Lease{
		LeaseId: leaseID(s.leasePrefix, l.ID), GpuIds: gpuIDs(l.GPUs), Priority: uint32(l.Priority),
		State: gpreemptv1.LeaseState(l.State), Label: l.Label, CreatedAt: now.at(l.Created), ExpiresIn: now.until(l.Expires),
	}
	if l.Client.IsAdmin() {
		setOwner(m, s.admins.note(l.ID).admin)
	} else {
		m.ClientPid = l.Client.PID
		if c := s.clients.byClient(l.Client); c != nil {
			setOwner(m, c.peer)
		}
	}
	return m
}

func (s *Server) eventMessage(e events.Entry) *gpreemptv1.Event {
	r := e.Record
	m := &gpreemptv1.Event{
		Revision: e.Revision, At: timestamppb.New(e.At), Kind: gpreemptv1.EventKind(r.Kind),
		FromTarget: gpreemptv1.TargetState(r.FromTarget), ToTarget: gpreemptv1.TargetState(r.ToTarget),
		FromLease: gpreemptv1.LeaseState(r.FromLease), ToLease: gpreemptv1.LeaseState(r.ToLease),
		End: gpreemptv1.LeaseEnd(r.End), GpuId: uint32(r.GPU), Cause: string(r.Cause), Clock: durationpb.New(r.At),
		GpuIds: gpuIDs(r.GPUs),
	}
	if !r.Target.IsZero() {
		m.TargetId = r.Target.String()
	}
	if r.Lease != 0 {
		m.LeaseId = leaseID(s.leasePrefix, r.Lease)
	}
	if r.Took != 0 {
		m.Took = durationpb.New(r.Took)
	}
	if r.Trace != nil {
		m.Trace = &gpreemptv1.TraceContext{Traceparent: r.Trace.Parent, Tracestate: r.Trace.State}
	}
	switch {
	case e.Admin != "":
		m.Kind, m.Message = gpreemptv1.EventKind_EVENT_KIND_ADMIN, e.Admin
	case r.Kind == scheduler.RecordBreaker && r.On:
		m.Message = "open"
	case r.Kind == scheduler.RecordBreaker:
		m.Message = "closed"
	case r.Kind == scheduler.RecordReset:
		m.Message = resetMessage(r)
	case r.Kind == scheduler.RecordShadow:
		m.Message = shadowMessage(r)
	case r.Kind == scheduler.RecordDrain && r.On:
		m.Message = "draining"
	case r.Kind == scheduler.RecordDrain:
		m.Message = "no longer draining"
	}
	return m
}

// shadowMessage describes what a shadow policy would have suspended or resumed, and for whom.
func shadowMessage(r scheduler.Record) string {
	text := fmt.Sprintf("%s, by %s", r.Shadow.Comm, r.Shadow.By)
	if owner := ownerText(*r.Shadow); r.Lease != 0 {
		text += ", for " + owner
	}
	return text
}

// ownerText describes the owner of a lease.
func ownerText(of scheduler.Shadowed) string {
	owner := "a certificate"
	switch {
	case of.Cause != "":
		return string(of.Cause)
	case of.Client.IsAdmin():
		owner = "an admin"
	case of.Client.PID != 0:
		owner = fmt.Sprintf("process %d", of.Client.PID)
	}
	if of.Label != "" {
		owner = strconv.Quote(of.Label) + " of " + owner
	}
	return owner
}

// resetMessage describes whose queue the driver has reset.
func resetMessage(r scheduler.Record) string {
	who := "the driver names a process that is not known"
	if !r.Target.IsZero() {
		who = fmt.Sprintf("the driver names process %d, %v", r.Target.PID, r.Class)
	}
	if r.Suspects > 1 || r.Target.IsZero() {
		who += fmt.Sprintf("; it may have been that of any of %d processes", r.Suspects)
	}
	return who
}

func statisticsMessage(st events.Stats, rules []targets.RuleCount, shadow *gpreemptv1.ShadowReport) *gpreemptv1.Statistics {
	m := &gpreemptv1.Statistics{
		Announcements: st.Announcements, Quiesced: st.Quiesced, MaxWaitPassed: st.MaxWaitPassed,
		Suspends: st.Suspends, Resumes: st.Resumes, Failures: st.Failures, Coalesced: st.Coalesced,
		ForcedResumes: st.ForcedResumes, ShadowSuspends: st.ShadowSuspends, AttachCycles: st.AttachCycles,
		QuiesceLatency: latencyMessage(st.Quiesce), SuspendLatency: latencyMessage(st.Suspend),
		ResumeLatency: latencyMessage(st.Resume), LeaseDuration: latencyMessage(st.Lease), Shadow: shadow,
	}
	for _, r := range rules {
		class := classMessage(r.Class)
		if r.Rule == classify.ByTag { // each process has its own
			class = gpreemptv1.Class_CLASS_UNSPECIFIED
		}
		m.Rules = append(m.Rules, &gpreemptv1.RuleCount{
			Rule: r.Rule, Class: class, Matched: r.Matched, Decided: r.Decided, MatchesNow: r.MatchesNow, DecidesNow: r.DecidesNow,
		})
	}
	for _, why := range slices.Sorted(maps.Keys(st.Refused)) {
		m.Refusals = append(m.Refusals, &gpreemptv1.RefusalCount{Reason: string(why), Count: st.Refused[why]})
	}
	return m
}

// shadowReport returns what the shadow policy would have done, nil without one since the start.
func (s *Server) shadowReport() *gpreemptv1.ShadowReport {
	m := &gpreemptv1.ShadowReport{InForce: s.policy().Shadow}
	rows, lasted := s.cfg.Events.Shadow(s.cfg.Scheduler.Now())
	if !m.GetInForce() && rows == nil {
		return nil
	}
	m.Lasted = durationpb.New(lasted)
	for _, r := range rows {
		row := &gpreemptv1.ShadowRow{
			Comm: r.Comm, ClassifiedBy: r.By, GpuCount: uint32(r.GPUs), Suspends: r.Suspends, Total: durationpb.New(r.Total), Longest: durationpb.New(r.Longest),
		}
		if !r.Target.IsZero() {
			row.TargetId, row.Owner = r.Target.String(), ownerText(r.Shadowed)
		}
		m.Rows = append(m.Rows, row)
	}
	return m
}

func latencyMessage(l events.Latency) *gpreemptv1.LatencySummary {
	return &gpreemptv1.LatencySummary{
		Count: l.Count, Mean: durationpb.New(l.Mean), P50: durationpb.New(l.P50), P95: durationpb.New(l.P95),
		P99: durationpb.New(l.P99), Max: durationpb.New(l.Max),
	}
}

// snapshot is the state of everything at about one time.
type snapshot struct {
	clocks  clocks
	targets []target // ascending by pid
}

// target returns a process; nil when it has exited.
func (sn *snapshot) target(key gpreempt.ProcessKey) *target {
	at, ok := slices.BinarySearchFunc(sn.targets, key, func(t target, k gpreempt.ProcessKey) int { return t.proc.Key.Compare(k) })
	if !ok {
		return nil
	}
	return &sn.targets[at]
}

// snapshot joins the inventory, the directory and the scheduler. also, when set, is
// called with the scheduler's state at the same time.
func (s *Server) snapshot(also func(*scheduler.Core)) snapshot {
	procs := s.cfg.Inventory.Processes()
	infos := map[gpreempt.ProcessKey]scheduler.TargetInfo{}
	s.cfg.Scheduler.View(func(c *scheduler.Core) {
		for _, info := range c.Targets() {
			infos[info.Key] = info
		}
		if also != nil {
			also(c)
		}
	})
	sn := snapshot{clocks: s.clocks(), targets: make([]target, 0, len(procs))}
	for _, proc := range procs {
		facts, _ := s.cfg.Directory.Facts(proc.Key)
		sn.targets = append(sn.targets, target{proc: proc, facts: facts, info: infos[proc.Key]})
	}
	return sn
}

// target returns one process. also is called with the scheduler's state at the same time.
func (s *Server) target(proc discovery.Proc, also func(*scheduler.Core)) target {
	t := target{proc: proc}
	t.facts, _ = s.cfg.Directory.Facts(proc.Key)
	s.cfg.Scheduler.View(func(c *scheduler.Core) {
		t.info, _ = c.Target(proc.Key)
		also(c)
	})
	return t
}

package server

import (
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// The scheduler's enums have the API's numbers; the class alone is off by one,
// because the API needs a value for "not given".

func classMessage(c gpreempt.Class) gpreemptv1.Class { return gpreemptv1.Class(c) + 1 }

// classOf reads a class; ok is false for UNSPECIFIED and for what this build
// does not know.
func classOf(c gpreemptv1.Class) (class gpreempt.Class, ok bool) {
	if c < gpreemptv1.Class_CLASS_UNMANAGED || c > gpreemptv1.Class_CLASS_OFFLINE {
		return gpreempt.Unmanaged, false
	}
	return gpreempt.Class(c - 1), true
}

// setDuration is durationpb.New without the allocation.
func setDuration(m *durationpb.Duration, d time.Duration) {
	m.Seconds, m.Nanos = int64(d/time.Second), int32(d%time.Second)
}

func gpuIDs(gpus []gpreempt.GPUID) []uint32 {
	ids := make([]uint32, len(gpus))
	for i, id := range gpus {
		ids[i] = uint32(id)
	}
	return ids
}

// moment turns a time of the scheduler into wall clock.
type moment struct {
	scheduler scheduler.Time
	wall      time.Time
}

func (s *Server) moment() moment { return moment{s.cfg.Scheduler.Now(), s.cfg.Now()} }

func (m moment) at(t scheduler.Time) *timestamppb.Timestamp {
	return timestamppb.New(m.wall.Add(t - m.scheduler))
}

// until returns the time left, not below 0.
func (m moment) until(t scheduler.Time) *durationpb.Duration {
	return durationpb.New(max(0, t-m.scheduler))
}

// since returns the time gone by, not below 0.
func (m moment) since(t scheduler.Time) *durationpb.Duration {
	return durationpb.New(max(0, m.scheduler-t))
}

func gpuMessage(g gpreempt.GPU, info scheduler.GPUInfo, queues int, now moment) *gpreemptv1.Gpu {
	m := &gpreemptv1.Gpu{
		GpuId: uint32(g.ID), Node: uint32(g.Node), Name: g.Name, GfxTargetVersion: g.GFX, Bdf: g.BDF,
		RenderMinor: uint32(g.RenderMinor), XccCount: uint32(g.XCCs), CuCount: uint32(g.CUs),
		QueueSlots: uint32(g.QueueSlots), QueueCount: uint32(queues), Mes: g.MES,
		LeaseCount: uint32(info.Leases), SuspendedCount: uint32(info.Suspended), BreakerOpen: info.BreakerOpen,
	}
	if info.BreakerOpen {
		m.BreakerClosesIn = now.until(info.BreakerCloses)
	}
	return m
}

// owner is all that is known of one process.
type owner struct {
	proc  discovery.Proc
	facts Facts
	// info is the zero value while the scheduler does not know the process.
	info scheduler.TargetInfo
}

// class and priority are those the scheduler acts on, once it has them.
func (o *owner) class() gpreempt.Class {
	if o.info.Key.IsZero() {
		return o.facts.Decision.Class
	}
	return o.info.Class
}

func (o *owner) priority() gpreempt.Priority {
	if o.info.Key.IsZero() {
		return o.facts.Decision.Priority
	}
	return o.info.Priority
}

func (o *owner) message(now moment) *gpreemptv1.Target {
	m := &gpreemptv1.Target{
		TargetId: o.proc.Key.String(), Pid: o.proc.Key.PID, Comm: o.proc.Comm, Cmdline: o.proc.Cmdline,
		Uid: o.proc.UID, Cgroup: o.proc.Cgroup.Path, Class: classMessage(o.class()), Priority: uint32(o.priority()),
		DecidedBy: o.facts.Decision.By, State: gpreemptv1.TargetState(o.info.State),
		GpuIds: newGPUSet(gpusOf(o.proc)).ids, QueueCount: uint32(len(o.proc.Queues)),
		Mechanism: o.facts.Mechanism, AttachError: o.facts.AttachError, MechanismWhy: o.facts.MechanismWhy,
		Gid: o.proc.GID, Exe: o.proc.Exe, NamespacePids: o.proc.NamespacePIDs, Container: containerMessage(o.proc.Cgroup, o.facts.Container),
		Unit: o.proc.Cgroup.Unit, Slice: o.proc.Cgroup.Slice, Environment: o.proc.Env,
		Suspends: o.info.Suspends, SuspendedTotal: durationpb.New(o.info.SuspendedTotal),
	}
	if o.info.Key.IsZero() {
		return m
	}
	m.InState = now.since(o.info.Since)
	switch o.info.State {
	case scheduler.TargetSuspending, scheduler.TargetSuspended, scheduler.TargetResuming:
		m.RunsWithin = now.until(o.info.RunsBy)
	default:
	}
	if o.info.LearnedSuspend > 0 {
		m.LearnedSuspend = durationpb.New(o.info.LearnedSuspend)
	}
	if o.info.LearnedResume > 0 {
		m.LearnedResume = durationpb.New(o.info.LearnedResume)
	}
	return m
}

// containerMessage describes a container; nil when the process is in none.
func containerMessage(at gpreempt.Cgroup, c gpreempt.Container) *gpreemptv1.Container {
	if at.ContainerID == "" && at.PodUID == "" {
		return nil
	}
	return &gpreemptv1.Container{
		Runtime: at.Runtime, ContainerId: at.ContainerID, Name: c.Name, Image: c.Image, Labels: c.Labels,
		PodUid: at.PodUID, Namespace: c.Namespace, Pod: c.Pod, PodLabels: c.PodLabels, PriorityClass: c.PriorityClass,
	}
}

// shortestID is how much of a container id names it.
const shortestID = 4

// inContainer is a filter that "" passes: the name of a container, the beginning of
// its id, or NAMESPACE/POD. Nothing is known of a nil owner.
func inContainer(name string, o *owner) bool {
	if name == "" {
		return true
	}
	if o == nil {
		return false
	}
	c, id := &o.facts.Container, o.proc.Cgroup.ContainerID
	return name == c.Name || len(name) >= shortestID && strings.HasPrefix(id, name) || c.Pod != "" && name == c.Namespace+"/"+c.Pod
}

// hasPID is a filter that 0 passes: the pid in the daemon's namespace or in one of
// the process's own.
func hasPID(pid int32, o *owner) bool {
	return pid == 0 || o.proc.Key.PID == pid || slices.Contains(o.proc.NamespacePIDs, pid)
}

// queueMessage describes a queue; owner is nil when its process has left.
func queueMessage(q gpreempt.QueueEntry, o *owner) *gpreemptv1.Queue {
	m := &gpreemptv1.Queue{
		TargetId: q.Process.String(), Pid: q.Process.PID, QueueId: q.ID, GpuId: uint32(q.GPU), Type: q.Type.String(),
		RingBytes: q.RingBytes, FirstSeen: timestamppb.New(q.FirstSeen), State: gpreemptv1.TargetState_TARGET_STATE_GONE,
	}
	if o != nil {
		m.Class, m.Priority = classMessage(o.class()), uint32(o.priority())
		m.State, m.Comm = gpreemptv1.TargetState(o.info.State), o.proc.Comm
	}
	if !q.ChangedAt.IsZero() {
		m.ChangedAt = timestamppb.New(q.ChangedAt)
	}
	info := &q.Info
	m.Source, m.SourceNote = sourceWords(info.Source), info.Note
	m.RingAddress, m.Aql, m.DoorbellOffset, m.MqdAddress = info.RingBase, info.AQL, info.Doorbell, info.MQD
	m.ReadPointerAddress, m.WritePointerAddress = info.ReadPointer, info.WritePointer
	if info.PriorityKnown {
		m.KfdPriority, m.KfdPriorityExact = new(uint32(info.Priority)), info.PriorityExact
	}
	return m
}

func sourceWords(s gpreempt.QueueSource) string {
	var words []string
	if s&gpreempt.FromSnapshot != 0 {
		words = append(words, "snapshot")
	}
	if s&gpreempt.FromMQD != 0 {
		words = append(words, "mqds")
	}
	return strings.Join(words, ", ")
}

func (s *Server) leaseMessage(l scheduler.LeaseInfo, now moment) *gpreemptv1.Lease {
	m := &gpreemptv1.Lease{
		LeaseId: leaseID(s.leasePrefix, l.ID), GpuIds: gpuIDs(l.GPUs), Priority: uint32(l.Priority),
		State: gpreemptv1.LeaseState(l.State), CreatedAt: now.at(l.Created), ExpiresIn: now.until(l.Expires),
	}
	if l.Client == 0 {
		h := s.byHand.note(l.ID)
		m.Label = h.label
		setHolder(m, h.admin)
	} else {
		m.ClientPid = ProcessOf(l.Client).PID
		if c := s.clients.byClient(l.Client); c != nil {
			m.Label = c.note(l.ID).label
			setHolder(m, c.peer)
		}
	}
	if !l.Target.IsZero() {
		m.TargetIds = []string{l.Target.String()}
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
	switch {
	case e.Admin != "":
		m.Kind, m.Message = gpreemptv1.EventKind_EVENT_KIND_ADMIN, e.Admin
	case r.Kind == scheduler.RecordBreaker && r.On:
		m.Message = "open"
	case r.Kind == scheduler.RecordBreaker:
		m.Message = "closed"
	case r.Kind == scheduler.RecordDrain && r.On:
		m.Message = "draining"
	case r.Kind == scheduler.RecordDrain:
		m.Message = "no longer draining"
	}
	return m
}

func statisticsMessage(st events.Stats, rules []RuleCount) *gpreemptv1.Statistics {
	m := &gpreemptv1.Statistics{
		Announcements: st.Announcements, Quiesced: st.Quiesced, MaxWaitPassed: st.MaxWaitPassed,
		Suspends: st.Suspends, Resumes: st.Resumes, Failures: st.Failures, Coalesced: st.Coalesced,
		ForcedResumes: st.ForcedResumes, ShadowSuspends: st.ShadowSuspends,
		QuiesceLatency: latencyMessage(st.Quiesce), SuspendLatency: latencyMessage(st.Suspend),
		ResumeLatency: latencyMessage(st.Resume), LeaseDuration: latencyMessage(st.Lease),
	}
	for _, r := range rules {
		m.Rules = append(m.Rules, &gpreemptv1.RuleCount{
			Rule: r.Rule, Class: classMessage(r.Class), Matched: r.Matched, Decided: r.Decided,
			MatchesNow: r.MatchesNow, DecidesNow: r.DecidesNow,
		})
	}
	for _, why := range slices.Sorted(maps.Keys(st.Refused)) {
		m.Refusals = append(m.Refusals, &gpreemptv1.RefusalCount{Reason: string(why), Count: st.Refused[why]})
	}
	return m
}

func latencyMessage(l events.Latency) *gpreemptv1.LatencySummary {
	return &gpreemptv1.LatencySummary{
		Count: l.Count, Mean: durationpb.New(l.Mean), P50: durationpb.New(l.P50), P95: durationpb.New(l.P95),
		P99: durationpb.New(l.P99), Max: durationpb.New(l.Max),
	}
}

// picture is the state of everything at about one moment.
type picture struct {
	now    moment
	owners []owner // ascending by pid
}

// owner finds a process; nil when it has left.
func (p *picture) owner(key gpreempt.ProcessKey) *owner {
	at, ok := slices.BinarySearchFunc(p.owners, key, func(o owner, k gpreempt.ProcessKey) int { return o.proc.Key.Compare(k) })
	if !ok {
		return nil
	}
	return &p.owners[at]
}

// picture joins what the inventory, the directory and the scheduler know. also,
// when set, looks at the scheduler at the same time.
func (s *Server) picture(also func(*scheduler.Core)) picture {
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
	p := picture{now: s.moment(), owners: make([]owner, 0, len(procs))}
	for _, proc := range procs {
		facts, _ := s.cfg.Directory.Facts(proc.Key)
		p.owners = append(p.owners, owner{proc: proc, facts: facts, info: infos[proc.Key]})
	}
	return p
}

// ownerOf returns one process.
func (s *Server) ownerOf(proc discovery.Proc) owner {
	o := owner{proc: proc}
	o.facts, _ = s.cfg.Directory.Facts(proc.Key)
	s.cfg.Scheduler.View(func(c *scheduler.Core) { o.info, _ = c.Target(proc.Key) })
	return o
}

package clitest

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// describe adds containers, units and namespace pids to the processes of the fake
// machine: 17 is the pid of two of them in their containers.
func (m *Machine) describe() {
	m.GPUs[0].MemoryEvictions = new(uint64(3))
	for _, t := range m.Targets {
		switch t.GetPid() {
		case 4242:
			t.Gid, t.Exe, t.NamespacePids, t.Unit, t.Slice = 1000, "/opt/conda/bin/python3.12", []int32{17}, "slurmd.service", "system.slice"
			t.Environment = map[string]string{"GPREEMPT_CLASS": "offline", "AMD_QUEUE_TAG": "OFFLINE_AI\x1b[2J"}
			t.Container = &gpreemptv1.Container{
				Runtime: "docker", ContainerId: strings.Repeat("0123456789abcdef", 4), Name: "trainer", Image: "registry.example/train:3",
				Labels: map[string]string{"team": "vision"},
			}
		case 4400:
			t.NamespacePids = []int32{2, 17}
			t.Container = &gpreemptv1.Container{
				Runtime: "containerd", ContainerId: strings.Repeat("fedcba9876543210", 4), PodUid: "8e7d2a8c-5bcb-4f5e-9a44-7d9d3d1d0a11",
				Namespace: "batch", Pod: "prep-7", PodLabels: map[string]string{"job": "prep"},
			}
		case 5001:
			t.Unit, t.Slice, t.UserUnit = "user@1000.service", "user-1000.slice", "triton.service"
		}
	}
}

func sources() []*gpreemptv1.Source {
	return []*gpreemptv1.Source{
		{Name: "events", Available: true, Readings: 12},
		{Name: "sysfs", Available: true, Every: Dur(200 * time.Millisecond), Took: Dur(1200 * time.Microsecond), ReadAt: Ago(90 * time.Millisecond), Readings: 54000},
		{Name: "hqds", Note: "debugfs is not mounted"},
	}
}

func classification(t *gpreemptv1.Target) []*gpreemptv1.ClassifyStep {
	if t.GetPid() != 4242 {
		return nil
	}
	return []*gpreemptv1.ClassifyStep{
		{By: "admin", Detail: "no admin override"},
		{By: "rule inference", Class: gpreemptv1.Class_CLASS_ONLINE, Detail: `comm is "python3", not "triton*"`},
		{By: "rule training", Class: gpreemptv1.Class_CLASS_OFFLINE, Matches: true, Decides: true, Detail: "container_name is trainer"},
		{By: "tag", Class: gpreemptv1.Class_CLASS_OFFLINE, Matches: true, Detail: "GPREEMPT_CLASS is offline"},
		{By: "default", Class: gpreemptv1.Class_CLASS_UNMANAGED, Matches: true},
	}
}

// inContainer reports whether a filter selects the container of t.
func inContainer(t *gpreemptv1.Target, name string) bool {
	c := t.GetContainer()
	return name == "" || c != nil && (name == c.GetName() || len(name) >= 4 && strings.HasPrefix(c.GetContainerId(), name) ||
		name == c.GetNamespace()+"/"+c.GetPod())
}

func (m *Machine) ListTargets(_ context.Context, req *gpreemptv1.ListTargetsRequest) (*gpreemptv1.ListTargetsResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	resp := &gpreemptv1.ListTargetsResponse{}
	for _, t := range m.Targets {
		own := t.GetNamespacePids()
		switch {
		case req.GetClass() != 0 && req.GetClass() != t.GetClass():
		case req.GetGpuId() != 0 && !slices.Contains(t.GetGpuIds(), req.GetGpuId()):
		case !inContainer(t, req.GetContainer()):
		case req.GetPid() != 0 && req.GetPid() != t.GetPid() && (len(own) == 0 || req.GetPid() != own[len(own)-1]):
		default:
			resp.Targets = append(resp.Targets, proto.CloneOf(t))
		}
	}
	return resp, nil
}

func (m *Machine) queues() []*gpreemptv1.Queue {
	var all []*gpreemptv1.Queue
	for _, t := range m.Targets {
		for i := range t.GetQueueCount() {
			q := &gpreemptv1.Queue{
				TargetId: t.GetTargetId(), Pid: t.GetPid(), QueueId: i, GpuId: t.GetGpuIds()[int(i)%len(t.GetGpuIds())], Type: "compute",
				RingBytes: 64 << 10, Class: t.GetClass(), Priority: t.GetPriority(), State: t.GetState(), Comm: t.GetComm(),
				FirstSeen: Ago(time.Duration(i+1) * 90 * time.Second),
			}
			if i == 2 {
				q.Type, q.RingBytes = "sdma", 1<<20
			}
			learn(q)
			all = append(all, q)
		}
	}
	return all
}

// learn adds data from dumps and snapshots to some queues.
func learn(q *gpreemptv1.Queue) {
	dumped := func(ring uint64, priority uint32, exact bool) {
		q.Source, q.RingAddress, q.KfdPriority, q.KfdPriorityExact, q.Aql = "mqds", &ring, &priority, exact, new(true)
		q.MqdAddress, q.DoorbellOffset, q.ReadPointerAddress, q.WritePointerAddress = new(ring>>20), new(0x4000+8*q.GetQueueId()), new(ring-0xf80), new(ring-0xfc8)
	}
	switch q.GetTargetId() + "/" + strconv.Itoa(int(q.GetQueueId())) {
	case "4242@1001/0":
		dumped(0x7f41b5200000, 7, true)
		q.Source, q.ChangedAt = "snapshot, mqds", Ago(2*time.Second)
	case "4242@1001/1":
		dumped(0x7f41b6400000, 0, true)
	case "4242@1001/2":
		q.SourceNote = "two dumps could be meant:\x1b[1m lines 70 and 140"
	case "5001@2000/0":
		dumped(0x7f0000200000, 11, false)
	case "5001@2000/1":
		dumped(0x7f0000400000, 7, false)
	}
}

func (m *Machine) ListQueues(_ context.Context, req *gpreemptv1.ListQueuesRequest) (*gpreemptv1.ListQueuesResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	list := m.queues()
	if m.QueuesAt != nil {
		m.looks++
		var err error
		if list, err = m.QueuesAt(m.looks); err != nil {
			return nil, err
		}
	}
	resp := &gpreemptv1.ListQueuesResponse{Revision: 12}
	for _, q := range list {
		owner, err := m.target(q.GetTargetId())
		switch {
		case req.GetTargetId() != "" && req.GetTargetId() != q.GetTargetId() && req.GetTargetId() != strconv.Itoa(int(q.GetPid())):
		case req.GetGpuId() != 0 && req.GetGpuId() != q.GetGpuId():
		case req.GetClass() != 0 && req.GetClass() != q.GetClass():
		case err == nil && !inContainer(owner, req.GetContainer()):
		default:
			if req.GetBacklog() && q.GetSource() == "snapshot, mqds" {
				q.Backlog, q.BacklogUnit = new(uint64(12)), "packets"
			}
			resp.Queues = append(resp.Queues, q)
		}
	}
	return resp, nil
}

// WatchQueues sends the present queues, one that changes twice and is destroyed, and then
// shuts down.
func (m *Machine) WatchQueues(req *gpreemptv1.WatchQueuesRequest, out grpc.ServerStreamingServer[gpreemptv1.WatchQueuesResponse]) error {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if req.GetAfterRevision() == 1 {
		return Refuse(gpreempt.CodeOutOfRange, gpreempt.ReasonRevisionCompacted, "revision 1 is no longer kept", "list the queues again")
	}
	queues := m.queues()
	var changes []*gpreemptv1.WatchQueuesResponse
	if req.GetAfterRevision() == 0 {
		for i, q := range queues {
			changes = append(changes, &gpreemptv1.WatchQueuesResponse{
				Revision: uint64(i + 1), Change: gpreemptv1.QueueChange_QUEUE_CHANGE_ADDED, Queue: q,
			})
		}
	}
	resumed := proto.CloneOf(queues[0])
	resumed.State, resumed.KfdPriority = gpreemptv1.TargetState_TARGET_STATE_RUNNING, new(uint32(11))
	found := proto.CloneOf(queues[2])
	found.RingAddress, found.Source, found.SourceNote = new(uint64(0x7f41b7000000)), "snapshot", ""
	changes = append(changes,
		&gpreemptv1.WatchQueuesResponse{Revision: 13, Change: gpreemptv1.QueueChange_QUEUE_CHANGE_MODIFIED, Queue: resumed},
		&gpreemptv1.WatchQueuesResponse{Revision: 14, Change: gpreemptv1.QueueChange_QUEUE_CHANGE_MODIFIED, Queue: found},
		&gpreemptv1.WatchQueuesResponse{Revision: 15, Change: gpreemptv1.QueueChange_QUEUE_CHANGE_REMOVED, Queue: resumed})
	for _, change := range changes {
		if err := out.Send(change); err != nil {
			return err
		}
	}
	return Refuse(gpreempt.CodeUnavailable, gpreempt.ReasonShuttingDown, "the daemon is shutting down", "wait for it to start again")
}

// Slots are those of the first GPU, in the driver's order; the second is stopped.
func Slots() []*gpreemptv1.Hqd {
	const empty, stale, live = gpreemptv1.HqdState_HQD_STATE_EMPTY, gpreemptv1.HqdState_HQD_STATE_STALE, gpreemptv1.HqdState_HQD_STATE_LIVE
	var all []*gpreemptv1.Hqd
	compute := func(xcc, slot uint32, state gpreemptv1.HqdState, ring uint64) *gpreemptv1.Hqd {
		h := &gpreemptv1.Hqd{GpuId: 34535, Node: 2, Kind: "cp", Xcc: xcc, Pipe: 0, Slot: slot, State: state}
		if state != empty {
			h.Vmid, h.QueuePriority, h.PipePriority, h.Quantum, h.RingAddress, h.RingBytes, h.Aql = 8, 7, 1, 0x111, &ring, 64<<10, true
			h.ReadPointer, h.WritePointer, h.DoorbellOffset, h.MqdAddress = 1600, 1792, 0x4000, new(ring>>20)
		}
		all = append(all, h)
		return h
	}
	for xcc := range uint32(2) {
		all = append(all, &gpreemptv1.Hqd{
			GpuId: 34535, Node: 2, Kind: "hiq", Xcc: xcc, Mec: 2, State: live, RingAddress: new(uint64(0x1000)), RingBytes: 2048, PipePriority: 1,
			Match: "a queue of the driver",
		})
		h := compute(xcc, 2, live, 0x7f41b5200000)
		h.TargetId, h.QueueId, h.Match = "4242@1001", 0, "MQD address"
		h = compute(xcc, 3, live, 0x7f0000200000)
		h.TargetId, h.QueueId, h.Match = "5001@2000", 0, "ring and vmid"
		compute(xcc, 4, stale, 0x7f41b6400000)
		compute(xcc, 5, empty, 0)
	}
	return append(all, &gpreemptv1.Hqd{
		GpuId: 34535, Node: 2, Kind: "sdma", Pipe: 1, Slot: 3, State: live, RingAddress: new(uint64(0x7f41b7000000)), RingBytes: 1 << 20,
		ReadPointer: 4096, WritePointer: 8192, Match: "no queue is known to have this ring",
	})
}

func (m *Machine) ListHqds(_ context.Context, req *gpreemptv1.ListHqdsRequest) (*gpreemptv1.ListHqdsResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.SlotsAt != nil {
		m.looks++
		return m.SlotsAt(m.looks)
	}
	resp := &gpreemptv1.ListHqdsResponse{
		ReadAt: Ago(120 * time.Millisecond), Took: Dur(45 * time.Millisecond), StoppedGpuIds: []uint32{41235}, Notes: []string{"line 9: the text ends early\x07"},
	}
	for _, h := range Slots() {
		of := req.GetTargetId() == "" || req.GetTargetId() == h.GetTargetId() || strings.HasPrefix(h.GetTargetId(), req.GetTargetId()+"@")
		if of && (req.GetGpuId() == 0 || req.GetGpuId() == h.GetGpuId()) && (req.GetAll() || h.GetState() == gpreemptv1.HqdState_HQD_STATE_LIVE) {
			resp.Hqds = append(resp.Hqds, h)
		}
	}
	return resp, nil
}

func balanced() *gpreemptv1.Policy {
	return &gpreemptv1.Policy{
		Preset: "balanced", Linger: Dur(0), ShareFloor: new(0.1), ShareCap: new(1.0), MaxSuspend: Dur(2 * time.Second), MaxWait: Dur(20 * time.Millisecond),
		AttachAfter: Dur(30 * time.Second),
	}
}

package server

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const containerID = "3f4e8c2a9b1d3f4e8c2a9b1d3f4e8c2a9b1d3f4e8c2a9b1d3f4e8c2a9b1d1234"

// contained puts the offline process into a container of a pod.
func contained(h *host) {
	proc := h.procs[0]
	proc.NamespacePIDs = []int32{31, 7}
	proc.Cgroup = gpreempt.Cgroup{Path: "/kubepods/x", Runtime: "containerd", ContainerID: containerID, PodUID: "u-1", Unit: "c.scope", Slice: "kubepods.slice"}
	h.setProcs(proc, h.procs[1])
	h.directory.mu.Lock()
	defer h.directory.mu.Unlock()
	f := h.directory.of[offline]
	f.Container = gpreempt.Container{Name: "trainer", Image: "rocm:7", Namespace: "batch", Pod: "bert-0", PodLabels: map[string]string{"a": "b"}}
	h.directory.of[offline] = f
}

func TestRefusedIDsAreShownInsteadOfAContainer(t *testing.T) {
	at := gpreempt.Cgroup{Path: "/batch/c", ContainerID: containerID, UserUnit: "a.service"}
	of := &target{proc: discovery.Proc{Process: gpreempt.Process{Cgroup: at}}}
	of.facts.Container.Conflict = "container 3f4e8c2a9b1d, and by its runtime that of process 42 in /docker/c"
	m := of.message(clocks{}, true)
	if m.GetContainer() != nil || m.GetUserUnit() != "a.service" || m.GetIdConflict() != of.facts.Container.Conflict || inContainer(containerID, of) {
		t.Errorf("%v", m)
	}
}

func TestProcessesAreFoundByContainerAndPID(t *testing.T) {
	h := startHost(t)
	contained(h)
	admin := h.admin(t)
	both, first, second, none := []int32{offline.PID, other.PID}, []int32{offline.PID}, []int32{other.PID}, []int32(nil)
	for _, test := range []struct {
		container string
		pid       int32
		want      []int32
	}{
		{"", 0, both},
		{"trainer", 0, first},
		{"3f4e", 0, first},
		{containerID, 0, first},
		{"batch/bert-0", 0, first},
		{"3f4", 0, none},
		{"bert-0", 0, none},
		{"train", 0, none},
		{"", 7, first},
		{"", 31, first},
		{"", offline.PID, first},
		{"", other.PID, second},
		{"trainer", 7, first},
		{"trainer", other.PID, none},
		{"", 8, none},
	} {
		list, err := admin.ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{Container: test.container, Pid: test.pid})
		if err != nil {
			t.Fatal(err)
		}
		var got []int32
		for _, target := range list.GetTargets() {
			got = append(got, target.GetPid())
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("container %q, pid %d (-want +got):\n%s", test.container, test.pid, diff)
		}
		if test.pid != 0 {
			continue
		}
		queues, err := admin.ListQueues(t.Context(), &gpreemptv1.ListQueuesRequest{Container: test.container})
		if err != nil {
			t.Fatal(err)
		}
		owners := map[int32]bool{}
		for _, q := range queues.GetQueues() {
			owners[q.GetPid()] = true
		}
		if len(owners) != len(test.want) {
			t.Errorf("queues of container %q are of %v, want %v", test.container, owners, test.want)
		}
	}
	explained, err := admin.ExplainTarget(t.Context(), &gpreemptv1.ExplainTargetRequest{TargetId: offline.String()})
	if err != nil {
		t.Fatal(err)
	}
	want := &gpreemptv1.Container{
		Runtime: "containerd", ContainerId: containerID, Name: "trainer", Image: "rocm:7", PodUid: "u-1",
		Namespace: "batch", Pod: "bert-0", PodLabels: map[string]string{"a": "b"},
	}
	if diff := cmp.Diff(want, explained.GetTarget().GetContainer(), protocmp.Transform()); diff != "" {
		t.Errorf("container (-want +got):\n%s", diff)
	}
	if got := explained.GetTarget().GetNamespacePids(); !cmp.Equal(got, []int32{31, 7}) {
		t.Errorf("pids in its namespaces: %v", got)
	}
}

func TestQueuesHaveFactsAndBacklogs(t *testing.T) {
	read := map[gpreempt.ProcessKey][]uint32{}
	h := startHost(t, func(c *Config, _ *scheduler.Limits) {
		c.Backlogs = func(_ context.Context, key gpreempt.ProcessKey, queues []gpreempt.QueueEntry) []inventory.Backlog {
			if key == other {
				return nil // as if it could not be read
			}
			all := make([]inventory.Backlog, len(queues))
			for n, q := range queues {
				read[key] = append(read[key], q.ID)
				all[n] = inventory.Backlog{Known: q.ID == 0, Value: 5 * uint64(1-q.ID), Unit: inventory.Packets}
			}
			return all
		}
	})
	changed := seen.Add(time.Minute)
	proc, _ := h.inventory.Process(offline)
	h.inventory.SetInfos(changed, proc, []gpreempt.QueueInfo{
		{
			Source: gpreempt.FromSnapshot | gpreempt.FromMQD, RingBase: 0x7f0000100000, AQL: true, ReadPointer: 0x80, WritePointer: 0x38,
			MQD: 0x17ba000, Doorbell: 0x4020, Priority: 11, PriorityKnown: true, PriorityExact: true,
		},
		{Source: gpreempt.FromSnapshot, RingBase: 0x7f0000200000, Note: "two dumps match"},
	})
	list, err := h.admin(t).ListQueues(t.Context(), &gpreemptv1.ListQueuesRequest{Backlog: true})
	if err != nil {
		t.Fatal(err)
	}
	five := uint64(5)
	want := []*gpreemptv1.Queue{
		{
			TargetId: "4000001@11", Pid: offline.PID, QueueId: 0, GpuId: 100, Type: "compute", RingBytes: 4096,
			Source: "snapshot, mqds", RingAddress: new(uint64(0x7f0000100000)), Aql: new(true), ReadPointerAddress: new(uint64(0x80)), WritePointerAddress: new(uint64(0x38)),
			MqdAddress: new(uint64(0x17ba000)), DoorbellOffset: new(uint32(0x4020)), KfdPriority: new(uint32(11)), KfdPriorityExact: true,
			Backlog: &five, BacklogUnit: "packets", ChangedAt: timestamppb.New(changed),
		},
		{
			TargetId: "4000001@11", Pid: offline.PID, QueueId: 1, GpuId: 200, Type: "sdma", RingBytes: 8192,
			Source: "snapshot", SourceNote: "two dumps match", RingAddress: new(uint64(0x7f0000200000)), Aql: new(false), ChangedAt: timestamppb.New(changed),
		},
		{TargetId: "4000002@22", Pid: other.PID, GpuId: 200, Type: "compute", RingBytes: 4096},
	}
	if diff := cmp.Diff(want, list.GetQueues(), protocmp.Transform(),
		protocmp.IgnoreFields(&gpreemptv1.Queue{}, "class", "priority", "state", "comm", "first_seen")); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[gpreempt.ProcessKey][]uint32{offline: {0, 1}}, read); diff != "" {
		t.Errorf("backlogs read (-want +got):\n%s", diff)
	}
}

func TestHardwareSlotsAreListed(t *testing.T) {
	readAt := time.Unix(1700000000, 0)
	seen := &readings{hqds: &inventory.HQDs{
		Slots: []debugfs.Slot{
			{GPU: gpuA, Node: 2, Kind: debugfs.SlotHIQ, MEC: 2, State: debugfs.Live},
			{GPU: gpuA, Node: 2, Kind: debugfs.SlotCP, XCC: 1, Pipe: 1, Queue: 2, State: debugfs.Live, Compute: debugfs.Compute{RingBase: 0x7000, RingBytes: 4096, VMID: 3, AQL: true}},
			{GPU: gpuA, Node: 2, Kind: debugfs.SlotCP, Pipe: 1, Queue: 3, State: debugfs.Stale},
			{GPU: gpuB, Node: 3, Kind: debugfs.SlotSDMA, Pipe: 1, Queue: 6, State: debugfs.Live, SDMA: debugfs.SDMA{RingBase: 0x9000, RingBytes: 8192}},
		},
		Owners: []gpreempt.QueueEntry{{Queue: gpreempt.Queue{Process: offline, ID: 1, GPU: gpuA}}},
		Matches: []debugfs.SlotMatch{
			{Owner: -1, How: "the driver's own"}, {Owner: 0, How: "MQD address"}, {Owner: -1}, {Owner: -1, How: "no queue has this ring"},
		},
		Stopped: []gpreempt.GPUID{gpuB}, Warnings: []debugfs.Warning{{Line: 4, Text: "odd"}}, ReadAt: readAt, Took: time.Millisecond,
	}}
	h := startHost(t, func(c *Config, _ *scheduler.Limits) { c.Observer = seen })
	hiq := &gpreemptv1.Hqd{GpuId: 100, Node: 2, Kind: "hiq", Mec: 2, State: gpreemptv1.HqdState_HQD_STATE_LIVE, Match: "the driver's own"}
	cp := &gpreemptv1.Hqd{
		GpuId: 100, Node: 2, Kind: "cp", Xcc: 1, Pipe: 1, Slot: 2, State: gpreemptv1.HqdState_HQD_STATE_LIVE, RingAddress: new(uint64(0x7000)),
		RingBytes: 4096, Vmid: 3, Aql: true, TargetId: offline.String(), QueueId: 1, Match: "MQD address",
	}
	stale := &gpreemptv1.Hqd{GpuId: 100, Node: 2, Kind: "cp", Pipe: 1, Slot: 3, State: gpreemptv1.HqdState_HQD_STATE_STALE}
	sdma := &gpreemptv1.Hqd{
		GpuId: 200, Node: 3, Kind: "sdma", Pipe: 1, Slot: 6, State: gpreemptv1.HqdState_HQD_STATE_LIVE, RingAddress: new(uint64(0x9000)), RingBytes: 8192,
		Match: "no queue has this ring",
	}
	for _, test := range []struct {
		req  *gpreemptv1.ListHqdsRequest
		want []*gpreemptv1.Hqd
	}{
		{&gpreemptv1.ListHqdsRequest{}, []*gpreemptv1.Hqd{hiq, cp, sdma}},
		{&gpreemptv1.ListHqdsRequest{All: true}, []*gpreemptv1.Hqd{hiq, cp, stale, sdma}},
		{&gpreemptv1.ListHqdsRequest{GpuId: 200}, []*gpreemptv1.Hqd{sdma}},
		{&gpreemptv1.ListHqdsRequest{TargetId: "4000001"}, []*gpreemptv1.Hqd{cp}},
		{&gpreemptv1.ListHqdsRequest{TargetId: "4000002"}, nil},
	} {
		notes := []string{"line 4 of hqds: odd"}
		if test.req.GetTargetId() != "" {
			notes = slices.Insert(notes, 0, "the queues of 1 live slots could not be identified, and may be queues of the target")
		}
		got, err := h.admin(t).ListHqds(t.Context(), test.req)
		if err != nil {
			t.Fatal(err)
		}
		want := &gpreemptv1.ListHqdsResponse{
			Hqds: test.want, ReadAt: timestamppb.New(readAt), Took: durationpb.New(time.Millisecond), StoppedGpuIds: []uint32{200},
			Notes: notes,
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%v (-want +got):\n%s", test.req, diff)
		}
	}
	_, err := h.admin(t).ListHqds(t.Context(), &gpreemptv1.ListHqdsRequest{TargetId: "9"})
	want(t, err, gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget)
	seen.hqds, seen.hqdsErr = nil, &gpreempt.Error{Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonHQDsUnreadable, Message: "no", Next: "mount it"}
	_, err = h.admin(t).ListHqds(t.Context(), &gpreemptv1.ListHqdsRequest{})
	want(t, err, gpreempt.CodeFailedPrecondition, gpreempt.ReasonHQDsUnreadable)
}

func TestSourcesRulesAndEvictionsAreShown(t *testing.T) {
	at := time.Unix(1700000000, 0)
	h := startHost(t, func(c *Config, _ *scheduler.Limits) {
		c.Observer = &readings{
			sources:   []inventory.Source{{Name: "sysfs", Available: true, Every: time.Second, Took: time.Millisecond, ReadAt: at, Readings: 7}, {Name: "mqds", Note: "denied"}},
			evictions: map[gpreempt.GPUID]uint64{gpuA: 3},
		}
	})
	h.directory.mu.Lock()
	h.directory.counts = []targets.RuleCount{{Rule: "batch", Class: gpreempt.Offline, Matched: 4, Decided: 3, MatchesNow: 2, DecidesNow: 1}, {Rule: classify.ByTag, Matched: 2}}
	h.directory.steps = []classify.Step{
		{By: classify.ByAdmin, Detail: "no override"},
		{By: "rule batch", Class: gpreempt.Offline, Matches: true, Decides: true, Detail: "comm"},
		{By: classify.ByDefault, Class: gpreempt.Unmanaged, Matches: true},
	}
	h.directory.mu.Unlock()
	admin := h.admin(t)

	status, err := admin.GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*gpreemptv1.Source{
		{Name: "sysfs", Available: true, Every: durationpb.New(time.Second), Took: durationpb.New(time.Millisecond), ReadAt: timestamppb.New(at), Readings: 7},
		{Name: "mqds", Every: durationpb.New(0), Took: durationpb.New(0), Note: "denied"},
	}, status.GetSources(), protocmp.Transform()); diff != "" || status.GetBootId() != "b007" {
		t.Errorf("boot id %q, sources (-want +got):\n%s", status.GetBootId(), diff)
	}

	stats, err := admin.GetStatistics(t.Context(), &gpreemptv1.GetStatisticsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*gpreemptv1.RuleCount{
		{Rule: "batch", Class: gpreemptv1.Class_CLASS_OFFLINE, Matched: 4, Decided: 3, MatchesNow: 2, DecidesNow: 1},
		{Rule: "tag", Matched: 2},
	}, stats.GetStatistics().GetRules(), protocmp.Transform()); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}

	explained, err := admin.ExplainTarget(t.Context(), &gpreemptv1.ExplainTargetRequest{TargetId: offline.String()})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*gpreemptv1.ClassifyStep{
		{By: "admin", Detail: "no override"},
		{By: "rule batch", Class: gpreemptv1.Class_CLASS_OFFLINE, Matches: true, Decides: true, Detail: "comm"},
		{By: "default", Class: gpreemptv1.Class_CLASS_UNMANAGED, Matches: true},
	}, explained.GetClassification(), protocmp.Transform()); diff != "" {
		t.Errorf("classification (-want +got):\n%s", diff)
	}

	gpus, err := admin.ListGpus(t.Context(), &gpreemptv1.ListGpusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := gpus.GetGpus()[0], gpus.GetGpus()[1]; a.MemoryEvictions == nil || a.GetMemoryEvictions() != 3 || b.MemoryEvictions != nil {
		t.Errorf("evictions of %v and %v, want 3 and none", a.MemoryEvictions, b.MemoryEvictions)
	}
}

// A reading of the slots from before the last suspend would show the queues of a target that is
// off the GPU by now.
func TestSlotsAreReadSinceTheLastChangeOfATarget(t *testing.T) {
	seen := &readings{hqds: &inventory.HQDs{}}
	h := startHost(t, func(c *Config, _ *scheduler.Limits) { c.Observer = seen })
	admin := h.admin(t)
	list := func(target string) time.Time {
		t.Helper()
		if _, err := admin.ListHqds(t.Context(), &gpreemptv1.ListHqdsRequest{TargetId: target}); err != nil {
			t.Fatal(err)
		}
		return seen.notBefore
	}
	before := list("")
	if _, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)}); err != nil {
		t.Fatal(err)
	}
	if all, ofSuspended := list(""), list(offline.String()); !all.After(before) || !ofSuspended.After(before) {
		t.Errorf("slots of all: not before %v; of the suspended target: not before %v; both were %v before the suspend", all, ofSuspended, before)
	}
}

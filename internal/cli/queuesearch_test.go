package cli

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

func TestQueuesAreSearchedInSysfsWithoutADaemon(t *testing.T) {
	root := fstest.MapFS{}
	add := func(name, text string) { root[name] = &fstest.MapFile{Data: []byte(text)} }
	for pid, env := range map[string]string{
		"10": "GPREEMPT_CLASS=offline\x00GPREEMPT_PRIORITY=3\x00", "11": "AMD_QUEUE_TAG=OFFLINE_AI\x00AMD_QUEUE_PRIORITY=12\x00", "12": "HOME=/\x00",
	} {
		add("proc/"+pid+"/stat", pid+" (train) S 1 "+strings.Repeat("0 ", 17)+"500 0 0")
		add("proc/"+pid+"/status", "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nNSpid:\t"+pid+"\n")
		add("proc/"+pid+"/environ", env)
		add("proc/"+pid+"/cgroup", "0::/\n")
		add("proc/"+pid+"/cmdline", "train\x00")
		queue := "sys/class/kfd/kfd/proc/" + pid + "/queues/0/"
		add(queue+"gpuid", "34535\n")
		add(queue+"type", "0\n")
		add(queue+"size", "4096\n")
	}
	for _, tt := range []struct {
		by   search
		pids []int32
	}{
		{search{tag: "offline"}, []int32{10}},
		{search{tag: "OFFLINE_AI"}, []int32{11}},
		{search{priority: "0-15", most: 15}, []int32{10, 11}},
		{search{priority: "3", least: 3, most: 3}, []int32{10}},
		{search{tag: "offline", priority: "12", least: 12, most: 12}, nil},
	} {
		got, unread, err := tt.by.onHost(root)
		if err != nil || unread != 0 {
			t.Fatal(unread, err)
		}
		want := &gpreemptv1.ListQueuesResponse{}
		for _, pid := range tt.pids {
			priority := uint32(3)
			if pid == 11 {
				priority = 12
			}
			want.Queues = append(want.Queues, &gpreemptv1.Queue{
				TargetId: term.Numbers([]int32{pid}) + "@500", Pid: pid, Comm: "train", GpuId: 34535, Type: "compute", RingBytes: 4096, Priority: priority,
			})
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", tt.by, diff)
		}
	}
	if _, _, err := (&search{}).onHost(fstest.MapFS{}); err == nil || !strings.Contains(err.Error(), "cannot read the driver's processes") {
		t.Errorf("without a driver: %v", err)
	}
}

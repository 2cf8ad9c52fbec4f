package cli

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestQueueIsActiveOnlyWithASlot(t *testing.T) {
	const live, stale = gpreemptv1.HqdState_HQD_STATE_LIVE, gpreemptv1.HqdState_HQD_STATE_STALE
	queue := &gpreemptv1.Queue{TargetId: "1@1", QueueId: 3, GpuId: 7, Type: "compute", RingAddress: new(uint64(0x1000))}
	blank := &gpreemptv1.Queue{TargetId: "1@1", QueueId: 3, GpuId: 7, Type: "compute"}
	tests := []struct {
		name   string
		queue  *gpreemptv1.Queue
		slots  *gpreemptv1.ListHqdsResponse
		active *bool
		n      int
		why    string
	}{
		{"none", queue, &gpreemptv1.ListHqdsResponse{}, new(false), 0, ""},
		{"of two XCCs", queue, hqds(
			&gpreemptv1.Hqd{Kind: "cp", State: live, GpuId: 7, TargetId: "1@1", QueueId: 3},
			&gpreemptv1.Hqd{Kind: "cp", State: live, GpuId: 7, Xcc: 1, TargetId: "1@1", QueueId: 3},
		), new(true), 2, ""},
		{"stale", queue, hqds(&gpreemptv1.Hqd{Kind: "cp", State: stale, GpuId: 7, TargetId: "1@1", QueueId: 3}), new(false), 0, ""},
		{"another's id", queue, hqds(&gpreemptv1.Hqd{Kind: "cp", State: live, GpuId: 7, TargetId: "2@1", QueueId: 3}), new(false), 0, ""},
		{"another GPU", queue, hqds(&gpreemptv1.Hqd{Kind: "cp", State: live, GpuId: 8, TargetId: "1@1", QueueId: 3}), new(false), 0, ""},
		{"nobody's with another ring", queue, hqds(&gpreemptv1.Hqd{Kind: "cp", State: live, GpuId: 7, RingAddress: new(uint64(0x2000))}), new(false), 0, ""},
		{"unknown owner, same ring", queue, hqds(&gpreemptv1.Hqd{Kind: "cp", State: live, GpuId: 7, RingAddress: new(uint64(0x1000)), Match: "two have it"}), nil, 0, "a slot of its GPU contains a queue that could be this one: two have it"},
		{"unknown owner, unknown ring", blank, hqds(&gpreemptv1.Hqd{Kind: "cp", State: live, GpuId: 7, RingAddress: new(uint64(0x2000))}), nil, 0, "a slot of its GPU contains a queue that could be this one: owner unknown"},
		{"the driver's own", blank, hqds(&gpreemptv1.Hqd{Kind: "hiq", State: live, GpuId: 7}), new(false), 0, ""},
		{"of another kind", blank, hqds(&gpreemptv1.Hqd{Kind: "sdma", State: live, GpuId: 7}), new(false), 0, ""},
		{"stopped", queue, &gpreemptv1.ListHqdsResponse{StoppedGpuIds: []uint32{7}}, nil, 0, "the scheduler of GPU 7 is stopped"},
	}
	for _, tt := range tests {
		active, n, why := held(tt.queue, tt.slots)
		if diff := cmp.Diff([]any{tt.active, tt.n, tt.why}, []any{active, n, why}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func hqds(list ...*gpreemptv1.Hqd) *gpreemptv1.ListHqdsResponse {
	return &gpreemptv1.ListHqdsResponse{Hqds: list}
}

func TestQueuesAreFoundWithoutTheSlots(t *testing.T) {
	m := clitest.NewMachine()
	m.SlotsAt = func(int) (*gpreemptv1.ListHqdsResponse, error) {
		return nil, clitest.Refuse(gpreempt.CodeFailedPrecondition, "HQDS_UNREADABLE", "debugfs is not mounted", "mount it")
	}
	t.Chdir(t.TempDir())
	code, stdout, stderr := runOnClock(t, m, func(time.Duration) {}, "queue", "find", "5001", "--python-config")
	_, got, _ := strings.Cut(stdout, "\n\n")
	want := `#  ADDRESS             QUEUE ID   PID  ACTIVE   TYPE     HIP    GPU   RING  HWPRIO    AGE
1  0x00007f0000200000         0  5001  unknown  compute    0  34535  64KiB     11~  1m30s
2  0x00007f0000400000         1  5001  unknown  compute    0  34535  64KiB      7~     3m

total  2 queues, 0 active, 2 unknown
note   unknown whether active: debugfs is not mounted
file   queue_config_pid_5001.py
`
	if diff := cmp.Diff(want, got); code != term.ExitOK || stderr != "" || diff != "" {
		t.Errorf("code %d, stderr %q, stdout (-want +got):\n%s", code, stderr, diff)
	}
	if _, err := os.Stat("queue_config_pid_5001.py"); err != nil {
		t.Error(err)
	}
}

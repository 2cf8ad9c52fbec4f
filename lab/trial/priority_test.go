package trial

import (
	"slices"
	"strings"
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/evidence"
)

// The commands of an arm with stream priorities get theirs, and those of other arms none, not even
// that of this process.
func TestCommandsGetThePriorityOfTheirStreams(t *testing.T) {
	t.Setenv("GPREEMPT_STREAM_PRIORITY", "-3")
	for _, tc := range []struct {
		kind evidence.ArmKind
		name string
		want []string
	}{
		{evidence.StreamPriority, "online", []string{"GPREEMPT_STREAM_PRIORITY=-1"}},
		{evidence.StreamPriority, "job-1-1", []string{"GPREEMPT_STREAM_PRIORITY=0"}},
		{evidence.Shared, "online", nil},
	} {
		p := repeatOf(t.TempDir(), evidence.Emulated, 0)
		p.arm = Arm{Kind: tc.kind}
		env, err := p.environment(tc.name)
		if err != nil {
			t.Fatal(err)
		}
		got := slices.DeleteFunc(env, func(v string) bool { return !strings.HasPrefix(v, "GPREEMPT_STREAM_PRIORITY") })
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s, %s: %q, want %q", tc.kind, tc.name, got, tc.want)
		}
	}
}

// Queues that do not have the priorities of the arm are a fault: the commands ignored them.
func TestArmWithStreamPrioritiesIsSeenInTheQueues(t *testing.T) {
	const (
		equal   = "no online queue has a higher priority than the offline ones: the commands must make their streams with $GPREEMPT_STREAM_PRIORITY"
		unknown = "the daemon does not know the priorities of all queues: gpctl queue list -o wide shows why"
		none    = -1
	)
	list := func(target string, priorities []int) (queues []*gpreemptv1.Queue, targets []*gpreemptv1.Target) {
		for _, priority := range priorities {
			q := &gpreemptv1.Queue{TargetId: target, Type: "compute"}
			if priority != none {
				q.KfdPriority = new(uint32(priority))
			}
			queues = append(queues, q)
		}
		if len(priorities) > 0 {
			targets = []*gpreemptv1.Target{{TargetId: target}}
		}
		return append(queues, &gpreemptv1.Queue{TargetId: target, Type: "sdma"}), targets
	}
	for name, tc := range map[string]struct {
		online, offline []int
		fault, missing  string
	}{
		"high and normal":          {online: []int{7, 11}, offline: []int{7, 7}},
		"all normal":               {online: []int{7, 7}, offline: []int{7}, fault: equal},
		"one process":              {online: []int{7, 11}},
		"one process, all normal":  {online: []int{7, 7}, fault: "all queues of the online command have the same priority"},
		"one queue is not known":   {online: []int{7, none}, offline: []int{7}, missing: unknown},
		"offline is not known":     {online: []int{11}, offline: []int{none}, missing: unknown},
		"online without any queue": {offline: []int{7}, missing: "the online command has no queue"},
	} {
		t.Run(name, func(t *testing.T) {
			queues, online := list("1@1", tc.online)
			more, offline := list("2@2", tc.offline)
			fault, missing := judgePriorities(append(queues, more...), online, offline)
			if fault != tc.fault || missing != tc.missing {
				t.Errorf("fault %q, missing %q, want %q, %q", fault, missing, tc.fault, tc.missing)
			}
		})
	}
}

package classify_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// vllm is a process with the facts that /proc always has; of training everything is
// known.
var (
	vllm = classify.Subject{Process: gpreempt.Process{
		Comm: "vllm", Cmdline: "python3 /usr/bin/vllm serve llama", UID: 1000, GID: 1000,
		Cgroup: gpreempt.Cgroup{Path: "/kubepods.slice/pod7/serving"},
	}}
	training = classify.Subject{
		Process: gpreempt.Process{
			Comm: "python3", Cmdline: "python3 -m train --epochs 90", Exe: "/opt/conda/bin/python3.11", UID: 2000, GID: 2001,
			Env: map[string]string{"RANK": "3", "EMPTY": ""},
			Cgroup: gpreempt.Cgroup{
				Path: "/kubepods.slice/pod8/training", Unit: "cri-containerd-" + containerID + ".scope", Slice: "kubepods.slice",
				Runtime: "containerd", ContainerID: containerID, PodUID: "9f2c1d4e-1111-2222-3333-444455556666",
				SlurmJob: 7,
			},
			Slurm: gpreempt.SlurmJob{Partition: "batch-1", Account: "physics", QOS: "low"},
		},
		Container: gpreempt.Container{
			Name: "trainer", Image: "rocm/pytorch:6.4", Labels: map[string]string{"io.x/tier": "batch"},
			Namespace: "research", Pod: "train-0", PodLabels: map[string]string{"app": "bert", "app.kubernetes.io/name": "llm"},
		},
		GPUs: []gpreempt.GPU{
			{ID: 51110, Node: 1, BDF: "0000:03:00.0", RenderMinor: 128},
			{ID: 3183, Node: 2, BDF: "0001:c1:00.0", RenderMinor: 129},
		},
		Queues: []gpreempt.QueueEntry{
			compute(0, 4096, gpreempt.QueueInfo{Source: gpreempt.FromMQD, PriorityKnown: true, RingBase: 0x7f0000001000, Priority: 11, PriorityExact: true}),
			compute(1, 1<<20, gpreempt.QueueInfo{Source: gpreempt.FromMQD, PriorityKnown: true, RingBase: 0x7f0000200000, Priority: 3, PriorityExact: true}),
			compute(2, 1<<20, gpreempt.QueueInfo{Source: gpreempt.FromSnapshot, PriorityKnown: true, RingBase: 0x7f0000400000, Priority: 1}),
			{Queue: gpreempt.Queue{ID: 3, GPU: 3183, Type: gpreempt.QueueSDMA, RingBytes: 1 << 20}, Info: gpreempt.QueueInfo{
				Source: gpreempt.FromMQD, PriorityKnown: true, RingBase: 0x7f0000600000, Priority: 9,
			}},
		},
	}
)

const containerID = "3f2a7b8c9d0e3f2a7b8c9d0e3f2a7b8c9d0e3f2a7b8c9d0e3f2a7b8c9d0e3f2a"

func compute(id uint32, ringBytes uint64, info gpreempt.QueueInfo) gpreempt.QueueEntry {
	return gpreempt.QueueEntry{Queue: gpreempt.Queue{ID: id, GPU: 3183, Type: gpreempt.QueueCompute, RingBytes: ringBytes}, Info: info}
}

func compile(tb testing.TB, rules ...classify.Rule) *classify.Classifier {
	tb.Helper()
	c, err := classify.New(rules, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

func TestWithoutAMatchingRuleAProcessIsUnmanaged(t *testing.T) {
	want := classify.Decision{Class: gpreempt.Unmanaged, Priority: 7, By: "default"}
	for _, c := range []*classify.Classifier{
		compile(t),
		compile(t, classify.Rule{Name: "serve", Match: classify.Match{Comm: "vllm"}, Class: gpreempt.Online}),
	} {
		if diff := cmp.Diff(want, c.Decide(&training)); diff != "" {
			t.Errorf("decision (-want +got):\n%s", diff)
		}
	}
}

func TestClassesHaveDefaultPriorities(t *testing.T) {
	nine := gpreempt.Priority(9)
	tests := []struct {
		class    gpreempt.Class
		priority *gpreempt.Priority
		want     gpreempt.Priority
	}{
		{gpreempt.Online, nil, 11},
		{gpreempt.Offline, nil, 0},
		{gpreempt.Unmanaged, nil, 7},
		{gpreempt.Offline, &nine, 9},
		{gpreempt.Online, new(gpreempt.Priority), 0},
	}
	for _, test := range tests {
		c := compile(t, classify.Rule{Name: "all", Match: classify.Match{Comm: "*"}, Class: test.class, Priority: test.priority})
		want := classify.Decision{Class: test.class, Priority: test.want, By: "rule all"}
		if diff := cmp.Diff(want, c.Decide(&vllm)); diff != "" {
			t.Errorf("decision (-want +got):\n%s", diff)
		}
	}
}

func TestTheFirstMatchingRuleDecides(t *testing.T) {
	c := compile(t,
		classify.Rule{Name: "serving", Match: classify.Match{Cgroup: "*/serving"}, Class: gpreempt.Online},
		classify.Rule{Name: "python", Match: classify.Match{Cmdline: "python3 *"}, Class: gpreempt.Offline},
		classify.Rule{Name: "rest", Match: classify.Match{Comm: "*"}, Class: gpreempt.Unmanaged},
	)
	want := map[string]string{"vllm": "rule serving", "python3": "rule python", "": "rule rest"}
	for _, s := range []classify.Subject{vllm, training, {}} {
		if got := c.Decide(&s).By; got != want[s.Comm] {
			t.Errorf("%q: by %q, want %q", s.Comm, got, want[s.Comm])
		}
	}
}

func TestMatchingReturnsEveryRuleAndTheTag(t *testing.T) {
	c := compile(t,
		classify.Rule{Name: "serving", Match: classify.Match{Cgroup: "*/serving"}, Class: gpreempt.Online},
		classify.Rule{Name: "python", Match: classify.Match{Comm: "python3", Env: map[string]string{"RANK": "*"}}, Class: gpreempt.Offline},
		classify.Rule{Name: "rest", Match: classify.Match{Comm: "*", Env: map[string]string{"RANK": "*"}}},
	)
	if diff := cmp.Diff([]string{"serving", "python", "rest", "tag"}, c.Names()); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]gpreempt.Class{gpreempt.Online, gpreempt.Offline, gpreempt.Unmanaged, gpreempt.Unmanaged}, c.Classes()); diff != "" {
		t.Errorf("classes (-want +got):\n%s", diff)
	}
	want := []string{"AMD_QUEUE_PRIORITY", "AMD_QUEUE_TAG", "GPREEMPT_CLASS", "GPREEMPT_PRIORITY", "RANK"}
	if diff := cmp.Diff(want, c.Env()); diff != "" {
		t.Errorf("variables (-want +got):\n%s", diff)
	}
	dst := []bool{true, true, true, true, true, true}
	got := c.Matching(&training, dst)
	if diff := cmp.Diff([]bool{false, true, true, false}, got); diff != "" {
		t.Errorf("training (-want +got):\n%s", diff)
	}
	if &got[0] != &dst[0] {
		t.Error("a slice that fits was not used")
	}
	tagged := vllm
	tagged.Env = map[string]string{"GPREEMPT_CLASS": "offline"}
	if diff := cmp.Diff([]bool{true, false, false, true}, c.Matching(&tagged, nil)); diff != "" {
		t.Errorf("vllm with a tag (-want +got):\n%s", diff)
	}
}

// BenchmarkDecide classifies a process that no rule matches, with a long command line:
// "all" with rules that set every field and whose last field does not hold, "usual" with
// ordinary rules.
func BenchmarkDecide(b *testing.B) {
	s := training
	s.Cmdline += strings.Repeat(" --option=value", 250)
	for name, match := range map[string]classify.Match{
		"all":   everything(),
		"usual": {Cgroup: "/kubepods.slice/*"},
	} {
		var rules []classify.Rule
		for n := range 50 {
			match.Cmdline = fmt.Sprintf("*--model=*%d*", n)
			rules = append(rules, classify.Rule{Name: fmt.Sprint(n), Match: match, Class: gpreempt.Offline})
		}
		c := compile(b, rules...)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.Decide(&s)
			}
		})
	}
}

// A process that a rule with never_debug may match once its container is known is not offline
// before, unless it may not be debugged then either.
func TestProcessIsNotDebuggedBeforeItIsKnownThatItMayBe(t *testing.T) {
	byName := classify.Rule{Name: "named", Match: classify.Match{Container: classify.ContainerMatch{Name: "ci-*"}}, Class: gpreempt.Offline, NeverDebug: true}
	all := classify.Rule{Name: "all", Match: classify.Match{Comm: "*"}, Class: gpreempt.Offline}
	s := classify.Subject{Process: gpreempt.Process{Comm: "test", Cgroup: gpreempt.Cgroup{ContainerID: containerID}}}
	want := classify.Decision{Class: gpreempt.Unmanaged, Priority: 7, By: "rule named may match", Waits: true}
	if diff := cmp.Diff(want, compile(t, byName, all).Decide(&s)); diff != "" {
		t.Errorf("before the runtime answers (-want +got):\n%s", diff)
	}
	all.NeverDebug = true
	want = classify.Decision{Class: gpreempt.Offline, By: "rule all", NeverDebug: true}
	if diff := cmp.Diff(want, compile(t, byName, all).Decide(&s)); diff != "" {
		t.Errorf("before a later rule that forbids it too (-want +got):\n%s", diff)
	}
}

// A job of Slurm without a record may be one that must not be suspended.
func TestSlurmJobWithoutARecordIsNotOffline(t *testing.T) {
	serving := classify.Rule{Name: "serving", Match: classify.Match{Slurm: classify.SlurmMatch{QOS: "high"}}, Class: gpreempt.Online}
	all := classify.Rule{Name: "all", Match: classify.Match{Comm: "*"}, Class: gpreempt.Offline}
	offline := classify.Decision{Class: gpreempt.Offline, By: "rule all"}
	waiting := classify.Decision{Class: gpreempt.Unmanaged, Priority: 7, By: "rule serving may match", Waits: true}
	for name, test := range map[string]struct {
		process gpreempt.Process
		want    classify.Decision
	}{
		"no record":               {gpreempt.Process{Cgroup: gpreempt.Cgroup{SlurmJob: 7}}, waiting},
		"a record without a QOS":  {gpreempt.Process{Cgroup: gpreempt.Cgroup{SlurmJob: 7}, Slurm: gpreempt.SlurmJob{Partition: "batch"}}, waiting},
		"a record of another QOS": {gpreempt.Process{Cgroup: gpreempt.Cgroup{SlurmJob: 7}, Slurm: gpreempt.SlurmJob{QOS: "low"}}, offline},
		"not in a job":            {gpreempt.Process{}, offline},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, compile(t, serving, all).Decide(&classify.Subject{Process: test.process})); diff != "" {
				t.Errorf("decision (-want +got):\n%s", diff)
			}
		})
	}
}

package classify_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestExplainReturnsEveryStepInOrder(t *testing.T) {
	c := compile(t,
		classify.Rule{Name: "serving", Match: classify.Match{Comm: "vllm*", UID: new(uint32(2000))}, Class: gpreempt.Online},
		classify.Rule{Name: "python", Match: classify.Match{Comm: "python*", UID: new(uint32(2000))}, Class: gpreempt.Offline, Priority: new(gpreempt.Priority(3))},
		classify.Rule{Name: "rest", Match: classify.Match{Comm: "*"}},
	)
	s := training
	s.Env = map[string]string{"GPREEMPT_CLASS": "online"}
	want := []classify.Step{
		{By: "admin", Detail: "no admin override"},
		{By: "rule serving", Class: gpreempt.Online, Priority: 11, Detail: `comm "python3" is not "vllm*"`},
		{By: "rule python", Class: gpreempt.Offline, Priority: 3, Matches: true, Decides: true, Detail: `comm "python3" is "python*"; uid 2000 is 2000`},
		{By: "rule rest", Class: gpreempt.Unmanaged, Priority: 7, Matches: true, Detail: `comm "python3" is "*"`},
		{By: "tag", Class: gpreempt.Online, Priority: 11, Matches: true, Detail: `GPREEMPT_CLASS is "online"`},
		{By: "default", Class: gpreempt.Unmanaged, Priority: 7, Matches: true, Detail: "without override, rule or tag a process is unmanaged"},
	}
	if diff := cmp.Diff(want, c.Explain(&s, nil)); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
	want[0] = classify.Step{By: "admin", Class: gpreempt.Offline, Priority: 2, Matches: true, Decides: true, Detail: "admin override"}
	want[2].Decides = false
	override := &classify.Decision{Class: gpreempt.Offline, Priority: 2, By: classify.ByAdmin}
	if diff := cmp.Diff(want, c.Explain(&s, override)); diff != "" {
		t.Errorf("steps under an admin override (-want +got):\n%s", diff)
	}
}

func TestExplainHasTheFactAndTheValueOfTheRule(t *testing.T) {
	uid := func(id uint32) *uint32 { return &id }
	labels := map[string]string{"a/b": "x"}
	inContainer := vllm
	inContainer.Cgroup.ContainerID, inContainer.Cgroup.PodUID = containerID, "9f2c1d4e"
	inSlurm := vllm
	inSlurm.Cgroup.SlurmJob = 7
	empty := classify.Subject{}
	hip := training
	hip.Queues = []gpreempt.QueueEntry{compute(1, 1<<20, gpreempt.QueueInfo{Source: gpreempt.FromMQD, Priority: 11, PriorityKnown: true})}
	many := training
	many.Queues = nil
	for n := range 7 {
		q := compute(uint32(n), 1<<20, gpreempt.QueueInfo{RingBase: 0x1000 * uint64(7-n)})
		q.GPU = gpreempt.GPUID(10 + n/2)
		many.Queues = append(many.Queues, q)
	}
	tests := []struct {
		name    string
		subject classify.Subject
		match   classify.Match
		want    string
	}{
		{"gid", training, classify.Match{GID: uid(0)}, "gid 2001 is not 0"},
		{"gid holds", training, classify.Match{GID: uid(2001)}, "gid 2001 is 2001"},
		{"cmdline", training, classify.Match{Cmdline: "vllm*"}, `cmdline "python3 -m train --epochs 90" is not "vllm*"`},
		{"all that do not hold", training, classify.Match{Comm: "a", Exe: "/b", UID: uid(2000), GID: uid(0)}, `comm "python3" is not "a"; gid 2001 is not 0; exe "/opt/conda/bin/python3.11" is not "/b"`},
		{"exe unknown", vllm, classify.Match{Exe: "/b"}, "exe: unknown"},
		{"cgroup unknown", empty, classify.Match{Cgroup: "/a"}, `cgroup "" is not "/a"`},
		{"unit of what is unknown", empty, classify.Match{Unit: "*", Slice: "*"}, "unit: the control group has none; slice: the control group has none"},
		{"no unit", vllm, classify.Match{Unit: "*", Slice: "*", UserUnit: "*"}, "unit: the control group has none; slice: the control group has none; user_unit: the control group has none"},
		{
			"ids that are refused",
			classify.Subject{Process: gpreempt.Process{Cgroup: gpreempt.Cgroup{Path: "/a", Conflict: "containers a and b\x1b[1m"}}, ContainerKnown: true},
			classify.Match{Container: classify.ContainerMatch{ID: "*"}, Pod: classify.PodMatch{Namespace: "*"}, Slurm: classify.SlurmMatch{QOS: "*"}},
			`container.id: refused, because names contradict each other: containers a and b?[1m; ` +
				`pod.namespace: refused, because names contradict each other: containers a and b?[1m; ` +
				`slurm.qos: refused, because names contradict each other: containers a and b?[1m`,
		},
		{"variable", training, classify.Match{Env: map[string]string{"RANK": "0"}}, `env.RANK "3" is not "0"`},
		{"variable holds", training, classify.Match{Env: map[string]string{"RANK": "*"}}, `env.RANK "3" is "*"`},
		{"no variable", training, classify.Match{Env: map[string]string{"X": "*"}}, "env.X: not set"},
		{
			"no container", vllm,
			classify.Match{Container: classify.ContainerMatch{ID: "*", Name: "*", Runtime: "*", Labels: labels}},
			`container.id: not in a container; container.name: not in a container; container.runtime: not in a container; ` +
				`container.labels["a/b"]: not in a container`,
		},
		{
			"a container not reported", inContainer,
			classify.Match{Container: classify.ContainerMatch{ID: "4*", Name: "*", Image: "*", Runtime: "*", Labels: labels}},
			`container.id "` + containerID + `" is not "4*"; container.name: not reported by the runtime; container.image: not reported by the runtime; ` +
				`container.runtime: not part of the control group; container.labels["a/b"]: not reported by the runtime`,
		},
		{
			"a container reported", training,
			classify.Match{Container: classify.ContainerMatch{Name: "x", Labels: labels}},
			`container.name "trainer" is not "x"; container.labels["a/b"]: there is no such label`,
		},
		{
			"no pod", vllm,
			classify.Match{Pod: classify.PodMatch{Namespace: "*", Labels: labels}},
			`pod.namespace: not in a Kubernetes pod; pod.labels["a/b"]: not in a Kubernetes pod`,
		},
		{
			"a pod not reported", inContainer,
			classify.Match{Pod: classify.PodMatch{Name: "*", Labels: labels}},
			`pod.name: not reported by the runtime; pod.labels["a/b"]: not reported by the runtime`,
		},
		{
			"a pod reported",
			training,
			classify.Match{Pod: classify.PodMatch{Name: "x", Labels: labels}},
			`pod.name "train-0" is not "x"; pod.labels["a/b"]: there is no such label`,
		},
		{
			"no Slurm job", vllm,
			classify.Match{Slurm: classify.SlurmMatch{Partition: "*"}},
			"slurm.partition: not in a control group of a Slurm job",
		},
		{
			"a Slurm job without a record", inSlurm,
			classify.Match{Slurm: classify.SlurmMatch{Partition: "*"}},
			"slurm.partition: the prolog has not recorded it of Slurm job 7",
		},
		{
			"a Slurm job of which some is recorded",
			func() classify.Subject { s := inSlurm; s.Slurm.Partition = "batch"; return s }(),
			classify.Match{Slurm: classify.SlurmMatch{Partition: "x", QOS: "*"}},
			`slurm.partition "batch" is not "x"; slurm.qos: the prolog has not recorded it of Slurm job 7`,
		},
		{"gpu holds", training, classify.Match{GPU: []string{"node:1", "renderD129"}}, "gpu 3183 (node:2, 0001:c1:00.0, renderD129) is in node:1,renderD129"},
		{
			"gpu", training,
			classify.Match{GPU: []string{"node:1", "renderD128"}},
			"gpu 3183 (node:2, 0001:c1:00.0, renderD129) is not in node:1,renderD128",
		},
		{"gpu nobody reported", many, classify.Match{GPU: []string{"node:1"}}, "gpu 10, 11, 12, 13 is not in node:1"},
		{"gpu without queues", vllm, classify.Match{GPU: []string{"node:1"}}, "gpu: the process has no queues"},
		{"priority", training, classify.Match{QueuePriority: &classify.PriorityRange{Min: 7, Max: 15}}, "queue_priority 3 is not in 7..15"},
		{
			"priority of a kernel that distinguishes less", hip,
			classify.Match{QueuePriority: &classify.PriorityRange{Min: 8, Max: 15}},
			"queue_priority 11 (this kernel distinguishes only 0, 7 and 11) is in 8..15",
		},
		{"priority unknown", many, classify.Match{QueuePriority: &classify.PriorityRange{Max: 15}}, "queue_priority: unknown"},
		{"priority without queues", vllm, classify.Match{QueuePriority: &classify.PriorityRange{Max: 15}}, "queue_priority: the process has no queues"},
		{"ring holds", many, classify.Match{RingAddress: &classify.AddressRange{From: 0x3000, To: 0x3fff}}, "ring_address 0x1000, 0x2000, 0x3000, 0x4000 and 3 more is in 0x3000..0x3fff"},
		{
			"ring", many,
			classify.Match{RingAddress: &classify.AddressRange{From: 0x8000, To: 0x9000}},
			"ring_address 0x1000, 0x2000, 0x3000, 0x4000 and 3 more is not in 0x8000..0x9000",
		},
		{"ring unknown", hip, classify.Match{RingAddress: &classify.AddressRange{To: 0x9000}}, "ring_address: unknown"},
		{"ring without queues", vllm, classify.Match{RingAddress: &classify.AddressRange{To: 0x9000}}, "ring_address: the process has no queues"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := compile(t, classify.Rule{Name: "r", Match: test.match, Class: gpreempt.Offline})
			if diff := cmp.Diff(test.want, c.Explain(&test.subject, nil)[1].Detail); diff != "" {
				t.Errorf("detail (-want +got):\n%s", diff)
			}
		})
	}
}

// The name of a process must not flood a terminal or control it.
func TestExplainCutsLongTextsAndQuotesStrangeOnes(t *testing.T) {
	s := training
	s.Comm = "\x1b[31m\xff"
	s.Cmdline = strings.Repeat("é", 4096)
	c := compile(t, classify.Rule{Name: "r", Match: classify.Match{Comm: "a", Cmdline: "*" + strings.Repeat("x", 5000)}, Class: gpreempt.Offline})
	want := `comm "\x1b[31m\xff" is not "a"; cmdline "` + strings.Repeat("é", 80) + `..." is not "*` + strings.Repeat("x", 79) + `..."`
	got := c.Explain(&s, nil)[1].Detail
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("detail (-want +got):\n%s", diff)
	}
	if !utf8.ValidString(got) {
		t.Error("not UTF-8")
	}
}

// The environment may hold passwords: a rule shows the variables it names, the
// tag its own.
func TestExplainShowsNoOtherVariables(t *testing.T) {
	s := training
	s.Env = map[string]string{"HF_TOKEN": "secret", "RANK": "3", "OTHER": "hidden", "GPREEMPT_CLASS": "offline"}
	c := compile(t,
		classify.Rule{Name: "rank", Match: classify.Match{Env: map[string]string{"RANK": "4"}}, Class: gpreempt.Offline},
		classify.Rule{Name: "rest", Match: classify.Match{Comm: "*"}, Class: gpreempt.Offline},
	)
	var details []string
	for _, step := range c.Explain(&s, nil) {
		details = append(details, step.Detail)
	}
	all := strings.Join(details, "\n")
	for _, secret := range []string{"secret", "hidden", "HF_TOKEN", "OTHER"} {
		if strings.Contains(all, secret) {
			t.Errorf("%q is shown in\n%s", secret, all)
		}
	}
	if !strings.Contains(all, `env.RANK "3" is not "4"`) {
		t.Errorf("the variable of the rule is not shown in\n%s", all)
	}
}

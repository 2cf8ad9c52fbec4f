package classify_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestARuleMatchesWhenAllItsFieldsDo(t *testing.T) {
	uid := func(id uint32) *uint32 { return &id }
	env := func(name, glob string) classify.Match { return classify.Match{Env: map[string]string{name: glob}} }
	container := func(m classify.ContainerMatch) classify.Match { return classify.Match{Container: m} }
	pod := func(m classify.PodMatch) classify.Match { return classify.Match{Pod: m} }
	slurm := func(m classify.SlurmMatch) classify.Match { return classify.Match{Slurm: m} }
	gpu := func(selectors ...string) classify.Match { return classify.Match{GPU: selectors} }
	priority := func(least, most gpreempt.Priority) classify.Match {
		return classify.Match{QueuePriority: &classify.PriorityRange{Min: least, Max: most}}
	}
	ring := func(from, to uint64) classify.Match {
		return classify.Match{RingAddress: &classify.AddressRange{From: from, To: to}}
	}
	tests := []struct {
		name  string
		match classify.Match
		want  bool
	}{
		{"comm", classify.Match{Comm: "python3"}, true},
		{"a part of comm", classify.Match{Comm: "python"}, false},
		{"comm is case-sensitive", classify.Match{Comm: "Python3"}, false},
		{"star in cmdline over slashes and spaces", classify.Match{Cmdline: "*train*"}, true},
		{"star in cgroup over slashes", classify.Match{Cgroup: "/kubepods.slice/*training"}, true},
		{"whole cgroup", classify.Match{Cgroup: "/kubepods.slice"}, false},
		{"uid", classify.Match{UID: uid(2000)}, true},
		{"another uid", classify.Match{UID: uid(0)}, false},
		{"all", classify.Match{Comm: "python?", Cmdline: "python3 -m *", Cgroup: "*/pod[0-9]/*", UID: uid(2000)}, true},
		{"all but comm", classify.Match{Comm: "vllm", Cmdline: "*", Cgroup: "*", UID: uid(2000)}, false},
		{"all but cmdline", classify.Match{Comm: "*", Cmdline: "vllm*", Cgroup: "*", UID: uid(2000)}, false},
		{"all but cgroup", classify.Match{Comm: "*", Cmdline: "*", Cgroup: "/system*", UID: uid(2000)}, false},
		{"gid", classify.Match{GID: uid(2001)}, true},
		{"gid is not uid", classify.Match{GID: uid(2000)}, false},
		{"exe", classify.Match{Exe: "*/python3*"}, true},
		{"another exe", classify.Match{Exe: "/usr/*"}, false},
		{"unit", classify.Match{Unit: "cri-containerd-*.scope"}, true},
		{"another unit", classify.Match{Unit: "*.service"}, false},
		{"unit of a user", classify.Match{UserUnit: "*"}, false},
		{"slice", classify.Match{Slice: "kubepods*"}, true},
		{"another slice", classify.Match{Slice: "system.slice"}, false},
		{"env", env("RANK", "[0-9]"), true},
		{"env of another value", env("RANK", "[4-9]"), false},
		{"env set to nothing", env("EMPTY", "*"), true},
		{"env not set", env("WORLD_SIZE", "*"), false},
		{"container id", container(classify.ContainerMatch{ID: "3f2a7b8c9d0e*"}), true},
		{"another container id", container(classify.ContainerMatch{ID: "4*"}), false},
		{"container name", container(classify.ContainerMatch{Name: "train*"}), true},
		{"another container name", container(classify.ContainerMatch{Name: "serve*"}), false},
		{"container image", container(classify.ContainerMatch{Image: "rocm/pytorch:*"}), true},
		{"another container image", container(classify.ContainerMatch{Image: "vllm/*"}), false},
		{"container runtime", container(classify.ContainerMatch{Runtime: "containerd"}), true},
		{"another container runtime", container(classify.ContainerMatch{Runtime: "docker"}), false},
		{"container label", container(classify.ContainerMatch{Labels: map[string]string{"io.x/tier": "batch"}}), true},
		{"another container label", container(classify.ContainerMatch{Labels: map[string]string{"io.x/tier": "gold"}}), false},
		{"container label that is the pod's", container(classify.ContainerMatch{Labels: map[string]string{"app": "*"}}), false},
		{"pod namespace", pod(classify.PodMatch{Namespace: "research"}), true},
		{"another pod namespace", pod(classify.PodMatch{Namespace: "prod"}), false},
		{"pod name", pod(classify.PodMatch{Name: "train-[0-9]"}), true},
		{"another pod name", pod(classify.PodMatch{Name: "serve-*"}), false},
		{"pod labels", pod(classify.PodMatch{Labels: map[string]string{"app": "bert", "app.kubernetes.io/name": "l?m"}}), true},
		{"one pod label of two", pod(classify.PodMatch{Labels: map[string]string{"app": "bert", "app.kubernetes.io/name": "x"}}), false},
		{"pod label that is the container's", pod(classify.PodMatch{Labels: map[string]string{"io.x/tier": "*"}}), false},
		{"Slurm partition", slurm(classify.SlurmMatch{Partition: "batch-*"}), true},
		{"another Slurm partition", slurm(classify.SlurmMatch{Partition: "serving"}), false},
		{"Slurm account", slurm(classify.SlurmMatch{Account: "physics"}), true},
		{"another Slurm account", slurm(classify.SlurmMatch{Account: "phys"}), false},
		{"Slurm QOS", slurm(classify.SlurmMatch{QOS: "low"}), true},
		{"another Slurm QOS", slurm(classify.SlurmMatch{QOS: "high"}), false},
		{"one of partition and QOS", slurm(classify.SlurmMatch{Partition: "batch-1", QOS: "high"}), false},
		{"gpu_id", gpu("3183"), true},
		{"a GPU without its queues", gpu("51110"), false},
		{"one GPU of several", gpu("51110", "node:2"), true},
		{"node", gpu("node:1"), false},
		{"render node", gpu("renderD129"), true},
		{"another render node", gpu("/dev/dri/renderD128"), false},
		{"PCI address", gpu("1:C1:00.0"), true},
		{"PCI address in another domain", gpu("c1:00.0"), false},
		{"queue priority", priority(0, 6), true},
		{"queue priority, one value", priority(3, 3), true},
		{"queue priority of the utility queue, of SDMA, and one not known", priority(4, 15), false},
		{"queue priority below the highest", priority(0, 2), false},
		{"ring of a compute queue", ring(0x7f0000400000, 0x7f00004fffff), true},
		{"ring of the utility queue", ring(0, 0x7f0000001000), true},
		{"ring of SDMA, both ends included", ring(0x7f0000600000, 0x7f0000600000), true},
		{"behind the beginning of every ring", ring(0x7f0000600001, 1<<64-1), false},
		{"all of two kinds", classify.Match{Comm: "python3", GPU: []string{"node:2"}, Env: map[string]string{"RANK": "*"}}, true},
		{"one of two kinds", classify.Match{Comm: "python3", GPU: []string{"node:1"}, Env: map[string]string{"RANK": "*"}}, false},
		{"all but uid", classify.Match{Comm: "*", Cmdline: "*", Cgroup: "*", UID: uid(2001)}, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := compile(t, classify.Rule{Name: "r", Match: test.match, Class: gpreempt.Offline})
			if got := c.Decide(&training).By == "rule r"; got != test.want {
				t.Errorf("matches: %v, want %v", got, test.want)
			}
		})
	}
}

func TestInvalidRulesAreErrors(t *testing.T) {
	sixteen := gpreempt.MaxPriority + 1
	match := classify.Match{Comm: "x"}
	tests := []struct {
		name  string
		rules []classify.Rule
		want  string
	}{
		{
			"no name",
			[]classify.Rule{{Match: match}},
			`rule 1 "": name: it is empty: write a name; decisions show it`,
		},
		{
			"the same name twice",
			[]classify.Rule{{Name: "a", Match: match}, {Name: "b", Match: match}, {Name: "a", Match: match}},
			`rule 3 "a": name: rule 1 has the same: write a unique name for each rule`,
		},
		{
			"nothing to match",
			[]classify.Rule{{Name: "a"}},
			`rule 1 "a": match: it is empty and would match every process: set a field of it, such as comm, cgroup or uid, or comm: "*" for every process`,
		},
		{
			"no such class",
			[]classify.Rule{{Name: "a", Match: match, Class: 9}},
			`rule 1 "a": class: class(9) is not online, offline or unmanaged`,
		},
		{
			"a priority of admins",
			[]classify.Rule{{Name: "a", Match: match, Priority: &sixteen}},
			`rule 1 "a": priority: 16 is outside 0 to 15`,
		},
		{
			"an open set",
			[]classify.Rule{{Name: "a", Match: classify.Match{Cmdline: "py[thon"}}},
			`rule 1 "a": cmdline: "py[thon": the [ at character 3 is not closed: add the ], or write [[] for the character itself`,
		},
		{
			"an empty range",
			[]classify.Rule{{Name: "a", Match: classify.Match{Cgroup: "/pod[9-0]"}}},
			`rule 1 "a": cgroup: "/pod[9-0]": the [ at character 5 has the range 9-0, which is empty: write 0-9`,
		},
		{
			"what is not text",
			[]classify.Rule{{Name: "a", Match: classify.Match{Cmdline: "caf\xe9"}}},
			`rule 1 "a": cmdline: "caf\xe9": is not UTF-8: save the file as UTF-8, and write ? for other characters`,
		},
		{
			"a name the kernel cuts",
			[]classify.Rule{{Name: "a", Match: classify.Match{Comm: "text-generation-*"}}},
			`rule 1 "a": comm: "text-generation-*": matches no name of at most 15 bytes, which is all that the kernel keeps: shorten it and end it with *, or match cmdline`,
		},
		{
			"a relative cgroup",
			[]classify.Rule{{Name: "a", Match: classify.Match{Cgroup: "system.slice/*"}}},
			`rule 1 "a": cgroup: "system.slice/*": matches no path: paths begin with /: begin it with / or *`,
		},
		{
			"what no process can have",
			[]classify.Rule{{Name: "a", Match: classify.Match{
				Exe: "python3", Unit: "train", Slice: "batch.service",
				Container: classify.ContainerMatch{ID: "3f2a7b8c9d0e", Runtime: "crio"},
			}}},
			strings.Join([]string{
				`rule 1 "a": exe: "python3": matches no path: paths begin with /: begin it with / or *`,
				`rule 1 "a": unit: "train": matches no unit: units end in .service or .scope: end it with one of these or with *, such as "train.service"`,
				`rule 1 "a": slice: "batch.service": matches no slice: slices end in .slice: match unit in place of slice`,
				`rule 1 "a": container.id: "3f2a7b8c9d0e": is only part of an id: ids have 64 digits: write "3f2a7b8c9d0e*"`,
				`rule 1 "a": container.runtime: "crio": matches no runtime: the known runtimes are docker, containerd, cri-o, podman`,
			}, "\n"),
		},
		{
			"maps",
			[]classify.Rule{{Name: "a", Match: classify.Match{
				Env:       map[string]string{"A": "", "B=1": "x", "C": "[", "": "x"},
				Container: classify.ContainerMatch{Labels: map[string]string{"": "x"}},
				Pod:       classify.PodMatch{Labels: map[string]string{"app.kubernetes.io/name": ""}},
			}}},
			strings.Join([]string{
				`rule 1 "a": env[""]: is not the name of a variable: write NAME: value, without =`,
				`rule 1 "a": env.A: the value is empty: write "*" to match any value`,
				`rule 1 "a": env["B=1"]: is not the name of a variable: write NAME: value, without =`,
				`rule 1 "a": env.C: "[": the [ at character 1 is not closed: add the ], or write [[] for the character itself`,
				`rule 1 "a": container.labels[""]: the name of the label is empty: write NAME: value`,
				`rule 1 "a": pod.labels["app.kubernetes.io/name"]: the value is empty: write "*" to match any value`,
			}, "\n"),
		},
		{
			"no GPU",
			[]classify.Rule{{Name: "a", Match: classify.Match{GPU: []string{"node:1", "card0", "0", "renderD", "node:x", "0xc7a6", "3:00.8", "3:00"}}}},
			func() string {
				var lines []string
				for n, s := range []string{"card0", "0", "renderD", "node:x", "0xc7a6", "3:00.8", "3:00"} {
					lines = append(lines, fmt.Sprintf(`rule 1 "a": gpu[%d]: %q is not the name of a GPU: `+
						"write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them", n+1, s))
				}
				return strings.Join(lines, "\n")
			}(),
		},
		{
			"ranges upside down",
			[]classify.Rule{{Name: "a", Match: classify.Match{
				QueuePriority: &classify.PriorityRange{Min: 9, Max: 3}, RingAddress: &classify.AddressRange{From: 0x2000, To: 0x1000},
			}}},
			`rule 1 "a": queue_priority: min 9 is above max 3: swap them` + "\n" +
				`rule 1 "a": ring_address: from 0x2000 is above to 0x1000: swap them`,
		},
		{
			"a queue priority of admins",
			[]classify.Rule{{Name: "a", Match: classify.Match{QueuePriority: &classify.PriorityRange{Max: 16}}}},
			`rule 1 "a": queue_priority: max 16 is above 15: choose 0 to 15; HIP's low, normal and high are 0, 7 and 11`,
		},
		{
			"several at once",
			[]classify.Rule{{Name: "a"}, {Name: "b", Match: match, Class: 3}},
			`rule 1 "a": match: it is empty and would match every process: set a field of it, such as comm, cgroup or uid, or comm: "*" for every process` +
				"\n" + `rule 2 "b": class: class(3) is not online, offline or unmanaged`,
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c, err := classify.New(test.rules, nil)
			var rule *classify.RuleError
			if c != nil || !errors.As(err, &rule) || err.Error() != test.want {
				t.Errorf("error %v\nwant  %s", err, test.want)
			}
		})
	}
}

func TestOnlyTextsThatMayEndLikeAUnitAreAccepted(t *testing.T) {
	take := func(glob string) error {
		_, err := classify.New([]classify.Rule{{Name: "a", Match: classify.Match{Unit: glob, UserUnit: glob}}}, nil)
		return err
	}
	for _, glob := range []string{"*", "train*", "train.service", "*.scope", "*ice", "train.[st]*", "tmp.moun?", "a.swap"} {
		if err := take(glob); err != nil {
			t.Error(err)
		}
	}
	for _, glob := range []string{"service", "train", "*x.scop", "*.slice", "train.service "} {
		if take(glob) == nil {
			t.Errorf("%q was taken", glob)
		}
	}
}

// An unknown value is not matched by *: a rule for all containers does not match a process
// outside them.
func TestUnknownValuesDoNotMatch(t *testing.T) {
	for name, match := range map[string]classify.Match{
		"exe":             {Exe: "*"},
		"unit":            {Unit: "*"},
		"slice":           {Slice: "*"},
		"env":             {Env: map[string]string{"X": "*"}},
		"container id":    {Container: classify.ContainerMatch{ID: "*"}},
		"container name":  {Container: classify.ContainerMatch{Name: "*"}},
		"image":           {Container: classify.ContainerMatch{Image: "*"}},
		"runtime":         {Container: classify.ContainerMatch{Runtime: "*"}},
		"label":           {Container: classify.ContainerMatch{Labels: map[string]string{"x": "*"}}},
		"namespace":       {Pod: classify.PodMatch{Namespace: "*"}},
		"pod":             {Pod: classify.PodMatch{Name: "*"}},
		"pod label":       {Pod: classify.PodMatch{Labels: map[string]string{"x": "*"}}},
		"gpu":             {GPU: []string{"node:0", "renderD128", "0000:00:00.0"}},
		"queue priority":  {QueuePriority: &classify.PriorityRange{Max: 15}},
		"address of ring": {RingAddress: &classify.AddressRange{To: 1<<64 - 1}},
	} {
		c := compile(t, classify.Rule{Name: "r", Match: match, Class: gpreempt.Offline})
		// A queue of which nothing is known but sysfs, on a GPU nobody told of.
		for _, s := range []classify.Subject{vllm, {Queues: []gpreempt.QueueEntry{compute(0, 1<<20, gpreempt.QueueInfo{})}}} {
			if got := c.Decide(&s).By; got != "default" {
				t.Errorf("%s: by %q", name, got)
			}
		}
	}
}

func TestQueuePriorityIsTheProgramsOwn(t *testing.T) {
	known := func(p gpreempt.Priority) gpreempt.QueueInfo {
		return gpreempt.QueueInfo{Source: gpreempt.FromMQD, Priority: p, PriorityKnown: true}
	}
	tests := []struct {
		name   string
		queues []gpreempt.QueueEntry
		// want is the only priority whose rule matches; -1 for none.
		want int
	}{
		{"no queues", nil, -1},
		{"the highest of several", []gpreempt.QueueEntry{compute(0, 8192, known(7)), compute(1, 8192, known(11)), compute(2, 8192, known(0))}, 11},
		{"not the runtime's own", []gpreempt.QueueEntry{compute(0, 4096, known(11)), compute(1, 8192, known(7))}, 7},
		{"only small rings", []gpreempt.QueueEntry{compute(0, 4096, known(7)), compute(1, 4096, known(11))}, 11},
		{"the runtime's own beside one not known", []gpreempt.QueueEntry{compute(0, 4096, known(11)), compute(1, 8192, gpreempt.QueueInfo{})}, -1},
		{"the runtime's own beside SDMA", []gpreempt.QueueEntry{
			compute(0, 4096, known(7)),
			{Queue: gpreempt.Queue{Type: gpreempt.QueueSDMA, RingBytes: 1 << 20}, Info: known(11)},
		}, 7},
		{"one that is not known may be higher", []gpreempt.QueueEntry{compute(0, 8192, known(7)), compute(1, 8192, gpreempt.QueueInfo{})}, -1},
		{"and cannot be higher than the highest", []gpreempt.QueueEntry{compute(0, 8192, known(15)), compute(1, 8192, gpreempt.QueueInfo{})}, 15},
		{"low is a priority", []gpreempt.QueueEntry{compute(0, 8192, known(0))}, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for p := range 16 {
				only := &classify.PriorityRange{Min: gpreempt.Priority(p), Max: gpreempt.Priority(p)}
				c := compile(t, classify.Rule{Name: "r", Match: classify.Match{QueuePriority: only}, Class: gpreempt.Offline})
				if got, want := c.Decide(&classify.Subject{Queues: test.queues}).By == "rule r", p == test.want; got != want {
					t.Errorf("a rule for %d matches: %v, want %v", p, got, want)
				}
			}
		})
	}
}

func TestAMatchIsWrittenInOneLine(t *testing.T) {
	if got := everything().String(); got != `comm="python*" uid=2000 gid=2001 exe="/opt/*" cgroup="/kubepods*" unit="*.scope" slice="*.slice" env.RANK="[0-9]" `+
		`container.id="3f*" container.name="train*" container.image="*pytorch*" container.runtime="containerd" container.labels["io.x/tier"]="batch" `+
		`pod.namespace="research" pod.name="train-*" pod.labels.app="*" `+
		`slurm.partition="batch*" slurm.account="phys*" slurm.qos="low" gpu=51110,node:2 queue_priority=0..6 `+
		`ring_address=0x7f0000000000..0x7fffffffffff cmdline="*train*[0-9]"` {
		t.Errorf("got %s", got)
	}
	if (classify.Match{}).String() != "" || everything().String() == "" {
		t.Error("nothing is something")
	}
}

// everything sets every field; it matches training.
func everything() classify.Match {
	return classify.Match{
		Comm: "python*", Cmdline: "*train*[0-9]", Exe: "/opt/*", UID: new(uint32(2000)), GID: new(uint32(2001)),
		Cgroup: "/kubepods*", Unit: "*.scope", Slice: "*.slice", Env: map[string]string{"RANK": "[0-9]"},
		Container: classify.ContainerMatch{
			ID: "3f*", Name: "train*", Image: "*pytorch*", Runtime: "containerd", Labels: map[string]string{"io.x/tier": "batch"},
		},
		Pod:   classify.PodMatch{Namespace: "research", Name: "train-*", Labels: map[string]string{"app": "*"}},
		Slurm: classify.SlurmMatch{Partition: "batch*", Account: "phys*", QOS: "low"},
		GPU:   []string{"51110", "node:2"}, QueuePriority: &classify.PriorityRange{Max: 6},
		RingAddress: &classify.AddressRange{From: 0x7f0000000000, To: 0x7fffffffffff},
	}
}

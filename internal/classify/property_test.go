package classify_test

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The words are few, so that rules match often.
var (
	someText     = rapid.SampledFrom([]string{"", "a", "b", "ab"})
	someGlob     = rapid.SampledFrom([]string{"a", "b", "*", "a*", "?", "[ab]", "*b"})
	someKey      = rapid.SampledFrom([]string{"X", "Y"})
	someMap      = rapid.MapOfN(someKey, someText, 0, 2)
	someID       = rapid.Uint32Range(0, 2)
	somePriority = rapid.Custom(func(t *rapid.T) gpreempt.Priority {
		return gpreempt.Priority(rapid.IntRange(0, 15).Draw(t, "priority"))
	})
	someClass = rapid.SampledFrom([]gpreempt.Class{gpreempt.Unmanaged, gpreempt.Online, gpreempt.Offline})
)

func drawSubject(t *rapid.T) *classify.Subject {
	s := &classify.Subject{
		Process: gpreempt.Process{
			Comm: someText.Draw(t, "comm"), Cmdline: someText.Draw(t, "cmdline"), UID: someID.Draw(t, "uid"), GID: someID.Draw(t, "gid"),
			Exe: rapid.SampledFrom([]string{"", "/a", "/b"}).Draw(t, "exe"), Env: someMap.Draw(t, "env"),
			Cgroup: gpreempt.Cgroup{
				Path: rapid.SampledFrom([]string{"", "/a", "/b"}).Draw(t, "cgroup"), Unit: rapid.SampledFrom([]string{"", "a.scope"}).Draw(t, "unit"),
				UserUnit: rapid.SampledFrom([]string{"", "a.service"}).Draw(t, "user unit"),
				Slice:    rapid.SampledFrom([]string{"", "a.slice"}).Draw(t, "slice"), ContainerID: someText.Draw(t, "id"),
				Runtime: rapid.SampledFrom([]string{"", "docker", "podman"}).Draw(t, "runtime"),
			},
		},
		Container: gpreempt.Container{
			Name: someText.Draw(t, "name"), Image: someText.Draw(t, "image"), Labels: someMap.Draw(t, "labels"),
			Namespace: someText.Draw(t, "namespace"), Pod: someText.Draw(t, "pod"), PodLabels: someMap.Draw(t, "pod labels"),
		},
		ContainerKnown: true,
		GPUs:           []gpreempt.GPU{{ID: 1, Node: 1, BDF: "0000:01:00.0", RenderMinor: 128}, {ID: 2, Node: 2, BDF: "0000:02:00.0", RenderMinor: 129}},
	}
	for _, variable := range [][]string{
		{"GPREEMPT_CLASS", "", "Online", "offline", "no"},
		{"GPREEMPT_PRIORITY", "", "3", "99"},
		{"AMD_QUEUE_TAG", "", "ONLINE_AI", "x"},
		{"AMD_QUEUE_PRIORITY", "", "15"},
	} {
		// The name itself stands for a variable that is not set.
		if v := rapid.SampledFrom(variable).Draw(t, variable[0]); v != variable[0] {
			s.Env[variable[0]] = v
		}
	}
	if rapid.Bool().Draw(t, "in a Slurm job") {
		s.Cgroup.SlurmJob = 7
		s.Slurm = gpreempt.SlurmJob{Partition: someText.Draw(t, "partition"), Account: someText.Draw(t, "account"), QOS: someText.Draw(t, "qos")}
	}
	for n := range rapid.IntRange(0, 3).Draw(t, "queues") {
		s.Queues = append(s.Queues, gpreempt.QueueEntry{
			Queue: gpreempt.Queue{
				ID: uint32(n), GPU: gpreempt.GPUID(rapid.IntRange(1, 3).Draw(t, "gpu")),
				Type:      rapid.SampledFrom([]gpreempt.QueueType{gpreempt.QueueCompute, gpreempt.QueueSDMA}).Draw(t, "type"),
				RingBytes: rapid.SampledFrom([]uint64{4096, 8192}).Draw(t, "bytes"),
			},
			Info: gpreempt.QueueInfo{
				Source: gpreempt.QueueSource(rapid.IntRange(0, 3).Draw(t, "source")), Priority: somePriority.Draw(t, "priority"), PriorityKnown: true,
				RingBase: rapid.SampledFrom([]uint64{0, 0x1000, 0x2000}).Draw(t, "base"),
			},
		})
	}
	return s
}

func drawRules(t *rapid.T) []classify.Rule {
	var rules []classify.Rule
	for n := range rapid.IntRange(0, 6).Draw(t, "rules") {
		var m classify.Match
		for range rapid.IntRange(1, 3).Draw(t, "fields") {
			setSome(t, &m)
		}
		r := classify.Rule{Name: fmt.Sprint(n), Match: m, Class: someClass.Draw(t, "class"), NeverDebug: rapid.Bool().Draw(t, "never_debug")}
		if r.Class == gpreempt.Offline {
			r.OnResist.Stop = rapid.Bool().Draw(t, "stop")
		}
		if rapid.Bool().Draw(t, "has a priority") {
			r.Priority = new(somePriority.Draw(t, "priority"))
		}
		rules = append(rules, r)
	}
	return rules
}

// setSome sets one field of m.
func setSome(t *rapid.T, m *classify.Match) {
	glob := func() string { return someGlob.Draw(t, "glob") }
	path := func() string { return rapid.SampledFrom([]string{"*", "/a*", "[!/]*"}).Draw(t, "path") }
	part := func() string { return rapid.SampledFrom([]string{"*", "a.*"}).Draw(t, "unit or slice") }
	entry := func() map[string]string { return map[string]string{someKey.Draw(t, "key"): glob()} }
	field := rapid.SampledFrom([]func(){
		func() { m.Comm = glob() },
		func() { m.Cmdline = glob() },
		func() { m.Exe = path() },
		func() { m.UID = new(someID.Draw(t, "uid")) },
		func() { m.GID = new(someID.Draw(t, "gid")) },
		func() { m.Cgroup = path() },
		func() { m.Unit = part() },
		func() { m.UserUnit = part() },
		func() { m.Slice = part() },
		func() { m.Env = entry() },
		func() { m.Container.ID = path() },
		func() { m.Container.Name = glob() },
		func() { m.Container.Image = glob() },
		func() { m.Container.Runtime = rapid.SampledFrom([]string{"*", "docker"}).Draw(t, "runtime") },
		func() { m.Container.Labels = entry() },
		func() { m.Pod.Namespace = glob() },
		func() { m.Pod.Name = glob() },
		func() { m.Pod.Labels = entry() },
		func() { m.Slurm.Partition = glob() },
		func() { m.Slurm.Account = glob() },
		func() { m.Slurm.QOS = glob() },
		func() {
			m.GPU = []string{rapid.SampledFrom([]string{"1", "node:2", "renderD128", "02:00.0"}).Draw(t, "gpu")}
		},
		func() {
			m.QueuePriority = &classify.PriorityRange{Min: somePriority.Draw(t, "min"), Max: gpreempt.MaxPriority}
		},
		func() {
			m.RingAddress = &classify.AddressRange{From: rapid.Uint64Range(0, 0x2000).Draw(t, "from"), To: 0x2000}
		},
	}).Draw(t, "field")
	field()
}

// before returns s with fewer known facts.
func before(t *rapid.T, s *classify.Subject) *classify.Subject {
	p := *s
	if rapid.Bool().Draw(t, "memory unread") {
		p.Exe, p.Cmdline, p.Env, p.Unread = "", "", nil, true
	}
	if p.Cgroup.ContainerID != "" && rapid.Bool().Draw(t, "runtime has not answered") {
		p.Container, p.ContainerKnown = gpreempt.Container{}, false
	}
	if p.Cgroup.SlurmJob != 0 && rapid.Bool().Draw(t, "no record of the Slurm job") {
		p.Slurm = gpreempt.SlurmJob{}
	}
	p.Queues = slices.Clone(s.Queues)
	for n := range p.Queues {
		if rapid.Bool().Draw(t, "nothing known of the queue") {
			p.Queues[n].Info = gpreempt.QueueInfo{}
		}
	}
	return &p
}

// Missing facts never make a process offline that is not offline once they are known, nor one
// that is not to be debugged one that may be.
func TestNoProcessIsOfflineBeforeItIsKnown(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rules, s := drawRules(t), drawSubject(t)
		c, err := classify.New(rules, nil)
		if err != nil {
			t.Fatal(err)
		}
		early := before(t, s)
		if d, then := c.Decide(early), c.Decide(s); d.Class == gpreempt.Offline && (then.Class != gpreempt.Offline || then.NeverDebug && !d.NeverDebug || d.OnResist.Enforced() && then.OnResist != d.OnResist) {
			t.Fatalf("%+v before, %+v when all is known\nrules %+v\nbefore %+v\nknown %+v", d, then, rules, early, s)
		}
		waits(t, c, rules, early)
	})
}

// waits checks the steps of a decision that waits.
func waits(t *rapid.T, c *classify.Classifier, rules []classify.Rule, s *classify.Subject) {
	d := c.Decide(s)
	if !d.Waits {
		return
	}
	var deciding []classify.Step
	steps := c.Explain(s, nil)
	for _, step := range steps {
		if step.Decides {
			deciding = append(deciding, step)
		}
	}
	protects := func(by string) bool {
		return slices.ContainsFunc(rules, func(r classify.Rule) bool {
			return "rule "+r.Name == by && (r.Class != gpreempt.Offline || r.NeverDebug || !r.OnResist.Stop)
		})
	}
	if len(deciding) != 1 || deciding[0].Matches || !protects(deciding[0].By) || deciding[0].By+" may match" != d.By {
		t.Fatalf("%+v is explained by %+v", d, steps)
	}
	if first := slices.IndexFunc(steps, func(step classify.Step) bool { return step.Matches }); steps[first].Class != gpreempt.Offline {
		t.Fatalf("%+v waits, and nothing would make it offline: %+v", d, steps)
	}
}

func TestDecideExplainAndMatchingAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rules, s := drawRules(t), drawSubject(t)
		c, err := classify.New(rules, nil)
		if err != nil {
			t.Fatal(err)
		}
		d, steps, matching := c.Decide(s), c.Explain(s, nil), c.Matching(s, nil)
		if d.Waits { // see TestNothingIsOfflineBeforeItIsKnownToBe
			waits(t, c, rules, s)
			return
		}

		// One step for each, in order; the first that matches decides, and it says
		// what Decide does.
		if len(steps) != len(rules)+3 || len(matching) != len(rules)+1 {
			t.Fatalf("%d steps and %d matches of %d rules", len(steps), len(matching), len(rules))
		}
		if steps[0].Matches || !steps[len(steps)-1].Matches {
			t.Fatalf("an admin who said nothing matches, or the default does not: %+v", steps)
		}
		decided := false
		for n, step := range steps {
			if decides := step.Matches && !decided; step.Decides != decides {
				t.Fatalf("step %d decides: %v, want %v: %+v", n, step.Decides, decides, steps)
			} else if decides {
				decided = true
				got := classify.Decision{Class: step.Class, Priority: step.Priority, By: step.By}
				got.NeverDebug = slices.ContainsFunc(rules, func(r classify.Rule) bool { return "rule "+r.Name == step.By && r.NeverDebug })
				for _, r := range rules {
					if "rule "+r.Name == step.By {
						got.OnResist = r.OnResist
					}
				}
				if got != d {
					t.Fatalf("step %d decides %+v, Decide says %+v", n, got, d)
				}
			}
			if step.Detail == "" {
				t.Fatalf("step %d has no detail", n)
			}
		}
		for n, matches := range matching {
			if step := steps[1+n]; step.Matches != matches {
				t.Fatalf("%s: Matching says %v, Explain %v", step.By, matches, step.Matches)
			}
		}

		// The first rule that matches wins.
		if n := slices.Index(matching, true); n >= 0 && n < len(rules) && d.By != "rule "+rules[n].Name {
			t.Fatalf("rule %d matches first, and %q decides", n, d.By)
		}

		// An admin override is above all, and changes nothing else.
		override := &classify.Decision{Class: gpreempt.Offline, Priority: 5, By: classify.ByAdmin}
		overridden := c.Explain(s, override)
		for n, step := range overridden {
			if step.Decides != (n == 0) || (n > 0 && step.Matches != steps[n].Matches) {
				t.Fatalf("under an admin override: %+v", overridden)
			}
		}

		// Without a rule that does not match, all is as before.
		for n := range rules {
			if matching[n] {
				continue
			}
			fewer, err := classify.New(slices.Delete(slices.Clone(rules), n, n+1), nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := fewer.Decide(s); got != d {
				t.Fatalf("without rule %d: %+v, before %+v", n, got, d)
			}
		}
		// A rule behind one that matches does not count.
		if n := slices.Index(matching[:len(rules)], true); n >= 0 {
			first, err := classify.New(rules[:n+1], nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := first.Decide(s); got != d {
				t.Fatalf("with the rules up to %d: %+v, before %+v", n, got, d)
			}
		}
	})
}

// A rule matches if each of its fields does: the fields are independent.
func TestARuleIsTheSumOfItsFields(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, rules := drawSubject(t), drawRules(t)
		for _, r := range rules {
			want := true
			for _, part := range parts(r.Match) {
				c, err := classify.New([]classify.Rule{{Name: "part", Match: part}}, nil)
				if err != nil {
					t.Fatal(err)
				}
				want = want && c.Matching(s, nil)[0]
			}
			c, err := classify.New([]classify.Rule{r}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := c.Matching(s, nil)[0]; got != want {
				t.Fatalf("%v matches: %v, its fields: %v", r.Match, got, want)
			}
		}
	})
}

// parts returns matches of one field each.
func parts(m classify.Match) []classify.Match {
	all := []classify.Match{
		{Comm: m.Comm},
		{Cmdline: m.Cmdline},
		{Exe: m.Exe},
		{UID: m.UID},
		{GID: m.GID},
		{Cgroup: m.Cgroup},
		{Unit: m.Unit},
		{UserUnit: m.UserUnit},
		{Slice: m.Slice},
		{Env: m.Env},
		{Container: classify.ContainerMatch{ID: m.Container.ID}},
		{Container: classify.ContainerMatch{Name: m.Container.Name}},
		{Container: classify.ContainerMatch{Image: m.Container.Image}},
		{Container: classify.ContainerMatch{Runtime: m.Container.Runtime}},
		{Container: classify.ContainerMatch{Labels: m.Container.Labels}},
		{Pod: classify.PodMatch{Namespace: m.Pod.Namespace}},
		{Pod: classify.PodMatch{Name: m.Pod.Name}},
		{Pod: classify.PodMatch{Labels: m.Pod.Labels}},
		{Slurm: classify.SlurmMatch{Partition: m.Slurm.Partition}},
		{Slurm: classify.SlurmMatch{Account: m.Slurm.Account}},
		{Slurm: classify.SlurmMatch{QOS: m.Slurm.QOS}},
		{GPU: m.GPU},
		{QueuePriority: m.QueuePriority},
		{RingAddress: m.RingAddress},
	}
	return slices.DeleteFunc(all, func(m classify.Match) bool { return m.String() == "" })
}

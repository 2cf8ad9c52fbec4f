package classify_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

var (
	vllm = gpreempt.Process{
		Comm: "vllm", Cmdline: "python3 /usr/bin/vllm serve llama", UID: 1000,
		Cgroup: gpreempt.Cgroup{Path: "/kubepods.slice/pod7/serving"},
	}
	training = gpreempt.Process{
		Comm: "python3", Cmdline: "python3 -m train --epochs 90", UID: 2000,
		Cgroup: gpreempt.Cgroup{Path: "/kubepods.slice/pod8/training"},
	}
)

func compile(tb testing.TB, rules ...classify.Rule) *classify.Classifier {
	tb.Helper()
	c, err := classify.New(rules)
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
		if diff := cmp.Diff(want, c.Decide(training)); diff != "" {
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
		if diff := cmp.Diff(want, c.Decide(vllm)); diff != "" {
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
	for _, p := range []gpreempt.Process{vllm, training, {}} {
		if got := c.Decide(p).By; got != want[p.Comm] {
			t.Errorf("%q: by %q, want %q", p.Comm, got, want[p.Comm])
		}
	}
}

func TestARuleMatchesWhenAllItsFieldsDo(t *testing.T) {
	uid := func(id uint32) *uint32 { return &id }
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
		{"all but uid", classify.Match{Comm: "*", Cmdline: "*", Cgroup: "*", UID: uid(2001)}, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := compile(t, classify.Rule{Name: "r", Match: test.match, Class: gpreempt.Offline})
			if got := c.Decide(training).By == "rule r"; got != test.want {
				t.Errorf("matches: %v, want %v", got, test.want)
			}
		})
	}
}

func TestRulesThatCannotBeMeantAreRefused(t *testing.T) {
	sixteen := gpreempt.PriorityAdmin
	match := classify.Match{Comm: "x"}
	tests := []struct {
		name  string
		rules []classify.Rule
		want  string
	}{
		{
			"no name",
			[]classify.Rule{{Match: match}},
			`rule 1 "": name: it is empty: give the rule a name, decisions show it`,
		},
		{
			"the same name twice",
			[]classify.Rule{{Name: "a", Match: match}, {Name: "b", Match: match}, {Name: "a", Match: match}},
			`rule 3 "a": name: rule 1 has the same: give each rule its own`,
		},
		{
			"nothing to match",
			[]classify.Rule{{Name: "a"}},
			`rule 1 "a": match: it is empty and would match every process: set one of comm, cmdline, cgroup and uid, or comm: "*" if every process is meant`,
		},
		{
			"no such class",
			[]classify.Rule{{Name: "a", Match: match, Class: 9}},
			`rule 1 "a": class: class(9) is none of online, offline, unmanaged`,
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
			`rule 1 "a": cmdline: "caf\xe9": it is not UTF-8: save the file as UTF-8, and write ? for a character that is not`,
		},
		{
			"a name the kernel cuts",
			[]classify.Rule{{Name: "a", Match: classify.Match{Comm: "text-generation-*"}}},
			`rule 1 "a": comm: "text-generation-*": it matches no name of 15 bytes or less, and the kernel keeps no more: end it in * earlier, or match cmdline`,
		},
		{
			"a relative cgroup",
			[]classify.Rule{{Name: "a", Match: classify.Match{Cgroup: "system.slice/*"}}},
			`rule 1 "a": cgroup: "system.slice/*": it matches no path, as they begin with /: begin it with / or *`,
		},
		{
			"several at once",
			[]classify.Rule{{Name: "a"}, {Name: "b", Match: match, Class: 3}},
			`rule 1 "a": match: it is empty and would match every process: set one of comm, cmdline, cgroup and uid, or comm: "*" if every process is meant` +
				"\n" + `rule 2 "b": class: class(3) is none of online, offline, unmanaged`,
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c, err := classify.New(test.rules)
			var rule *classify.RuleError
			if c != nil || !errors.As(err, &rule) || err.Error() != test.want {
				t.Errorf("error %v\nwant  %s", err, test.want)
			}
		})
	}
}

func TestDecideAllocatesNothing(t *testing.T) {
	c := compile(t, classify.Rule{Name: "train", Match: classify.Match{Cmdline: "*train*[0-9]"}, Class: gpreempt.Offline})
	if allocs := testing.AllocsPerRun(100, func() { c.Decide(training) }); allocs != 0 {
		t.Errorf("%v allocations, want 0", allocs)
	}
}

func BenchmarkDecide(b *testing.B) {
	var rules []classify.Rule
	for n := range 50 {
		rules = append(rules, classify.Rule{
			Name:  fmt.Sprint(n),
			Match: classify.Match{Cmdline: fmt.Sprintf("*--model=*%d", n), Cgroup: "/kubepods.slice/*"},
			Class: gpreempt.Offline,
		})
	}
	c := compile(b, rules...)
	b.ReportAllocs()
	for b.Loop() {
		c.Decide(training)
	}
}

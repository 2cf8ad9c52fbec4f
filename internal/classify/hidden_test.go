package classify_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestARuleBehindOneThatAppliesWhereverItDoesIsHidden(t *testing.T) {
	comm := func(glob string) classify.Match { return classify.Match{Comm: glob} }
	uid := func(id uint32) classify.Match { return classify.Match{UID: &id} }
	gpus := func(names ...string) classify.Match { return classify.Match{GPU: names} }
	env := func(name string) classify.Match { return classify.Match{Env: map[string]string{name: "*"}} }
	priority := func(low, high gpreempt.Priority) classify.Match {
		return classify.Match{QueuePriority: &classify.PriorityRange{Min: low, Max: high}}
	}
	ring := func(from, to uint64) classify.Match {
		return classify.Match{RingAddress: &classify.AddressRange{From: from, To: to}}
	}
	for _, tc := range []struct {
		before, later classify.Match
		want          bool
	}{
		{comm("*"), uid(1), true},
		{classify.Match{Cgroup: "**"}, uid(1), true},
		{classify.Match{Cmdline: "*"}, uid(1), true},
		{classify.Match{Exe: "*"}, uid(1), false}, // the program may be unknown
		{classify.Match{Exe: "*"}, classify.Match{Exe: "/usr/*"}, true},
		{uid(1), comm("*"), false},
		{uid(1), classify.Match{UID: new(uint32(1)), Comm: "x"}, true},
		{uid(1), uid(2), false},
		{classify.Match{UID: new(uint32(1)), Comm: "x"}, uid(1), false},
		{comm("python*"), comm("python3*"), true},
		{comm("python*"), comm("python?"), true},
		{comm("python*"), comm("python"), true},
		{comm("python?"), comm("python3"), true},
		{comm("python?"), comm("python*"), false},
		{comm("python3*"), comm("python*"), false},
		{comm("*b]*"), comm("[ab]*"), false},
		{comm("a[*]c"), comm("a*c"), false},
		{comm("*"), comm("[ab]*"), true},
		{env("A"), env("A"), true},
		{env("A"), env("B"), false},
		{gpus("1", "node:2"), gpus("node:2"), true},
		{gpus("1"), gpus("1", "2"), false},
		{priority(0, 9), priority(0, 6), true},
		{priority(0, 6), priority(0, 9), false},
		{ring(0x1000, 0x2000), ring(0x1000, 0x1fff), true},
	} {
		c, err := classify.New([]classify.Rule{{Name: "first", Match: tc.before}, {Name: "second", Match: tc.later}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		var want []classify.RuleError
		if tc.want {
			want = []classify.RuleError{{
				Of: "rule", Index: 1, Name: "second", Field: "name",
				Problem: `never decides: every process that it matches is matched by rule "first" above`,
				Remedy:  "move it above that rule, or remove it",
			}}
		}
		if diff := cmp.Diff(want, c.Hidden()); diff != "" {
			t.Errorf("%v before %v (-want +got):\n%s", tc.before, tc.later, diff)
		}
	}
}

func TestAJobRuleBehindOneThatAppliesWhereverItDoesIsHidden(t *testing.T) {
	for _, tc := range []struct {
		before, later classify.JobRule
		want          bool
	}{
		{classify.JobRule{By: []string{"env.A"}}, classify.JobRule{By: []string{"env.B", "env.A"}}, true},
		{classify.JobRule{By: []string{"env.A", "env.B"}}, classify.JobRule{By: []string{"env.A"}}, false},
		{classify.JobRule{Cgroup: "*"}, classify.JobRule{Cgroup: "/slurm/*"}, true},
		{classify.JobRule{Cgroup: "*"}, classify.JobRule{By: []string{"env.A"}}, false}, // there may be no control groups
		{classify.JobRule{Cgroup: "/slurm/*"}, classify.JobRule{Cgroup: "/slurm/*", By: []string{"unit"}}, true},
		{classify.JobRule{Cgroup: "/slurm/*"}, classify.JobRule{Cgroup: "/slurm/job*"}, false}, // the longer beginning is another job
	} {
		tc.before.Name, tc.later.Name = "first", "second"
		c, err := classify.New(nil, []classify.JobRule{tc.before, tc.later})
		if err != nil {
			t.Fatal(err)
		}
		if got := len(c.Hidden()) == 1; got != tc.want {
			t.Errorf("%+v before %+v hides it: %v, want %v", tc.before, tc.later, got, tc.want)
		}
	}
}

// Whatever the rules, a hidden one decides about no process whose command line was read.
func TestHiddenRulesNeverDecide(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, rules := drawSubject(t), drawRules(t)
		glob := rapid.StringMatching(`[ab?*]{1,3}`)
		for n := range rules { // some that are alike
			if rapid.Bool().Draw(t, "comm only") {
				rules[n].Match = classify.Match{Comm: glob.Draw(t, "comm")}
			}
		}
		s.Comm = rapid.StringMatching(`[ab]{0,3}`).Draw(t, "comm")
		c, err := classify.New(rules, nil)
		if err != nil {
			t.Fatal(err)
		}
		by := c.Decide(s).By
		for _, h := range c.Hidden() {
			if by == "rule "+h.Name {
				t.Fatalf("rule %s decides, and is hidden: %s", h.Name, h.Problem)
			}
		}
	})
}

func TestARegularExpressionInPlaceOfAGlobIsAnError(t *testing.T) {
	for pattern, part := range map[string]string{
		".*train.*": ".*", "^python": "^", "python$": "$", "train|serve": "n|s", `rank\d+`: `\d`, "[0-9]+": "]+", "x.+": ".+",
		"(?i)train": "(?", `train\.py`: `\.`, "train.{py,sh}": "{py,sh}",
	} {
		_, err := classify.New([]classify.Rule{{Name: "a", Match: classify.Match{Cmdline: pattern}}}, nil)
		want := fmt.Sprintf("cmdline: %q: %q is of a regular expression, or of a shell", pattern, part)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", pattern, err, want)
		}
	}
	for _, pattern := range []string{
		"python3.*", "*train.py*", "a^b", "$x", "sh -c * | tee *", `*--json {"a": 1, "b": 2}*`, "c++*", "[.]*", "*[$]", "*[|]*", "*.*", "[^a]b",
	} {
		if _, err := classify.New([]classify.Rule{{Name: "a", Match: classify.Match{Cmdline: pattern}}}, nil); err != nil {
			t.Error(err)
		}
	}
	if _, err := classify.New([]classify.Rule{{Name: "a", Match: classify.Match{Unit: `dev-disk-by\x2dlabel.mount`}}}, nil); err != nil {
		t.Error(err)
	}
}

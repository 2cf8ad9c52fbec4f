package conformance

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestScriptsAreRead(t *testing.T) {
	got, err := parseTable("x.txt", `
# about nothing
expect one   # more
when gpu !mes
A open
A.1 suspend T ids=1,2 -> mes,6.12: EPERM | 2 ids=1,2
`)
	if err != nil {
		t.Fatal(err)
	}
	want := []expectation{{
		name: "one", when: []string{"gpu", "!mes"},
		steps: []step{
			{where: "x.txt:5", text: "A open", actor: "A", verb: "open", values: map[string]string{}},
			{
				where: "x.txt:6", text: "A.1 suspend T ids=1,2 -> mes,6.12: EPERM | 2 ids=1,2",
				actor: "A.1", verb: "suspend", args: []string{"T"}, values: map[string]string{"ids": "1,2"},
				answers: []answer{
					{when: []string{"mes", "6.12"}, result: "EPERM", values: map[string]string{}},
					{result: "2", values: map[string]string{"ids": "1,2"}},
				},
			},
		},
	}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(expectation{}, step{}, answer{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for text, why := range map[string]string{
		"A open":                    "before the first",
		"expect":                    "want expect NAME",
		"expect one two":            "want expect NAME",
		"expect one\nA":             "an actor and a verb",
		"expect one\nA open":        "expectation one is empty",
		"expect one\nA open ->":     "no answer",
		"expect one\nA open -> 0 x": "NAME=VALUE",
	} {
		if _, err := parseTable("x.txt", text); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%q: %v, want %q", text, err, why)
		}
	}
}

func FuzzParseTable(f *testing.F) {
	f.Add("expect one\nwhen gpu !mes\nA open -> mes: EPERM | 0 x=1\n")
	f.Add("expect one\nA.1 x=y -> |\n# c\n")
	f.Fuzz(func(t *testing.T, text string) {
		table, err := parseTable("x", text)
		if err != nil && table != nil {
			t.Errorf("both %+v and %v", table, err)
		}
	})
}

func TestHostsWithGPUsAreNotAskedForWhatHarmsOrCannotBeSeen(t *testing.T) {
	all, err := parseTable("x.txt", `
expect plain
D attach T -> 0
expect harm
D attach T -> 0
B attach T -> EALREADY
expect cycles
g0 cycles -> 1
expect peer
T queue 0 -> 1
expect pair
when queues two-gpus
D attach T -> 0
`)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, e := range all {
		got[e.name] = e.cannotRun(8) == ""
	}
	want := map[string]bool{"plain": true, "harm": false, "cycles": false, "peer": false, "pair": false}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("played (-want +got):\n%s", diff)
	}
}

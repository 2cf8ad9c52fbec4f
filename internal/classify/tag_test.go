package classify_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestTagsDecideWhereNoRuleMatches(t *testing.T) {
	type env map[string]string
	none := classify.Decision{Class: gpreempt.Unmanaged, Priority: 7, By: "default"}
	tag := func(class gpreempt.Class, p gpreempt.Priority) classify.Decision {
		return classify.Decision{Class: class, Priority: p, By: "tag"}
	}
	tests := []struct {
		name   string
		env    env
		want   classify.Decision
		detail string
	}{
		{"none", nil, none, "neither GPREEMPT_CLASS nor AMD_QUEUE_TAG is set"},
		{"other variables", env{"HOME": "/root"}, none, "neither GPREEMPT_CLASS nor AMD_QUEUE_TAG is set"},
		{"class", env{"GPREEMPT_CLASS": "offline"}, tag(gpreempt.Offline, 0), `GPREEMPT_CLASS is "offline"`},
		{"class in capitals", env{"GPREEMPT_CLASS": "ONLINE"}, tag(gpreempt.Online, 11), `GPREEMPT_CLASS is "ONLINE"`},
		{"unmanaged is a class", env{"GPREEMPT_CLASS": "Unmanaged"}, tag(gpreempt.Unmanaged, 7), `GPREEMPT_CLASS is "Unmanaged"`},
		{
			"class and priority",
			env{"GPREEMPT_CLASS": "offline", "GPREEMPT_PRIORITY": "15"},
			tag(gpreempt.Offline, 15),
			`GPREEMPT_CLASS is "offline"; GPREEMPT_PRIORITY is 15`,
		},
		{
			"a priority too high",
			env{"GPREEMPT_CLASS": "offline", "GPREEMPT_PRIORITY": "16"},
			tag(gpreempt.Offline, 0),
			`GPREEMPT_CLASS is "offline"; GPREEMPT_PRIORITY "16" is not 0 to 15 and does not count`,
		},
		{
			"a priority below nothing",
			env{"GPREEMPT_CLASS": "online", "GPREEMPT_PRIORITY": "-1"},
			tag(gpreempt.Online, 11),
			`GPREEMPT_CLASS is "online"; GPREEMPT_PRIORITY "-1" is not 0 to 15 and does not count`,
		},
		{
			"an empty priority",
			env{"GPREEMPT_CLASS": "online", "GPREEMPT_PRIORITY": ""},
			tag(gpreempt.Online, 11),
			`GPREEMPT_CLASS is "online"; GPREEMPT_PRIORITY "" is not 0 to 15 and does not count`,
		},
		{"a priority alone", env{"GPREEMPT_PRIORITY": "3"}, none, "GPREEMPT_PRIORITY has no effect without GPREEMPT_CLASS"},
		{
			"no class",
			env{"GPREEMPT_CLASS": "batch\n"},
			none,
			`GPREEMPT_CLASS "batch\n" is not online, offline or unmanaged and does not count`,
		},
		{"queue tag", env{"AMD_QUEUE_TAG": "ONLINE_AI"}, tag(gpreempt.Online, 11), `AMD_QUEUE_TAG is "ONLINE_AI"`},
		{
			"queue tag and priority",
			env{"AMD_QUEUE_TAG": "offline_ai", "AMD_QUEUE_PRIORITY": "2"},
			tag(gpreempt.Offline, 2),
			`AMD_QUEUE_TAG is "offline_ai"; AMD_QUEUE_PRIORITY is 2`,
		},
		{
			"another queue tag",
			env{"AMD_QUEUE_TAG": "MY_ONLINE"},
			none,
			`AMD_QUEUE_TAG "MY_ONLINE" begins with neither ONLINE nor OFFLINE and does not count`,
		},
		{"queue priority alone", env{"AMD_QUEUE_PRIORITY": "15"}, none, "AMD_QUEUE_PRIORITY has no effect without AMD_QUEUE_TAG"},
		{
			"class before queue tag",
			env{"GPREEMPT_CLASS": "offline", "AMD_QUEUE_TAG": "ONLINE", "AMD_QUEUE_PRIORITY": "15"},
			tag(gpreempt.Offline, 0), `GPREEMPT_CLASS is "offline"`,
		},
		{
			"queue tag where the class cannot be read",
			env{"GPREEMPT_CLASS": "batch", "GPREEMPT_PRIORITY": "9", "AMD_QUEUE_TAG": "OFFLINE"},
			tag(gpreempt.Offline, 0),
			`GPREEMPT_CLASS "batch" is not online, offline or unmanaged and does not count; AMD_QUEUE_TAG is "OFFLINE"`,
		},
		{
			"a priority of the other kind",
			env{"GPREEMPT_PRIORITY": "9", "AMD_QUEUE_TAG": "OFFLINE"},
			tag(gpreempt.Offline, 0),
			`GPREEMPT_PRIORITY has no effect without GPREEMPT_CLASS; AMD_QUEUE_TAG is "OFFLINE"`,
		},
	}
	c := compile(t, classify.Rule{Name: "r", Match: classify.Match{Comm: "ruled"}, Class: gpreempt.Online})
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := &classify.Subject{Process: gpreempt.Process{Comm: "x", Env: test.env}}
			if diff := cmp.Diff(test.want, c.Decide(s)); diff != "" {
				t.Errorf("decision (-want +got):\n%s", diff)
			}
			step := classify.Step{By: "tag", Detail: test.detail}
			if test.want != none {
				step = classify.Step{
					By: "tag", Class: test.want.Class, Priority: test.want.Priority, Matches: true, Decides: true, Detail: test.detail,
				}
			}
			if diff := cmp.Diff(step, c.Explain(s, nil)[2]); diff != "" {
				t.Errorf("step (-want +got):\n%s", diff)
			}
			s.Comm = "ruled"
			if got := c.Decide(s).By; got != "rule r" {
				t.Errorf("by %q where a rule matches", got)
			}
		})
	}
}

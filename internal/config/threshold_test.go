package config

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// It comes after the rules of the file, and is opt-in: a priority that is not known makes no process offline.
func TestThresholdOfTheEnvironmentClassifiesByKnownPriority(t *testing.T) {
	base := parsed(t, "rules: [{name: never, match: {comm: server}, class: unmanaged}]\n")
	c, err := base.WithThreshold("10")
	if err != nil {
		t.Fatal(err)
	}
	classifier, err := classify.New(c.Rules, nil)
	if err != nil {
		t.Fatal(err)
	}
	process := func(comm string, priorities ...int) *classify.Subject {
		s := &classify.Subject{Process: gpreempt.Process{Comm: comm}}
		for _, p := range priorities { // negative: not known
			s.Queues = append(s.Queues, gpreempt.QueueEntry{
				Queue: gpreempt.Queue{Type: gpreempt.QueueCompute, RingBytes: 1 << 20},
				Info:  gpreempt.QueueInfo{Priority: gpreempt.Priority(max(0, p)), PriorityKnown: p >= 0},
			})
		}
		return s
	}
	type decision struct {
		Class gpreempt.Class
		By    string
	}
	const offline, online = "rule below " + ThresholdVariable, "rule " + ThresholdVariable + " or more"
	for _, tc := range []struct {
		of   *classify.Subject
		want decision
	}{
		{process("train", 7), decision{gpreempt.Offline, offline}},
		{process("train", 0, 9), decision{gpreempt.Offline, offline}},
		{process("train", 7, 10), decision{gpreempt.Online, online}},
		{process("train"), decision{gpreempt.Unmanaged, classify.ByDefault}},
		{process("train", 7, -1), decision{gpreempt.Unmanaged, classify.ByDefault}},
		{process("server", 7), decision{gpreempt.Unmanaged, "rule never"}},
	} {
		d := classifier.Decide(tc.of)
		if diff := cmp.Diff(tc.want, decision{d.Class, d.By}); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", tc.of.Queues, diff)
		}
	}
	if same, err := base.WithThreshold(""); err != nil || !cmp.Equal(base, same) {
		t.Errorf("without the variable: %v", err)
	}
	for _, text := range []string{"0", "16", "-1", "ten", "10 "} {
		want := `GPREEMPT_PRIORITY_THRESHOLD in the environment of gpreemptd: "` + text + `" is not a threshold: write 1 to 15, or remove the variable`
		if _, err := base.WithThreshold(text); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

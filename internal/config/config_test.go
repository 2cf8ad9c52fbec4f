package config

import (
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestDefaultIsValid(t *testing.T) {
	if err := Default().problems(); err != nil {
		t.Error(err)
	}
}

func TestDefaultFileHasEveryValue(t *testing.T) {
	if diff := cmp.Diff(Default(), parsed(t, string(DefaultYAML()))); diff != "" {
		t.Errorf("Parse(DefaultYAML()) (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(Default(), parsed(t, "")); diff != "" {
		t.Errorf("an empty file (-want +got):\n%s", diff)
	}
	for _, key := range values(new(Default())) { // a comment shows the preset's value
		if !strings.Contains(string(DefaultYAML()), key.Name[strings.LastIndex(key.Name, ".")+1:]+": "+text(key)) {
			t.Errorf("%s is not %s", key.Name, text(key))
		}
	}
}

// values returns the keys that are no list of rules or rows.
func values(c *Config) []yamlfile.Key {
	return slices.DeleteFunc(yamlfile.Keys(c), func(key yamlfile.Key) bool {
		t := key.Value.Type()
		return t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct
	})
}

// The lines that the default file has as comments must be valid too.
func TestCommentedKeysOfTheDefaultFileShowTheDefaults(t *testing.T) {
	all := regexp.MustCompile(`(?m)^( *)#(\S| )`).ReplaceAllStringFunc(string(DefaultYAML()), func(s string) string {
		if strings.HasSuffix(s, "# ") {
			return s // text
		}
		return strings.Replace(s, "#", "", 1)
	})
	all = regexp.MustCompile(`(?m)^#(  )`).ReplaceAllString(all, "$1")
	want := Default()
	want.Rules = []classify.Rule{
		{Name: "training", Match: classify.Match{Cmdline: "*train.py*", Cgroup: "/slurm/*"}, Class: gpreempt.Offline, Priority: new(gpreempt.Priority(0))},
		{Name: "inference", Match: classify.Match{UID: new(uint32(990))}, Class: gpreempt.Online},
		{
			Name: "batch-pods",
			Match: classify.Match{Pod: classify.PodMatch{
				Namespace: "batch-*", Labels: map[string]string{"app.kubernetes.io/component": "train*"},
			}},
			Class: gpreempt.Offline,
		},
		{
			Name: "low-priority-streams", Match: classify.Match{QueuePriority: &classify.PriorityRange{Min: 0, Max: 6}},
			Class: gpreempt.Offline,
		},
	}
	want.Safety.Hazards = []safety.Row{{
		ID: "site-gfx1102", GFX: []safety.GFXRange{"gfx1102"},
		Kernel: ">=7.1", MES: ">=0x60",
		Mechanisms: []string{"dbgtrap", "criu"}, Action: safety.Limit,
		Why: "No failure in a week of suspensions under load.",
	}}
	if diff := cmp.Diff(want, parsed(t, all)); diff != "" {
		t.Errorf("uncommented (-want +got):\n%s\n%s", diff, all)
	}
}

// docs returns the comment above each key of the default file.
func docs(t *testing.T) map[string]string {
	t.Helper()
	docs := map[string]string{}
	var in, doc string
	for line := range strings.Lines(string(DefaultYAML())) {
		text, comment := strings.CutPrefix(strings.TrimSpace(line), "# ")
		name, value, isKey := strings.Cut(strings.TrimPrefix(text, "#"), ":")
		switch {
		case comment:
			doc += text + " "
		case !isKey:
			doc = ""
		case !strings.HasPrefix(line, " ") && value == "":
			in, doc = name+".", ""
		default:
			if !strings.HasPrefix(line, " ") {
				in = ""
			}
			docs[in+name], doc = strings.TrimSpace(doc), ""
		}
	}
	return docs
}

func TestDefaultFileExplainsEveryKey(t *testing.T) {
	docs := docs(t)
	for _, key := range values(new(Default())) {
		doc := docs[key.Name]
		if doc == "" {
			t.Errorf("%s has no comment above it", key.Name)
		}
		if says := strings.Contains(doc, "Needs a restart."); says == live(key) {
			t.Errorf("%s: %q, but live is %t", key.Name, doc, live(key))
		}
		if bounds := strings.Replace(key.Tag.Get("range"), " ", " to ", 1); !strings.Contains(doc, bounds) {
			t.Errorf("%s: %q does not contain %s", key.Name, doc, bounds)
		}
	}
	for i, line := range strings.Split(string(DefaultYAML()), "\n") {
		if len(line) > 100 {
			t.Errorf("line %d is %d bytes long", i+1, len(line))
		}
	}
}

// The scheduler has the ranges of the policy. Both documented bounds must be accepted, and
// a value beyond them must not.
func TestDocumentedRangesOfThePolicyAreTrue(t *testing.T) {
	bounds := regexp.MustCompile(`([0-9][0-9.]*(?:ms|s|m)?) to ([0-9][0-9.]*(?:ms|s|m)?)\.`)
	checked, docs := 0, docs(t)
	for _, key := range yamlfile.Keys(new(Config)) {
		m := bounds.FindStringSubmatch(docs[key.Name])
		name, isPolicy := strings.CutPrefix(key.Name, "policy.")
		if !isPolicy || m == nil {
			continue
		}
		checked++
		for _, end := range m[1:] {
			text := "policy: {" + name + ": " + end + "}"
			if _, err := Parse("f", []byte(text)); err != nil {
				t.Errorf("%s: %v", text, err)
			}
		}
		beyond := "0.96"
		if d, err := time.ParseDuration(m[2]); err == nil {
			beyond = (d + time.Nanosecond).String()
		}
		if text := "policy: {" + name + ": " + beyond + "}"; !refused(text) {
			t.Errorf("%s was accepted", text)
		}
	}
	if checked < 4 {
		t.Errorf("found %d ranges in the documentation of the policy, want at least 4", checked)
	}
}

func refused(text string) bool {
	_, err := Parse("f", []byte(text))
	return err != nil
}

func TestChangesNameTheKeysThatNeedARestart(t *testing.T) {
	old := parsed(t, `
rules:
  - {name: a, match: {comm: a}, class: offline}
  - {name: b, match: {comm: b}, class: offline, priority: 2}
  - {name: c, match: {comm: c}, class: online}
jobs:
  - {name: own, by: [env.GPREEMPT_JOB]}
  - {name: container, by: [container.id]}
safety:
  hazards:
    - {id: one, gfx: [gfx1100], action: deny, why: W.}
    - {id: two, gfx: [gfx1101], action: deny, why: W.}
    - {id: old, gfx: [gfx1102], action: deny, why: W.}
`)
	changed := parsed(t, `
socket: /run/x.sock
mechanisms: [criu, dbgtrap]
access: {admin_groups: [wheel, 0]}
limits: {leases_per_user: 9}
policy: {preset: shadow, max_wait: 5ms}
discovery: {debugfs: false}
rules:
  - {name: d, match: {cgroup: "/batch/*", uid: 7, pod: {labels: {app: "x*"}}, queue_priority: {max: 6}}, class: offline}
  - {name: c, match: {comm: c}, class: online}
  - {name: b, match: {comm: b}, class: offline, priority: 3}
jobs:
  - {name: container, by: [unit, container.id]}
  - {name: site, cgroup: "/batch/*"}
safety:
  hazards:
    - {id: two, gfx: [gfx1101], action: deny, why: W.}
    - {id: one, gfx: [gfx1100], action: limit, why: W.}
    - {id: new, gfx: [gfx1103], action: allow, why: W.}
`)
	want := []Change{
		{Key: "socket", From: "/run/gpreempt/gpreemptd.sock", To: "/run/x.sock"},
		{Key: "mechanisms", From: "[dbgtrap]", To: "[criu, dbgtrap]"},
		{Key: "access.admin_groups", From: "[gpreempt-admin]", To: "[wheel, 0]", Live: true},
		{Key: "limits.leases_per_user", From: "1024", To: "9", Live: true},
		{Key: "policy.preset", From: "balanced", To: "custom", Live: true},
		{Key: "policy.max_wait", From: "20ms", To: "5ms", Live: true},
		{Key: "rules", From: "a, b", To: "d, b", Live: true},
		{Key: "jobs", From: "own, container", To: "container, site", Live: true},
		{Key: "safety.hazards", From: "one, old", To: "one, new", Live: true},
		{Key: "discovery.debugfs", From: "true", To: "false", Live: true},
	}
	if diff := cmp.Diff(want, Changes(old, changed)); diff != "" {
		t.Errorf("Changes (-want +got):\n%s", diff)
	}
	if got := Changes(old, old); got != nil {
		t.Errorf("Changes of equal configurations: %v", got)
	}
	reversed := changed
	reversed.Rules = slices.Clone(changed.Rules)
	slices.Reverse(reversed.Rules)
	if diff := cmp.Diff([]Change{{Key: "rules", From: "d, c, b", To: "b, c, d", Live: true}}, Changes(changed, reversed)); diff != "" {
		t.Errorf("Changes of the order (-want +got):\n%s", diff)
	}
}

// The rates follow the processors of the daemon, up to eight, unless the file has them.
func TestDefaultRatesFollowTheProcessors(t *testing.T) {
	for processors, want := range map[int]server.Limits{
		1:  {RequestsPerSecond: 500, Burst: 1000, RequestsPerUser: 1000},
		2:  {RequestsPerSecond: 1000, Burst: 2000, RequestsPerUser: 2000},
		96: {RequestsPerSecond: 2000, Burst: 4000, RequestsPerUser: 8000},
	} {
		if diff := cmp.Diff(want, Limits{}.Rates(processors)); diff != "" {
			t.Errorf("%d processors (-want +got):\n%s", processors, diff)
		}
	}
	own := Limits{Clients: server.Limits{RequestsPerUser: 9, ConnectionsTotal: 10}}
	want := server.Limits{RequestsPerSecond: 4, Burst: 8, RequestsPerUser: 9, ConnectionsTotal: 10}
	if diff := cmp.Diff(want, own.Rates(1)); diff != "" {
		t.Errorf("of the file (-want +got):\n%s", diff)
	}
}

func TestAProcessHasHalfOfTheLeasesOfItsUser(t *testing.T) {
	for text, want := range map[string]int{"": 512, "limits: {leases_per_user: 100}": 50, "limits: {leases_per_user: 3}": 2, "limits: {leases_per_user: 1}": 1} {
		if got := parsed(t, text).Limits.Leases.LeasesPerClient; got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}

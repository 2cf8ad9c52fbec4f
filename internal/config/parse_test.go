package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func parsed(t *testing.T, text string) Config {
	t.Helper()
	c, err := Parse("gpreemptd.yaml", []byte(text))
	if err != nil {
		t.Fatalf("Parse:\n%v", err)
	}
	c.Places = nil
	return c
}

func TestFilesWithoutContentHaveTheDefaults(t *testing.T) {
	for name, text := range map[string]string{
		"empty":              "",
		"comments":           "# nothing\n",
		"start of document":  "---\n",
		"null":               "~\n",
		"empty mapping":      "{}\n",
		"commented sections": "policy:\n  # preset: strict\nlimits:\nrules:\nsafety:\n",
		"no hazards":         "safety:\n  hazards:\n",
	} {
		if diff := cmp.Diff(Default(), parsed(t, text)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestEveryKeyIsRead(t *testing.T) {
	got := parsed(t, `
socket: /tmp/x.sock
mechanisms: [criu, freezer, dbgtrap]
access:
  online_groups: [serving, 1001]
  admin_groups: []
  admin_users: ["0"]
limits:
  leases_per_user: 2
  requests_per_user: 6
hqd_budget: 70
policy:
  share_floor: 0.25
  share_cap: 0.75
  preset: strict
  linger: 7ms
  max_suspend: 3s
  attach_after: 45s
  max_wait: 0
rules:
  - name: train
    match: {comm: "python*", cmdline: "*train.py*", cgroup: "/slurm/*", uid: 1000}
    class: offline
    priority: 3
  - name: rest
    match: {uid: 0}
    class: online
  - name: all
    match:
      exe: "/opt/*"
      gid: 44
      unit: train.service
      user_unit: own.service
      slice: "batch-*.slice"
      env: {RANK: "0", "my.var": "*"}
      container:
        id: "3f2a*"
        name: trainer
        image: "rocm/pytorch:*"
        runtime: podman
        labels: {tier: "batch"}
      pod:
        namespace: research
        name: "train-*"
        labels:
          app.kubernetes.io/name: llm
          job: "*"
      slurm: {partition: "batch*", account: physics, qos: low}
      gpu: [51110, node:1, 0000:03:00.0, "c1:00.0", renderD128]
      queue_priority: {min: 1, max: 6}
      ring_address: {from: 0x7F0000000000, to: 140000000000000}
    class: unmanaged
jobs:
  - name: slurm
    cgroup: "*/job_*"
    by: [env.SLURM_STEP_ID, pod.labels.example.org/run]
  - {name: unit, by: [unit]}
safety:
  hazards:
    - id: ours
      gfx: [gfx90a]
      driver: dkms
      mechanisms: [criu]
      action: deny
      why: It hung.
discovery: {debugfs: false}
log: {level: debug}
`)
	want := Config{
		Socket:     "/tmp/x.sock",
		Mechanisms: []string{"criu", "freezer", "dbgtrap"},
		Access:     auth.Names{OnlineGroups: []string{"serving", "1001"}, AdminUsers: []string{"0"}},
		Limits: Limits{
			Leases:          scheduler.Limits{LeasesPerClient: 1, LeasesPerUser: 2, LeasesTotal: 4096},
			Clients:         server.Limits{RequestsPerUser: 6, ConnectionsPerUser: 256, ConnectionsTotal: 1024},
			MaxMessageBytes: 64 << 10,
		},
		Policy: scheduler.Policy{
			Preset: "custom", Linger: 7 * time.Millisecond, ShareFloor: 0.25, ShareCap: 0.75, ShareWindow: 20 * time.Second, MaxSuspend: 3 * time.Second,
			MinRun: 50 * time.Millisecond, AttachAfter: 45 * time.Second, DefaultTTL: time.Second, MaxTTL: time.Minute,
		},
		HQDBudget: 70,
		Rules: []classify.Rule{
			{
				Name:  "train",
				Match: classify.Match{Comm: "python*", Cmdline: "*train.py*", Cgroup: "/slurm/*", UID: new(uint32(1000))},
				Class: gpreempt.Offline, Priority: new(gpreempt.Priority(3)),
			},
			{Name: "rest", Match: classify.Match{UID: new(uint32(0))}, Class: gpreempt.Online},
			{Name: "all", Match: classify.Match{
				Exe: "/opt/*", GID: new(uint32(44)), Unit: "train.service", UserUnit: "own.service", Slice: "batch-*.slice",
				Env: map[string]string{"RANK": "0", "my.var": "*"},
				Container: classify.ContainerMatch{
					ID: "3f2a*", Name: "trainer", Image: "rocm/pytorch:*", Runtime: "podman", Labels: map[string]string{"tier": "batch"},
				},
				Pod: classify.PodMatch{
					Namespace: "research", Name: "train-*",
					Labels: map[string]string{"app.kubernetes.io/name": "llm", "job": "*"},
				},
				Slurm:         classify.SlurmMatch{Partition: "batch*", Account: "physics", QOS: "low"},
				GPU:           []string{"51110", "node:1", "0000:03:00.0", "c1:00.0", "renderD128"},
				QueuePriority: &classify.PriorityRange{Min: 1, Max: 6},
				RingAddress:   &classify.AddressRange{From: 0x7f0000000000, To: 140000000000000},
			}},
		},
		Jobs: []classify.JobRule{
			{Name: "slurm", Cgroup: "*/job_*", By: []string{"env.SLURM_STEP_ID", "pod.labels.example.org/run"}},
			{Name: "unit", By: []string{"unit"}},
		},
		Safety: Safety{Hazards: []safety.Row{{
			ID: "ours", GFX: []safety.GFXRange{"gfx90a"}, Driver: safety.DKMS,
			Mechanisms: []string{"criu"}, Action: safety.Deny, Why: "It hung.",
		}}},
		Discovery: Discovery{Interval: 50 * time.Millisecond, IdleInterval: time.Second},
		Log:       Log{Level: "debug"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Parse (-want +got):\n%s", diff)
	}
}

func TestAnEmptyListOfMechanismsSuspendsNothing(t *testing.T) {
	c := parsed(t, "mechanisms: []\n")
	if len(c.Mechanisms) > 0 {
		t.Errorf("mechanisms: %q", c.Mechanisms)
	}
	want := []Change{{Key: "mechanisms", From: "[dbgtrap]", To: "[]"}}
	if diff := cmp.Diff(want, Changes(Default(), c)); diff != "" {
		t.Errorf("Changes (-want +got):\n%s", diff)
	}
}

func TestAPresetSetsItsKnobsWhereverItIs(t *testing.T) {
	for _, name := range scheduler.PresetNames() {
		want, err := scheduler.PresetByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, parsed(t, "policy: {preset: "+name+"}").Policy); diff != "" {
			t.Errorf("preset %s (-want +got):\n%s", name, diff)
		}
	}
	got := parsed(t, "policy: {max_wait: 5ms, preset: share}").Policy
	want, _ := scheduler.PresetByName("share")
	want.Preset, want.MaxWait = scheduler.PresetCustom, 5*time.Millisecond
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("share with a knob in front (-want +got):\n%s", diff)
	}
	// Knobs that turn one preset into another make it the other.
	if got := parsed(t, "policy: {share_floor: 0, max_suspend: 1m}").Policy.Preset; got != "strict" {
		t.Errorf("balanced with the knobs of strict is %q", got)
	}
}

func TestHostileFilesAreRefusedQuickly(t *testing.T) {
	bomb := "a: &a [x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c <= 'z'; c++ {
		item := "*" + string(c-1)
		bomb += string(c) + ": &" + string(c) + " [" + strings.Repeat(item+",", 8) + item + "]\n"
	}
	for name, text := range map[string]string{
		"alias bomb":   bomb,
		"deep nesting": strings.Repeat("[", 100_000),
		"too large":    strings.Repeat("#", yamlfile.MaxSize+1),
		"many errors":  strings.Repeat("x: 1\n", 10_000),
	} {
		_, err := Parse("f", []byte(text))
		if err == nil {
			t.Errorf("%s: accepted", name)
		} else if n := len(err.Error()); n > 20_000 {
			t.Errorf("%s: an error of %d bytes", name, n)
		}
	}
}

func TestLoadNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gpreemptd.yaml")
	if _, err := Load(path); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("a missing file: %v", err)
	}
	if err := os.WriteFile(path, []byte("log: {level: debug}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Load(path)
	if err != nil || c.Log.Level != "debug" {
		t.Errorf("Load = %+v, %v", c.Log, err)
	}
	if err := os.WriteFile(path, []byte("log: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); err == nil || !strings.HasPrefix(err.Error(), path+":1:6: log: ") {
		t.Errorf("an error: %v", err)
	}
	if _, err := Load(filepath.Dir(path)); err == nil {
		t.Error("a directory was accepted")
	}
}

// FuzzParse checks that an accepted file is valid, and that the errors of others have the
// file's name and are bounded.
func FuzzParse(f *testing.F) {
	f.Add(DefaultYAML())
	f.Add([]byte("rules: [{name: a, match: {uid: 1}, class: offline, priority: 3}]\npolicy: {preset: share, linger: 1ms}"))
	f.Add([]byte("mechanisms: [freezer]\nsafety: {hazards: [{id: a, gfx: [gfx11xx], kernel: \">=7.0\", action: allow, why: W.}]}"))
	f.Add([]byte("rules: [{name: a, class: online, match: {comm: \"[\", env: {A: x, B: 1}, pod: {labels: {a/b: \"*\"}}, container: {id: \"3f\"}}}]"))
	f.Add([]byte("rules: [{name: a, class: online, match: {gpu: [node:1, 7, x], queue_priority: {min: 9}, ring_address: {from: 0x10, to: 5}}}]"))
	f.Add([]byte("discovery: {debugfs: 0}"))
	f.Add([]byte("rules: [{name: a, class: online, match: {comm: *x}}]"))
	f.Add([]byte("jobs: [{name: a, cgroup: \"/x/job_*\", by: [env.A, unit]}, {name: a, by: [env., x, unit, unit]}, {name: b}]"))
	f.Add([]byte("a: &a [*a]\n<<: *a\n? [x]\n: 1\n--- {}\n"))
	f.Add([]byte("socket: !!binary x\nlog: 'x\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("f", data)
		if err == nil {
			if err := c.problems(); err != nil {
				t.Fatalf("accepted, but not valid: %v", err)
			}
			return
		}
		var es yamlfile.Errors
		if !errors.As(err, &es) || len(es) > yamlfile.MaxErrors+1 {
			t.Fatalf("not bounded errors: %v", err)
		}
		for _, e := range es {
			if e.File != "f" || e.Problem == "" || e.Remedy == "" {
				t.Fatalf("an incomplete error: %#v", e)
			}
		}
	})
}

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

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/hazard"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func parse(t *testing.T, text string) Config {
	t.Helper()
	c, err := Parse("gpreemptd.yaml", []byte(text))
	if err != nil {
		t.Fatalf("Parse:\n%v", err)
	}
	return c
}

func TestFilesThatSayNothingMeanTheDefaults(t *testing.T) {
	for name, text := range map[string]string{
		"empty":              "",
		"comments":           "# nothing\n",
		"start of document":  "---\n",
		"null":               "~\n",
		"empty mapping":      "{}\n",
		"commented sections": "policy:\n  # preset: strict\nlimits:\nrules:\nsafety:\n",
		"no hazards":         "safety:\n  hazards:\n",
	} {
		if diff := cmp.Diff(Default(), parse(t, text)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestEveryKeyIsRead(t *testing.T) {
	got := parse(t, `
socket: /tmp/x.sock
mechanisms: [criu, freezer, dbgtrap]
access:
  online_groups: [serving, 1001]
  admin_groups: []
  online_users: [triton]
  admin_users: ["0"]
limits:
  leases_per_client: 1
  leases_per_user: 2
  leases_total: 3
  streams_per_client: 3
  requests_per_second: 4
  burst: 5
  requests_per_user: 6
  connections_per_user: 7
  connections_total: 8
  max_message_bytes: 4096
policy:
  share_floor: 0.25
  preset: strict
  suspend_when: slack
  linger: fixed
  linger_max: 7ms
  share_window: 1m
  max_suspend: 3s
  min_run: 1.5s
  gang: job
  shadow: true
  max_wait: 0
  default_ttl: 2s
  max_ttl: 10m
rules:
  - name: train
    match: {comm: "python*", cmdline: "*train.py*", cgroup: "/slurm/*", uid: 1000}
    class: offline
    priority: 3
  - name: rest
    match: {uid: 0}
    class: Online
  - name: all
    match:
      exe: "/opt/*"
      gid: 44
      unit: train.service
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
        priority_class: low
        labels:
          app.kubernetes.io/name: llm
          job: "*"
      gpu: [51110, node:1, 0000:03:00.0, "c1:00.0", renderD128]
      queue_priority: {min: 1, max: 6}
      ring_address: {from: 0x7F0000000000, to: "140000000000000"}
    class: unmanaged
safety:
  hazards:
    - id: ours
      gfx: [gfx90a]
      driver: dkms
      mechanisms: [criu]
      action: deny
      why: It hung.
discovery: {interval: 10ms, idle_interval: 10s, mqds_interval: 0}
containers:
  sockets: [/run/user/1000/podman/podman.sock]
  kubelet: https://127.0.0.1:10250
  kubelet_token: /etc/gpreempt/token
  kubelet_ca: /var/lib/kubelet/pki/ca.crt
log: {level: debug}
`)
	want := Config{
		Socket:     "/tmp/x.sock",
		Mechanisms: Mechanisms{"criu", "freezer", "dbgtrap"},
		Access:     Access{OnlineGroups: []string{"serving", "1001"}, OnlineUsers: []string{"triton"}, AdminUsers: []string{"0"}},
		Limits: Limits{
			LeasesPerClient: 1, LeasesPerUser: 2, LeasesTotal: 3, StreamsPerClient: 3, RequestsPerSecond: 4, Burst: 5, RequestsPerUser: 6,
			ConnectionsPerUser: 7, ConnectionsTotal: 8, MaxMessageBytes: 4096,
		},
		Policy: scheduler.Policy{
			Preset: "custom", SuspendWhen: scheduler.SuspendSlack, Linger: scheduler.LingerFixed, LingerMax: 7 * time.Millisecond,
			ShareFloor: 0.25, ShareWindow: time.Minute, MaxSuspend: 3 * time.Second, MinRun: 1500 * time.Millisecond,
			Gang: scheduler.GangJob, Shadow: true, DefaultTTL: 2 * time.Second, MaxTTL: 10 * time.Minute,
		},
		Rules: []classify.Rule{
			{
				Name:  "train",
				Match: classify.Match{Comm: "python*", Cmdline: "*train.py*", Cgroup: "/slurm/*", UID: new(uint32(1000))},
				Class: gpreempt.Offline, Priority: new(gpreempt.Priority(3)),
			},
			{Name: "rest", Match: classify.Match{UID: new(uint32(0))}, Class: gpreempt.Online},
			{Name: "all", Match: classify.Match{
				Exe: "/opt/*", GID: new(uint32(44)), Unit: "train.service", Slice: "batch-*.slice",
				Env: map[string]string{"RANK": "0", "my.var": "*"},
				Container: classify.ContainerMatch{
					ID: "3f2a*", Name: "trainer", Image: "rocm/pytorch:*", Runtime: "podman", Labels: map[string]string{"tier": "batch"},
				},
				Pod: classify.PodMatch{
					Namespace: "research", Name: "train-*", PriorityClass: "low",
					Labels: map[string]string{"app.kubernetes.io/name": "llm", "job": "*"},
				},
				GPU:           []string{"51110", "node:1", "0000:03:00.0", "c1:00.0", "renderD128"},
				QueuePriority: &classify.PriorityRange{Min: 1, Max: 6},
				RingAddress:   &classify.AddressRange{From: 0x7f0000000000, To: 140000000000000},
			}},
		},
		Safety: Safety{Hazards: []hazard.Row{{
			ID: "ours", GFX: []hazard.GFXRange{{First: 90010, Last: 90010}}, Driver: hazard.DKMS,
			Mechanisms: []string{"criu"}, Action: hazard.Deny, Why: "It hung.",
		}}},
		Discovery: Discovery{Interval: 10 * time.Millisecond, IdleInterval: 10 * time.Second},
		Containers: Containers{
			Sockets: []string{"/run/user/1000/podman/podman.sock"}, Kubelet: "https://127.0.0.1:10250",
			KubeletToken: "/etc/gpreempt/token", KubeletCA: "/var/lib/kubelet/pki/ca.crt",
		},
		Log: Log{Level: "debug"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Parse (-want +got):\n%s", diff)
	}
}

func TestAnEmptyListOfMechanismsSuspendsNothing(t *testing.T) {
	c := parse(t, "mechanisms: []\n")
	if len(c.Mechanisms) > 0 {
		t.Errorf("mechanisms: %q", c.Mechanisms)
	}
	want := []Change{{Key: "mechanisms", From: "[dbgtrap]", To: "[]"}}
	if diff := cmp.Diff(want, Changes(Default(), c)); diff != "" {
		t.Errorf("Changes (-want +got):\n%s", diff)
	}
}

// Empty is not nil: what is asked then is told apart from the default.
func TestAnEmptyListOfSocketsAsksNoRuntime(t *testing.T) {
	if diff := cmp.Diff(Containers{Sockets: []string{}}, parse(t, "containers: {sockets: []}\n").Containers); diff != "" {
		t.Errorf("Containers (-want +got):\n%s", diff)
	}
}

func TestTheIdleIntervalFollowsALongerInterval(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"discovery: {interval: 100ms}":                    time.Second,
		"discovery: {interval: 5s}":                       5 * time.Second,
		"discovery: {interval: 100ms, idle_interval: 1m}": time.Minute,
	} {
		if got := parse(t, text).Discovery.IdleInterval; got != want {
			t.Errorf("%s: %v, want %v", text, got, want)
		}
	}
}

func TestAPresetBringsItsKnobsWhereverItStands(t *testing.T) {
	for _, name := range scheduler.PresetNames() {
		want, err := scheduler.PresetByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, parse(t, "policy: {preset: "+name+"}").Policy); diff != "" {
			t.Errorf("preset %s (-want +got):\n%s", name, diff)
		}
	}
	got := parse(t, "policy: {max_wait: 5ms, preset: share}").Policy
	want, _ := scheduler.PresetByName("share")
	want.Preset, want.MaxWait = scheduler.PresetCustom, 5*time.Millisecond
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("share with a knob in front (-want +got):\n%s", diff)
	}
	// Knobs that turn one preset into another make it the other.
	if got := parse(t, "policy: {shadow: true}").Policy.Preset; got != "shadow" {
		t.Errorf("balanced with shadow: true is %q, want shadow", got)
	}
}

func TestMistakesAreToldWithPlaceAndRemedy(t *testing.T) {
	tests := []mistakes{
		{
			"out of range", "policy:\n  share_floor: 1.5\n",
			[]string{"2:16: policy.share_floor: 1.5 is outside 0 to 0.95: remove it to have the preset's value"},
		},
		{
			"all of them, in order", "log: {level: loud}\npolicy:\n  max_wait: 1h\n  min_run: 0s\nsocket: run/x\n",
			[]string{
				`1:14: log.level: "loud" is no level: write debug, info, warn or error`,
				"3:13: policy.max_wait: 1h0m0s is outside 0s to 10s: remove it to have the preset's value",
				"4:12: policy.min_run: 0s is outside 1ms to 1m0s: remove it to have the preset's value",
				`5:9: socket: "run/x" is not a clean absolute path: write it from / on, without // or ..`,
			},
		},
		{
			"knob against knob", "policy:\n  max_ttl: 500ms\n",
			[]string{"2:3: policy.default_ttl: 1s is outside 1ms to 500ms: default_ttl may be at most max_ttl"},
		},
		{"misspelt key", "polcy: {}\n", []string{"1:1: polcy: unknown key: did you mean policy?"}},
		{"misspelt knob", "policy:\n  share_flor: 0.1\n", []string{"2:3: policy.share_flor: unknown key: did you mean share_floor?"}},
		{"misplaced key", "share_floor: 0.1\n", []string{"1:1: share_floor: unknown key: it belongs under policy:"}},
		{"top key in a section", "log: {socket: /x}\n", []string{"1:7: log.socket: unknown key: it belongs at the top of the file"}},
		{
			"foreign key", "log: {colour: red}\n",
			[]string{"1:7: log.colour: unknown key: the keys here are level"},
		},
		{"given twice", "log: {level: info}\n\nlog: {level: warn}\n", []string{"3:1: log: is given twice, first on line 1: keep one of them"}},
		{
			"no unit", "discovery: {interval: 250}\n",
			[]string{"1:23: discovery.interval: 250 has no unit: write a number with its unit, such as 20ms, 1.5s or 1m"},
		},
		{
			"no duration", "discovery: {interval: soon}\n",
			[]string{`1:23: discovery.interval: "soon" is not a duration: write a number with its unit, such as 20ms, 1.5s or 1m`},
		},
		{
			"section is a list", "limits: [1]\n",
			[]string{"1:9: limits: is a list: write keys and values, one `key: value` a line"},
		},
		{"file is a list", "- 1\n", []string{"1:1: is a list: write keys and values, one `key: value` a line"}},
		{
			"number for a list", "access: {admin_groups: 7}\n",
			[]string{"1:24: access.admin_groups: is the number 7: write a list such as [gpreempt, 1001], [] for nobody, or remove the key to have the default"},
		},
		{
			"nothing for a list that has a default", "access:\n  admin_groups:\n",
			[]string{"2:16: access.admin_groups: has no value: write a list such as [gpreempt, 1001], [] for nobody, or remove the key to have the default"},
		},
		{
			"id too large", "access: {admin_users: [99999999999]}\n",
			[]string{"1:23: access.admin_users: 99999999999 is too large for an id: write a name as in /etc/passwd or /etc/group, or a decimal id"},
		},
		{
			"text for a number", "limits: {burst: many}\n",
			[]string{`1:17: limits.burst: is the text "many": write a whole number`},
		},
		{
			"hexadecimal", "limits: {burst: 0x10}\n",
			[]string{"1:17: limits.burst: 0x10 is not written in plain decimal digits: write a whole number"},
		},
		{
			"int out of range", "limits: {burst: 0}\n",
			[]string{"1:17: limits.burst: 0 is outside 1 to 1000000: choose a number in that range"},
		},
		{
			"client limit above the total", "limits: {leases_per_client: 9, leases_total: 8}\n",
			[]string{"1:29: limits.leases_per_client: 9 is more than leases_total, 8: lower it or raise leases_total"},
		},
		{
			"yes for true", "policy: {shadow: yes}\n",
			[]string{`1:18: policy.shadow: is the text "yes": write true or false`},
		},
		{"no number", "policy: {share_floor: .nan}\n", []string{"1:23: policy.share_floor: .nan is not a number a policy can use: write a number such as 0.25"}},
		{"no value", "socket:\n", []string{"1:8: socket: has no value: give one, or remove the key to have the default"}},
		{
			"unknown word", "policy: {linger: forever}\n",
			[]string{`1:18: policy.linger: "forever" is not known here: write none, fixed or adaptive`},
		},
		{"unknown preset", "policy: {preset: stricd}\n", []string{`1:18: policy.preset: "stricd" is no preset: did you mean strict?`}},
		{
			"custom is no preset", "policy: {preset: custom}\n",
			[]string{`1:18: policy.preset: "custom" is no preset: name the preset to begin from, then the knobs that differ; choose one of balanced, strict, slo, share, shadow`},
		},
		{
			"rules", "rules:\n  - match: {comm: a}\n    class: batch\n  - name: x\n    match: {comm: 7}\n  - name: x\n    class: offline\n    priority: 16\n  - 5\n",
			[]string{
				"2:5: rules[0].name: is missing: give the rule a name of its own",
				`3:12: rules[0].class: "batch" is not known here: write unmanaged, online or offline`,
				"4:5: rules[1].class: is missing: say online, offline or unmanaged",
				`5:19: rules[1].match.comm: is the number 7: put it in quotes: "7"`,
				`6:5: rules[2].match: is empty, which would match every process: give comm, cmdline, exe or another field; comm: "*" if every process is meant`,
				`6:11: rules[2].name: "x" is the name of rules[1] too: give each rule a name of its own`,
				"8:15: rules[2].priority: 16 is outside 0 to 15: write a whole number from 0 to 15",
				"9:5: rules[3]: is the number 5: write keys and values, one `key: value` a line",
			},
		},
		{
			"unknown mechanisms", "mechanisms: [dbgtrap, freeser, gdb, dbgtrap]\n",
			[]string{
				`1:23: mechanisms[1]: "freeser" is no mechanism: did you mean freezer?`,
				`1:32: mechanisms[2]: "gdb" is no mechanism: choose from dbgtrap, criu, freezer`,
				"1:37: mechanisms[3]: dbgtrap is given twice: keep the one where it belongs: the first that works is taken",
			},
		},
		{
			"one mechanism without a list", "mechanisms: dbgtrap\n",
			[]string{`1:13: mechanisms: is the text "dbgtrap": write a list such as [dbgtrap, freezer], [] to suspend nothing, or remove the key to have the default`},
		},
		{
			"a number for a mechanism", "mechanisms: [1.5]\n",
			[]string{"1:14: mechanisms: an item is the number 1.5: write a name"},
		},
		{
			"hazards", "safety:\n  hazards:\n    - id: a\n      gfx: [navi]\n      why: W.\n    - 5\nlog: {level: loud}\n",
			[]string{
				"3:7: safety.hazards[0].action: is missing: say allow, limit or deny",
				`4:13: safety.hazards[0].gfx: "navi" is not the name of a GPU architecture: write names such as gfx942, families such as gfx11xx, spans such as gfx1100-gfx1103, or gfx*`,
				`6:7: safety.hazards[1]: is "5": write keys and values, one ` + "`key: value` a line",
				`7:14: log.level: "loud" is no level: write debug, info, warn or error`,
			},
		},
		{
			"misplaced hazards", "hazards: []\nsafety: {rules: []}\n",
			[]string{
				"1:1: hazards: unknown key: it belongs under safety:",
				"2:10: safety.rules: unknown key: it belongs at the top of the file",
			},
		},
		{
			"globs", "rules:\n  - name: a\n    match: {comm: \"[\", cgroup: slurm}\n    class: offline\n",
			[]string{
				`3:19: rules[0].match.comm: "[": the [ at character 1 is not closed: add the ], or write [[] for the character itself`,
				`3:32: rules[0].match.cgroup: "slurm": it matches no path, as they begin with /: begin it with / or *`,
			},
		},
		{
			"discovery", "discovery: {interval: 5ms, idle_interval: 2m, mqds_interval: 50ms}\n",
			[]string{
				"1:23: discovery.interval: 5ms is outside 10ms to 10s: choose a duration in that range; 50ms suits most hosts",
				"1:43: discovery.idle_interval: 2m is outside 10ms to 1m: choose a duration in that range, which begins with interval, or remove the key",
				"1:62: discovery.mqds_interval: 50ms is outside 100ms to 1h: choose a duration in that range, or 0s for never",
			},
		},
		{
			"interval above the idle one", "discovery: {interval: 2s, idle_interval: 1s}\n",
			[]string{"1:42: discovery.idle_interval: 1s is outside 2s to 1m: choose a duration in that range, which begins with interval, or remove the key"},
		},
		{
			"sockets", "containers:\n  sockets: [unix:///run/crio/crio.sock, run/x, /run/a, /run/a, /" + strings.Repeat("x", 107) + ", 7]\n  socket: x\n",
			[]string{
				`2:13: containers.sockets[0]: "unix:///run/crio/crio.sock" is not a clean absolute path: write the path alone: /run/crio/crio.sock`,
				`2:41: containers.sockets[1]: "run/x" is not a clean absolute path: write it from / on, without // or ..`,
				`2:56: containers.sockets[3]: "/run/a" is given twice: keep one of them`,
				"2:64: containers.sockets[4]: the path is longer than 107 bytes: no socket can have it; make a symbolic link with a shorter one",
				`2:174: containers.sockets[5]: "7" is not a clean absolute path: write it from / on, without // or ..`,
				"3:3: containers.socket: unknown key: did you mean sockets?",
			},
		},
		{
			"no list of sockets", "containers: {sockets: /run/docker.sock}\n",
			[]string{`1:23: containers.sockets: is the text "/run/docker.sock": write a list such as [/run/docker.sock], [] to ask no runtime, or remove the key to have the default`},
		},
		{
			"kubelet", "containers:\n  kubelet: 127.0.0.1:10250\n  kubelet_token: token\n",
			[]string{
				`2:12: containers.kubelet: "127.0.0.1:10250" is not the address of a kubelet: write one such as https://127.0.0.1:10250`,
				`3:18: containers.kubelet_token: "token" is not a clean absolute path: write it from / on, without // or ..`,
			},
		},
		{
			"a token in the open", "containers:\n  kubelet: http://127.0.0.1:10255\n  kubelet_token: /t\n",
			[]string{"2:12: containers.kubelet: a token is not sent where others can read it: begin the address with https://, or remove kubelet_token"},
		},
		{
			"a token for nobody", "containers:\n  kubelet_token: /t\n",
			[]string{"2:18: containers.kubelet_token: there is no kubelet to use it with: give its address as kubelet, or remove this"},
		},
		{
			"TCP without certificates", "tcp:\n  address: 7443\n",
			[]string{"2:12: tcp.address: is the number 7443: write a text; put it in quotes if it looks like a number"},
		},
		{
			"tracing", "tracing: {endpoint: http://127.0.0.1:4317}\n",
			[]string{`1:21: tracing.endpoint: "http://127.0.0.1:4317" is no collector: write HOST:PORT, such as 127.0.0.1:4317, unix:PATH or https://HOST:PORT`},
		},
		{
			"metrics", "metrics: {address: 127.0.0.1}\n",
			[]string{`1:20: metrics.address: "127.0.0.1" is no address to listen on: write HOST:PORT, such as 127.0.0.1:9477`},
		},
		{
			"TCP", "tcp:\n  address: 0.0.0.0\n  certificate: cert.pem\n  client_ca: /ca.pem\n  online: [web.example, 'dns:']\n  admin: cn:ops\n",
			[]string{
				`2:3: tcp.key: is missing: without certificates nobody is served by TCP: name the file, or remove address`,
				`2:12: tcp.address: "0.0.0.0" is no address to listen on: write HOST:PORT, such as 10.0.0.5:7443 or [::]:7443`,
				`3:16: tcp.certificate: "cert.pem" is not a clean absolute path: write it from / on, without // or ..`,
				`5:12: tcp.online[0]: "web.example" is no name of a certificate: write uri:URI, dns:NAME or cn:NAME`,
				`5:25: tcp.online[1]: "dns:" is no name of a certificate: write uri:URI, dns:NAME or cn:NAME`,
				`6:10: tcp.admin: is the text "cn:ops": write a list such as [dns:web.example], or remove the key: nobody`,
			},
		},
		{
			"nobody's uid", "rules: [{name: a, match: {uid: 4294967295}, class: offline}]\n",
			[]string{"1:32: rules[0].match.uid: 4294967295 is outside 0 to 4294967294: write a whole number from 0 to 4294967294"},
		},
		{
			"alias", "socket: &a /x\nlog: {level: *a}\n",
			[]string{"2:14: log.level: is an alias (*a), which this file does not use: write a text; put it in quotes if it looks like a number"},
		},
		{"merge key", "a: &a {}\nlog:\n  <<: *a\n", []string{
			"1:1: a: unknown key: the keys here are socket, mechanisms, access, tcp, limits, policy, discovery, containers, metrics, tracing, log, rules, safety",
			"3:3: log.<<: unknown key: the keys here are level",
		}},
		{"foreign type", "socket: !!binary eA==\n", []string{
			"1:9: socket: is of the type !!binary, which this file does not use: write a text; put it in quotes if it looks like a number",
		}},
		{"second document", "log: {level: info}\n---\nlog: {level: warn}\n", []string{
			"2:1: a second YAML document begins here: keep one document in the file",
		}},
		{"no YAML", "log:\n  level: [\n", []string{
			"2: not valid YAML: did not find expected node content: check indentation, colons and quotes there and just above",
		}},
		{"control characters", "\"a\\e[31m\": 1\n", []string{
			"1:1: a?[31m: unknown key: the keys here are socket, mechanisms, access, tcp, limits, policy, discovery, containers, metrics, tracing, log, rules, safety",
		}},
	}
	checkMistakes(t, tests)
}

// checkMistakes holds what Parse tells of texts against what is wanted, without
// the file name.
func checkMistakes(t *testing.T, tests []mistakes) {
	t.Helper()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("gpreemptd.yaml", []byte(tt.text))
			var es Errors
			if !errors.As(err, &es) {
				t.Fatalf("Parse: %v, want Errors", err)
			}
			var got []string
			for _, e := range es {
				got = append(got, strings.TrimPrefix(e.Error(), "gpreemptd.yaml:"))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("errors (-want +got):\n%s", diff)
			}
		})
	}
}

type mistakes struct {
	name, text string
	want       []string
}

func TestHostileFilesAreRefusedQuickly(t *testing.T) {
	bomb := "a: &a [x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c <= 'z'; c++ {
		item := "*" + string(c-1)
		bomb += string(c) + ": &" + string(c) + " [" + strings.Repeat(item+",", 8) + item + "]\n"
	}
	for name, text := range map[string]string{
		"alias bomb":    bomb,
		"deep nesting":  strings.Repeat("[", 100_000),
		"too large":     strings.Repeat("#", maxFile+1),
		"many mistakes": strings.Repeat("x: 1\n", 10_000),
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
		t.Errorf("a mistake: %v", err)
	}
	if _, err := Load(filepath.Dir(path)); err == nil {
		t.Error("a directory was accepted")
	}
}

// FuzzParse checks that whatever is accepted is valid, and whatever is refused
// is told with the file's name and in bounded length.
func FuzzParse(f *testing.F) {
	f.Add(DefaultYAML())
	f.Add([]byte("rules: [{name: a, match: {uid: 1}, class: offline, priority: 3}]\npolicy: {preset: slo, linger: fixed}"))
	f.Add([]byte("mechanisms: [freezer]\nsafety: {hazards: [{id: a, gfx: [gfx11xx], kernel: \">=7.0\", action: allow, why: W.}]}"))
	f.Add([]byte("rules: [{name: a, class: online, match: {comm: \"[\", env: {A: x, B: 1}, pod: {labels: {a/b: \"*\"}}, container: {id: \"3f\"}}}]"))
	f.Add([]byte("rules: [{name: a, class: online, match: {gpu: [node:1, 7, x], queue_priority: {min: 9}, ring_address: {from: 0x10, to: 5}}}]"))
	f.Add([]byte("containers: {sockets: [/a, b], kubelet: http://x, kubelet_token: /t}\ndiscovery: {idle_interval: 1ms, mqds_interval: 0}"))
	f.Add([]byte("rules: [{name: a, class: online, match: {comm: *x}}]"))
	f.Add([]byte("a: &a [*a]\n<<: *a\n? [x]\n: 1\n--- {}\n"))
	f.Add([]byte("socket: !!binary x\nlog: 'x\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("f", data)
		if err == nil {
			if err := c.Validate(); err != nil {
				t.Fatalf("accepted, but not valid: %v", err)
			}
			return
		}
		var es Errors
		if !errors.As(err, &es) || len(es) > maxErrors+1 {
			t.Fatalf("not a bounded Errors: %v", err)
		}
		for _, e := range es {
			if e.File != "f" || e.Problem == "" || e.Remedy == "" {
				t.Fatalf("an incomplete error: %#v", e)
			}
		}
	})
}

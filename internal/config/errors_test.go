package config

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
)

func TestErrorsHavePlaceAndRemedy(t *testing.T) {
	tests := []wrongFile{
		{
			"out of range", "policy:\n  share_floor: 1.5\n",
			[]string{"2:16: policy.share_floor: 1.5 is outside 0 to 0.95; 1.5 % is 0.015: write another value, or remove it to use the preset's"},
		},
		{
			"a cap below what follows max_suspend", "policy: {max_suspend: 100ms, share_cap: 0.3}\n",
			[]string{"1:41: policy.share_cap: 0.3 is less than 0.33: max_suspend ends each suspension after 100ms, and a job runs for 50ms then: write another value, or remove it to use the preset's"},
		},
		{
			"a cap below the floor", "policy: {preset: share, share_cap: 0.4}\n",
			[]string{"1:36: policy.share_cap: 0.4 is less than share_floor, 0.5: raise share_cap, or set share_floor to at most 0.4"},
		},
		{
			"all of them, in order", "log: {level: loud}\npolicy:\n  max_wait: 1h\n  linger: 2s\nsocket: run/x\n",
			[]string{
				`1:14: log.level: "loud" is not known here: write debug, info, warn or error`,
				"3:13: policy.max_wait: 1h0m0s is outside 0s to 10s: write another value, or remove it to use the preset's",
				"4:11: policy.linger: 2s is outside 0s to 1s: write another value, or remove it to use the preset's",
				`5:9: socket: "run/x" is not a clean absolute path: write an absolute path without // or ..`,
			},
		},
		{"misspelt knob", "policy:\n  share_flor: 0.1\n", []string{"2:3: policy.share_flor: unknown key: did you mean share_floor?"}},
		{"top key in a section", "log: {socket: /x}\n", []string{"1:7: log.socket: unknown key: it belongs at the top of the file"}},
		{
			"foreign key", "log: {colour: red}\n",
			[]string{"1:7: log.colour: unknown key: the keys here are level"},
		},
		{"given twice", "log: {level: info}\n\nlog: {level: warn}\n", []string{"3:1: log: is given twice, first on line 1: keep one of them"}},
		{
			"section is a list", "limits: [1]\n",
			[]string{"1:9: limits: is a list: write keys and values, one `key: value` a line"},
		},
		{"file is a list", "- 1\n", []string{"1:1: is a list: write keys and values, one `key: value` a line"}},
		{
			"number for a list", "access: {admin_groups: 7}\n",
			[]string{"1:24: access.admin_groups: is the number 7: write a list of names and decimal ids such as [gpreempt, 1001], or [] for nobody"},
		},
		{
			"nothing for a list that has a default", "access:\n  admin_groups:\n",
			[]string{"2:16: access.admin_groups: has no value: give one, or remove the key to use the default"},
		},
		{
			"id too large", "access: {admin_users: [99999999999]}\n",
			[]string{"1:24: access.admin_users[0]: 99999999999 is too large for an id: write a name as in /etc/passwd or /etc/group, or a decimal id"},
		},
		{
			"hexadecimal", "limits: {requests_per_user: 0x10g}\n",
			[]string{`1:29: limits.requests_per_user: is the text "0x10g": write a whole number from 0 to 1000000`},
		},
		{
			"int out of range", "limits: {requests_per_user: -1}\n",
			[]string{"1:29: limits.requests_per_user: -1 is outside 0 to 1000000: write a whole number from 0 to 1000000"},
		},
		{"not a number", "policy: {share_floor: .nan}\n", []string{"1:23: policy.share_floor: .nan is not a decimal number: write a number such as 0.25"}},
		{"no value", "socket:\n", []string{"1:8: socket: has no value: give one, or remove the key to use the default"}},
		{"unknown preset", "policy: {preset: stricd}\n", []string{`1:18: policy.preset: "stricd" is not a preset: did you mean strict?`}},
		{
			"custom is not a preset", "policy: {preset: custom}\n",
			[]string{`1:18: policy.preset: "custom" is not a preset: name the preset to start from, then the knobs that differ; choose one of balanced, strict, share, shadow`},
		},
		{
			"rules", "rules:\n  - match: {comm: a}\n    class: batch\n  - name: x\n    match: {comm: 7}\n  - name: x\n    class: offline\n    priority: 16\n  - 5\n",
			[]string{
				"2:5: rules[0].name: it is empty: write a name; decisions show it",
				`3:12: rules[0].class: "batch" is not known here: write unmanaged, online or offline`,
				"4:5: rules[1].class: is missing: write online, offline or unmanaged",
				`5:19: rules[1].match.comm: is the number 7: write a text; put it in quotes if it looks like a number`,
				`6:5: rules[2].match: it is empty and would match every process: set a field of it, such as comm, cgroup or uid, or comm: "*" for every process`,
				`6:11: rules[2].name: rule 2 has the same: write a unique name for each rule`,
				"8:15: rules[2].priority: 16 is outside 0 to 15: write a whole number from 0 to 15",
				"9:5: rules[3]: is the number 5: write keys and values, one `key: value` a line; the keys here are name, match, class, priority, never_debug, on_resist",
			},
		},
		{
			"unknown mechanisms", "mechanisms: [dbgtrap, freeser, gdb, dbgtrap]\n",
			[]string{
				`1:23: mechanisms[1]: "freeser" is not a mechanism: did you mean freezer?`,
				`1:32: mechanisms[2]: "gdb" is not a mechanism: write dbgtrap, criu, freezer or nvchannels`,
				"1:37: mechanisms[3]: dbgtrap is given twice: keep one of them: the first that works is used",
			},
		},
		{
			"a number for a mechanism", "mechanisms: [1.5]\n",
			[]string{"1:14: mechanisms[0]: is the number 1.5: write a list such as [dbgtrap, freezer], or [] to suspend nothing"},
		},
		{
			"hazards", "safety:\n  hazards:\n    - id: a\n      gfx: [navi]\n      why: W.\n    - 5\nlog: {level: loud}\n",
			[]string{
				"3:7: safety.hazards[0].action: is missing: write allow, limit or deny",
				`4:13: safety.hazards[0].gfx[0]: "navi" is not the name of a GPU architecture, a family or a span: write a list of names such as gfx942, families such as gfx11xx, spans such as gfx1100-gfx1103, or gfx*`,
				`6:7: safety.hazards[1]: is the number 5: write keys and values, one ` + "`key: value` a line; the keys here are id, gfx, apu, kernel, driver, process, mes, mes_kiq, mec, sdma, mechanisms, nvidia, model, action, why, issues, read, searched, remedy",
				`7:14: log.level: "loud" is not known here: write debug, info, warn or error`,
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
				`3:32: rules[0].match.cgroup: "slurm": matches no path: paths begin with /: begin it with / or *`,
			},
		},
		{
			"TCP without certificates", "tcp:\n  address: 7443\n",
			[]string{"2:12: tcp.address: is the number 7443: write HOST:PORT, such as 10.0.0.5:7443 or [::]:7443"},
		},
		{
			"metrics", "metrics: {address: 127.0.0.1}\n",
			[]string{`1:20: metrics.address: "127.0.0.1" is not an address to listen on: write HOST:PORT, such as 127.0.0.1:9477`},
		},
		{
			"TCP", "tcp:\n  address: 0.0.0.0\n  certificate: cert.pem\n  client_ca: /ca.pem\n  online: [web.example, 'dns:']\n  admin: cn:ops\n",
			[]string{
				`2:3: tcp.key: is missing: TCP needs certificates: name the file, or remove address`,
				`2:12: tcp.address: "0.0.0.0" is not an address to listen on: write HOST:PORT, such as 10.0.0.5:7443 or [::]:7443`,
				`3:16: tcp.certificate: "cert.pem" is not a clean absolute path: write an absolute path without // or ..`,
				`5:12: tcp.online[0]: "web.example" is not a certificate name: write uri:URI, dns:NAME or cn:NAME`,
				`5:25: tcp.online[1]: "dns:" is not a certificate name: write uri:URI, dns:NAME or cn:NAME`,
				`6:10: tcp.admin: is the text "cn:ops": write a list such as [cn:ops.example]`,
			},
		},
		{
			"nobody's uid", "rules: [{name: a, match: {uid: 4294967295}, class: offline}]\n",
			[]string{"1:32: rules[0].match.uid: 4294967295 is outside 0 to 4294967294: write a number from 0 to 4294967294, as id -u USER prints"},
		},
		{
			"alias", "socket: &a /x\nlog: {level: *a}\n",
			[]string{"2:14: log.level: is an alias (*a), which this file does not use: write debug, info, warn or error"},
		},
		{"merge key", "a: &a {}\nlog:\n  <<: *a\n", []string{
			"1:1: a: unknown key: the keys here are socket, mechanisms, access, tcp, limits, policy, hqd_budget, rules, jobs, safety, discovery, metrics, log",
			"3:3: log.<<: unknown key: the keys here are level",
		}},
		{"jobs without a value", "jobs:\n", []string{
			"1:6: jobs: has no value: give one, or remove the key to use the default",
		}},
		{"jobs", "jobs:\n  - {name: a, by: [env.A, env., comm, env.A]}\n  - {name: a, cgroup: \"x\"}\n  - {name: a b, cgroup: \"[\"}\n  - {by: x, match: {}}\n", []string{
			`2:27: jobs[0].by[1]: "env." is not a property that identifies jobs: write env.NAME, pod.labels.NAME, container.labels.NAME, container.id, unit or user_unit`,
			`2:33: jobs[0].by[2]: "comm" is not a property that identifies jobs: write env.NAME, pod.labels.NAME, container.labels.NAME, container.id, unit or user_unit`,
			`2:39: jobs[0].by[3]: "env.A" is given twice: keep one of them`,
			"3:12: jobs[1].name: job rule 1 has the same: write a unique name for each rule",
			`3:23: jobs[1].cgroup: "x": matches no path: paths begin with /: begin it with / or *`,
			`4:12: jobs[2].name: "a b" is not a name: use at most 32 letters, digits, - and _`,
			`4:25: jobs[2].cgroup: "[": the [ at character 1 is not closed: add the ], or write [[] for the character itself`,
			"5:5: jobs[3].name: it is empty: write a name; decisions show it",
			`5:10: jobs[3].by: is the text "x": write a list of properties, such as [env.SLURM_JOB_ID]`,
			"5:13: jobs[3].match: unknown key: it belongs under rules:",
		}},
		{"foreign type", "socket: !!binary eA==\n", []string{
			"1:9: socket: is of the type !!binary, which this file does not use: write a text; put it in quotes if it looks like a number",
		}},
		{"second document", "log: {level: info}\n---\nlog: {level: warn}\n", []string{
			"2:1: a second YAML document begins here: keep one document in the file",
		}},
		{"not YAML", "log:\n  level: [\n", []string{
			"2: not valid YAML: did not find expected node content: check indentation, colons and quotes there and just above",
		}},
		{"control characters", "\"a\\e[31m\": 1\n", []string{
			"1:1: a?[31m: unknown key: the keys here are socket, mechanisms, access, tcp, limits, policy, hqd_budget, rules, jobs, safety, discovery, metrics, log",
		}},
	}
	checkErrors(t, tests)
}

// checkErrors compares the errors of Parse with those wanted, without the file name.
func checkErrors(t *testing.T, tests []wrongFile) {
	t.Helper()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("gpreemptd.yaml", []byte(tt.text))
			var es yamlfile.Errors
			if !errors.As(err, &es) {
				t.Fatalf("Parse: %v, want yamlfile.Errors", err)
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

// wrongFile is a file with errors.
type wrongFile struct {
	name, text string
	want       []string
}

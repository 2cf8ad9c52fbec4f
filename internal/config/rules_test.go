package config

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestRangesOfARuleHaveTheEndsOfTheirKind(t *testing.T) {
	for text, want := range map[string]classify.Match{
		"queue_priority: {min: 11}":              {QueuePriority: &classify.PriorityRange{Min: 11, Max: 15}},
		"queue_priority: {max: 0}":               {QueuePriority: &classify.PriorityRange{}},
		"ring_address: {from: 1}":                {RingAddress: &classify.AddressRange{From: 1, To: 1<<64 - 1}},
		"ring_address: {to: 0xffffffffffffffff}": {RingAddress: &classify.AddressRange{To: 1<<64 - 1}},
		`ring_address: {from: 0x10, to: 16}`:     {RingAddress: &classify.AddressRange{From: 16, To: 16}},
	} {
		got := parsed(t, "rules: [{name: a, class: offline, match: {"+text+"}}]").Rules[0].Match
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}

func TestRuleMayForbidDebuggers(t *testing.T) {
	got := parsed(t, "rules: [{name: a, class: offline, never_debug: true, match: {comm: x}}, {name: b, class: online, match: {comm: y}}]").Rules
	if want := []bool{true, false}; got[0].NeverDebug != want[0] || got[1].NeverDebug != want[1] {
		t.Errorf("never_debug is %v and %v, want %v", got[0].NeverDebug, got[1].NeverDebug, want)
	}
	checkErrors(t, []wrongFile{{
		"not a truth value", "rules: [{name: a, class: offline, never_debug: 1, match: {comm: x}}]\n",
		[]string{"1:48: rules[0].never_debug: is the number 1: write true or false"},
	}})
}

func TestRuleSaysWhatIsDoneWithWhatResists(t *testing.T) {
	for text, want := range map[string]gpreempt.Resistance{
		"report": {}, "stop": {Stop: true}, "{kill: 3}": {KillAfter: 3},
	} {
		if got := parsed(t, "rules: [{name: a, class: offline, on_resist: "+text+", match: {comm: x}}]").Rules[0].OnResist; got != want {
			t.Errorf("on_resist: %s is %v, want %v", text, got, want)
		}
	}
	const at = "rules: [{name: a, class: offline, match: {comm: x}, on_resist: "
	checkErrors(t, []wrongFile{
		{"another word", at + "end}]\n", []string{`1:64: rules[0].on_resist: is the text "end": write report, stop, or {kill: N}, with the number of refused suspensions, 1 to 1000`}},
		{"never", at + "{kill: 0}}]\n", []string{"1:64: rules[0].on_resist: is a mapping: write report, stop, or {kill: N}, with the number of refused suspensions, 1 to 1000"}},
		{"a list", at + "[stop]}]\n", []string{"1:64: rules[0].on_resist: is a list: write report, stop, or {kill: N}, with the number of refused suspensions, 1 to 1000"}},
		{
			"another class", "rules: [{name: a, class: online, match: {comm: x}, on_resist: stop}]\n",
			[]string{"1:63: rules[0].on_resist: only offline processes are suspended: remove it, or write class: offline"},
		},
	})
}

func TestErrorsInRulesHavePlaceAndRemedy(t *testing.T) {
	checkErrors(t, []wrongFile{
		{
			"texts of a match",
			"rules:\n  - name: a\n    class: offline\n    match:\n      comm: \"\"\n      exe:\n      unit: [a, b]\n      slice: true\n      cmdline: {a: b}\n",
			[]string{
				`5:13: rules[0].match.comm: is empty: write a condition, such as comm: "*" for any value, or remove the key`,
				`6:11: rules[0].match.exe: is empty: write a condition, such as comm: "*" for any value, or remove the key`,
				"7:13: rules[0].match.unit: is a list: write one text, and another item of rules for another",
				`8:14: rules[0].match.slice: is the truth value true: write a text; put it in quotes if it looks like a number`,
				"9:16: rules[0].match.cmdline: is a mapping: write a text; put it in quotes if it looks like a number",
			},
		},
		{
			"texts that match nothing",
			"rules:\n  - name: a\n    class: offline\n    match:\n      exe: python3\n      unit: train\n      slice: batch\n      container: {id: 3f2a7b8c9d0e, runtime: crio}\n",
			[]string{
				`5:12: rules[0].match.exe: "python3": matches no path: paths begin with /: begin it with / or *`,
				`6:13: rules[0].match.unit: "train": matches no unit: units end in .service or .scope: end it with one of these or with *, such as "train.service"`,
				`7:14: rules[0].match.slice: "batch": matches no slice: slices end in .slice: end it with that or with *, such as "batch.slice"`,
				`8:23: rules[0].match.container.id: "3f2a7b8c9d0e": is only part of an id: ids have 64 digits: write "3f2a7b8c9d0e*"`,
				`8:46: rules[0].match.container.runtime: "crio": matches no runtime: the known runtimes are docker, containerd, cri-o, podman`,
			},
		},
		{
			"variables and labels",
			"rules:\n  - name: a\n    class: offline\n    match:\n      env:\n        WORLD_SIZE: 8\n        RANK:\n        A: x\n        A: y\n        \"B=1\": x\n        7: x\n" +
				"      pod:\n        labels:\n          app: \"[\"\n          app.kubernetes.io/name: \"[z-a]\"\n",
			[]string{
				`6:21: rules[0].match.env.WORLD_SIZE: is the number 8: write a text; put it in quotes if it looks like a number`,
				`7:14: rules[0].match.env.RANK: is empty: write a condition, such as comm: "*" for any value, or remove the key`,
				"9:9: rules[0].match.env.A: is given twice, first on line 8: keep one of them",
				"11:9: rules[0].match.env: a key is the number 7: write a word before the colon, in quotes if it looks like something else",
				`14:16: rules[0].match.pod.labels.app: "[": the [ at character 1 is not closed: add the ], or write [[] for the character itself`,
				`15:35: rules[0].match.pod.labels["app.kubernetes.io/name"]: "[z-a]": the [ at character 1 has the range z-a, which is empty: write a-z`,
			},
		},
		{
			"the name of a variable", "rules: [{name: a, class: offline, match: {env: {\"B=1\": x}}}]\n",
			[]string{`1:56: rules[0].match.env["B=1"]: is not the name of a variable: write NAME: value, without =`},
		},
		{
			"fields that are empty",
			"rules:\n  - name: a\n    class: offline\n    match:\n      env: {}\n      container:\n      pod: {labels: {}}\n      gpu: []\n      queue_priority: {}\n      ring_address:\n",
			[]string{
				`5:12: rules[0].match.env: is empty: write a condition, such as comm: "*" for any value, or remove the key`,
				`6:17: rules[0].match.container: is empty: write a condition, such as comm: "*" for any value, or remove the key`,
				`7:21: rules[0].match.pod.labels: is empty: write a condition, such as comm: "*" for any value, or remove the key`,
				"8:12: rules[0].match.gpu: is empty: write a condition, such as comm: \"*\" for any value, or remove the key",
				`9:23: rules[0].match.queue_priority: is empty: write a condition, such as comm: "*" for any value, or remove the key`,
				`10:20: rules[0].match.ring_address: is empty: write a condition, such as comm: "*" for any value, or remove the key`,
			},
		},
		{
			"fields of another form",
			"rules:\n  - name: a\n    class: offline\n    match:\n      env: RANK=0\n      container: vllm\n      pod: [a]\n      gpu: renderD128\n      queue_priority: 11\n      ring_address: 0x7f0000000000-0x7f0000001000\n",
			[]string{
				`5:12: rules[0].match.env: is the text "RANK=0": write names and values, such as {NAME: value}`,
				"6:18: rules[0].match.container: is the text \"vllm\": write keys and values, one `key: value` a line; the keys here are id, name, image, runtime, labels",
				"7:12: rules[0].match.pod: is a list: write keys and values, one `key: value` a line",
				`8:12: rules[0].match.gpu: is the text "renderD128": write a list of GPUs, such as [renderD128, node:1]: a gpu_id, node:N without a space, a PCI address or renderDN`,
				"9:23: rules[0].match.queue_priority: is the number 11: write keys and values, one `key: value` a line; the keys here are min, max",
				"10:21: rules[0].match.ring_address: is the text \"0x7f0000000000-0x7f0000001000\": write keys and values, one `key: value` a line; the keys here are from, to",
			},
		},
		{
			"GPUs",
			"rules:\n  - name: a\n    class: offline\n    match:\n      gpu: [node: 1, card0, 0xc7a6]\n",
			[]string{
				"5:13: rules[0].match.gpu[0]: is a mapping: write a list of GPUs, such as [renderD128, node:1]: a gpu_id, node:N without a space, a PCI address or renderDN",
				"5:22: rules[0].match.gpu[1]: \"card0\" is not the name of a GPU: write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them",
				"5:29: rules[0].match.gpu[2]: \"0xc7a6\" is not the name of a GPU: write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them",
			},
		},
		{
			"names of no GPU",
			"rules:\n  - name: a\n    class: offline\n    match:\n      gpu: [node:1, card0, 0xc7a6]\n",
			[]string{
				"5:21: rules[0].match.gpu[1]: \"card0\" is not the name of a GPU: write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them",
				"5:28: rules[0].match.gpu[2]: \"0xc7a6\" is not the name of a GPU: write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them",
			},
		},
		{
			"ranges",
			"rules:\n  - name: a\n    class: offline\n    match:\n      queue_priority: {min: 11, max: 7}\n      ring_address: {from: 0x2000, to: 0x1000}\n" +
				"  - name: b\n    class: offline\n    match:\n      queue_priority: {min: -1, max: 16, mx: 1}\n      ring_address: {from: 7f0000000000, to: 007f}\n" +
				"  - name: c\n    class: offline\n    match: {ring_address: {from: 0123, to: 18446744073709551616}}\n",
			[]string{
				"5:23: rules[0].match.queue_priority: min 11 is above max 7: swap them",
				"6:21: rules[0].match.ring_address: from 0x2000 is above to 0x1000: swap them",
				"10:29: rules[1].match.queue_priority.min: -1 is outside 0 to 15: write a whole number from 0 to 15",
				"10:38: rules[1].match.queue_priority.max: 16 is outside 0 to 15: write a whole number from 0 to 15",
				"10:42: rules[1].match.queue_priority.mx: unknown key: did you mean max?",
				`11:28: rules[1].match.ring_address.from: is the text "7f0000000000": write hexadecimal digits after 0x, as in 0x7f0000000000, at most 16, or a decimal number`,
				`11:46: rules[1].match.ring_address.to: is the text "007f": write hexadecimal digits after 0x, as in 0x7f0000000000, at most 16, or a decimal number`,
				"14:34: rules[2].match.ring_address.from: 0123 begins with 0: write hexadecimal digits after 0x, as in 0x7f0000000000, at most 16, or a decimal number",
				"14:44: rules[2].match.ring_address.to: is the number 18446744073709551616: write hexadecimal digits after 0x, as in 0x7f0000000000, at most 16, or a decimal number",
			},
		},
		{
			"misplaced keys of a rule",
			"rules:\n  - name: a\n    class: offline\n    comm: x\n    match:\n      uid: 0\n      image: x\n      labels: {a: b}\n      class: online\n      container.name: x\n      gpus: [1]\n      user: root\n" +
				"      pod: {name: x, image: y, comm: z}\n",
			[]string{
				"4:5: rules[0].comm: unknown key: it belongs under match:",
				"7:7: rules[0].match.image: unknown key: it belongs under container:",
				"8:7: rules[0].match.labels: unknown key: it belongs under container: or pod:",
				"9:7: rules[0].match.class: unknown key: it belongs under rules:",
				"10:7: rules[0].match.container.name: unknown key: write container: and below it, indented, name:",
				"11:7: rules[0].match.gpus: unknown key: did you mean gpu?",
				"12:7: rules[0].match.user: unknown key: the keys here are comm, cmdline, exe, uid, gid, cgroup, unit, slice, user_unit, env, container, pod, slurm, gpu, queue_priority, ring_address",
				"13:22: rules[0].match.pod.image: unknown key: it belongs under container:",
				"13:32: rules[0].match.pod.comm: unknown key: it belongs under match:",
			},
		},
		{
			"a glob without quotes", "rules:\n  - name: é\n    class: offline\n    match: {uid: 0, comm: *train}\n",
			[]string{"4:27: not valid YAML: unknown anchor 'train' referenced: put a text that begins with * in quotes"},
		},
		{
			"another glob without quotes", "rules:\n  - name: a\n    class: offline\n    match:\n      cgroup: */serving\n",
			[]string{"5: not valid YAML: did not find expected alphabetic or numeric character: put a text that begins with * in quotes"},
		},
	})
}

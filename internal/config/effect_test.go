package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestWhatHasNoEffectHasPlaceAndRemedy(t *testing.T) {
	gpus := []gpreempt.GPU{{ID: 50966, Node: 1, BDF: "0000:10:00.0", RenderMinor: 128}}
	const rules = "rules:\n"
	const low = "  - {name: low, match: {queue_priority: {max: 9}}, class: offline}\n"
	const ring = "  - {name: ring, match: {ring_address: {from: 1}}, class: offline}\n"
	for _, tc := range []struct {
		name, text string
		host       Facts
		want       []string
	}{
		{"everything has an effect", rules + low + ring + "  - {name: gpu, match: {gpu: [renderD128]}, class: offline, never_debug: true}\nmechanisms: [dbgtrap, freezer]\n", Facts{GPUs: gpus}, nil},
		{
			"rules behind others", rules + "  - {name: all, match: {comm: \"*\"}, class: offline}\n  - name: server\n    match: {uid: 990}\n    class: online\n",
			Facts{},
			[]string{`3:11: rules[1].name: never decides: every process that it matches is matched by rule "all" above: move it above that rule, or remove it`},
		},
		{
			"jobs behind others", "jobs: [{name: a, by: [env.A]}, {name: b, by: [env.A, env.B]}]\n",
			Facts{},
			[]string{`1:39: jobs[1].name: never decides: every process that it matches is matched by job rule "a" above: move it above that rule, or remove it`},
		},
		{
			"debugfs is off", rules + low + ring + "  - {name: high, match: {queue_priority: {min: 10}}, class: online}\ndiscovery: {debugfs: false}\n",
			Facts{},
			[]string{
				"2:41: rules[0].match.queue_priority: matches no process, because discovery.debugfs is false (rules: low, high): set discovery.debugfs: true",
				"3:40: rules[1].match.ring_address: matches no process before dbgtrap is attached to it, because discovery.debugfs is false (rules: ring): set discovery.debugfs: true",
			},
		},
		{
			"debugfs cannot be read", rules + low,
			Facts{Debugfs: "debugfs is not mounted", DebugfsRemedy: "mount it"},
			[]string{"2:41: rules[0].match.queue_priority: matches no process, because debugfs is not mounted (rules: low): mount it"},
		},
		{
			"no such GPU", rules + "  - name: a\n    class: offline\n    match: {gpu: [renderD128, node:2, 10:00.0]}\n",
			Facts{GPUs: gpus},
			[]string{"4:31: rules[0].match.gpu[1]: \"node:2\" names no GPU of this host: write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them"},
		},
		{
			"a command line without wildcards", rules + "  - {name: a, class: offline, match: {cmdline: train.py}}\n  - {name: b, class: offline, match: {cmdline: \"*serve.py\"}}\n" +
				"  - {name: c, class: offline, match: {cmdline: /usr/bin/python3 sum.py}}\n",
			Facts{},
			[]string{`2:48: rules[0].match.cmdline: no *: matches only this whole command line: write "*train.py*"`},
		},
		{"GPUs that are not known", rules + "  - {name: a, class: offline, match: {gpu: [node:2]}}\n", Facts{}, nil},
		{
			"nothing knows containers and jobs", rules + "  - {name: a, class: offline, match: {container: {image: \"*torch*\"}}}\n  - {name: b, class: offline, match: {pod: {namespace: batch}}}\n" +
				"  - {name: c, class: offline, match: {slurm: {qos: low}}}\n  - {name: d, class: offline, match: {container: {runtime: docker}}}\n",
			Facts{NoRuntime: true, NoSlurm: true},
			[]string{
				"2:50: rules[0].match.container: matches no process, because no container runtime has a socket on this host (rules: a): start the runtime, or make a symbolic link to its socket, such as /run/crio/crio.sock; container.id, container.runtime and cgroup need none",
				"3:44: rules[1].match.pod: matches no process, because no container runtime has a socket on this host (rules: b): start the runtime, or make a symbolic link to its socket, such as /run/crio/crio.sock; container.id, container.runtime and cgroup need none",
				"4:46: rules[2].match.slurm: matches no process, because no prolog has recorded a Slurm job since this host started (rules: c): set Prolog=/usr/lib/gpreempt/slurm/prolog in slurm.conf (docs/kubernetes.md)",
			},
		},
		{
			"what is never suspended", rules + "  - {name: a, class: offline, priority: 15, match: {comm: a}}\n  - {name: b, class: offline, never_debug: true, match: {comm: b}}\n",
			Facts{},
			[]string{
				"2:41: rules[0].priority: no lease suspends its processes: a lease suspends those of lower priority than its own, which is 15 at most: write a lower one, such as 0",
				"3:44: rules[1].never_debug: its processes are never suspended: the mechanisms are debuggers: add freezer to mechanisms, or write class: unmanaged",
			},
		},
		{
			"names without a right", "access:\n  online_groups: [serving, \"1001\"]\n  admin_users: [alice]\ntcp: {admin: [cn:ops]}\n",
			Facts{Unknown: []string{"group serving", "group gpreempt-admin", "user alice"}},
			[]string{
				`2:19: access.online_groups[0]: this host has no group "serving": nobody has the right: create it, such as with groupadd --system serving, or remove it`,
				`3:17: access.admin_users[0]: this host has no user "alice": nobody has the right: create it, such as with useradd --system alice, or remove it`,
				"4:14: tcp.admin: nobody has the right: without tcp.address there is no TCP: set tcp.address, or remove the names",
			},
		},
	} {
		c, err := Parse("gpreemptd.yaml", []byte(tc.text))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range c.WithoutEffect(tc.host) {
			got = append(got, strings.TrimPrefix(e.Error(), "gpreemptd.yaml:"))
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
	if got := Default().WithoutEffect(Facts{GPUs: gpus, Debugfs: "it is not mounted", NoRuntime: true, NoSlurm: true}); got != nil {
		t.Errorf("the default has no effect: %v", got)
	}
}

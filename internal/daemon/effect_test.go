package daemon

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// What has no effect is one warning with its places, from the load on, and ends when the file, or the host, has changed.
func TestRulesWithoutEffectAreOneWarning(t *testing.T) {
	d, _ := newDaemonOnHost(t, noGroups)
	warned := func() (all []string) {
		for _, w := range d.warnings.list() {
			if w.Code == gpreempt.WarnWithoutEffect.Code {
				all = append(all, strings.ReplaceAll(w.Text, d.opts.ConfigPath, "FILE"))
			}
		}
		return all
	}
	const low = noGroups + "rules:\n  - {name: low, match: {queue_priority: {max: 9}}, class: offline}\n"
	const other = "  - {name: other, match: {gpu: [node:77]}, class: offline}\n  - {name: same, match: {gpu: [node:77], comm: x}, class: online}\n"
	const places = "FILE:4:33: rules[1].match.gpu[0]: \"node:77\" names no GPU of this host: write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them; " +
		"FILE:5:12: rules[2].name: never decides: every process that it matches is matched by rule \"other\" above: move it above that rule, or remove it; " +
		"FILE:5:32: rules[2].match.gpu[0]: \"node:77\" names no GPU of this host: write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them"
	d.reloadWith(t, low+other)
	if diff := cmp.Diff([]string{places}, warned()); diff != "" {
		t.Errorf("after a reload (-want +got):\n%s", diff)
	}
	d.reloadWith(t, low)
	if got := warned(); got != nil {
		t.Errorf("with rules that have an effect: %q", got)
	}
	d.warnings.set("mqds", gpreempt.WarnDebugfsDenied.Warn("cannot read"))
	d.checkEffect()
	want := "FILE:3:41: rules[0].match.queue_priority: matches no process, because debugfs cannot be read (see the warning DEBUGFS_DENIED) (rules: low): " + gpreempt.WarnDebugfsDenied.Remedy
	if diff := cmp.Diff([]string{want}, warned()); diff != "" {
		t.Errorf("without debugfs (-want +got):\n%s", diff)
	}
	d.warnings.set("mqds")
	d.checkEffect()
	if got := warned(); got != nil {
		t.Errorf("with debugfs again: %q", got)
	}
}

func TestConfigCheckWarnsOfWhatHasNoEffectOnThisHost(t *testing.T) {
	h := newSimulatedHost(t, t.TempDir())
	h.opts.ConfigGiven = true
	write(t, h.opts.ConfigPath, "access: {admin_users: [nobody-has-this-name]}\nrules:\n  - {name: low, match: {queue_priority: {max: 9}}, class: offline}\n  - {name: pods, match: {pod: {namespace: batch}}, class: offline}\n  - {name: gpu, match: {gpu: [node:77]}, class: offline}\n")
	shown := func() string {
		var out, errs strings.Builder
		if err := check(h.opts, &out, &errs); err != nil {
			t.Fatal(err)
		}
		return strings.ReplaceAll(errs.String()+out.String(), h.opts.ConfigPath, "FILE")
	}
	const user = "FILE:1:24: warning: access.admin_users[0]: this host has no user \"nobody-has-this-name\": nobody has the right: create it, such as with useradd --system nobody-has-this-name, or remove it\n"
	const pods = "FILE:4:31: warning: rules[1].match.pod: matches no process, because no container runtime has a socket on this host (rules: pods): start the runtime, or make a symbolic link to its socket, such as /run/crio/crio.sock; container.id, container.runtime and cgroup need none\n"
	const gpu = "FILE:5:31: warning: rules[2].match.gpu[0]: \"node:77\" names no GPU of this host: write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them\n"
	if diff := cmp.Diff(user+pods+gpu+"FILE: valid, warnings: 3\n", shown()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	files := h.opts.Host.files()
	h.opts.Host.Files = missing{files, debugfs.MQDs}
	const low = "FILE:3:41: warning: rules[0].match.queue_priority: matches no process, because /sys/kernel/debug/kfd/mqds does not exist (rules: low): mount -t debugfs none /sys/kernel/debug, where the kernel has CONFIG_DEBUG_FS; discovery.debugfs: false turns this off\n"
	if diff := cmp.Diff(user+low+pods+gpu+"FILE: valid, warnings: 4\n", shown()); diff != "" {
		t.Errorf("without debugfs (-want +got):\n%s", diff)
	}
	h.opts.Host.Files = missing{files, "sys/class/kfd"}
	if diff := cmp.Diff(user+"FILE: valid, warnings: 1\nnot checked: what rules name of GPUs, debugfs, containers and Slurm, because no AMD GPU can be read here\n", shown()); diff != "" {
		t.Errorf("on a host without GPUs (-want +got):\n%s", diff)
	}
}

func TestThresholdOfTheEnvironmentIsPartOfTheConfig(t *testing.T) {
	d := newDaemon(t, noGroups)
	t.Setenv("GPREEMPT_PRIORITY_THRESHOLD", "10")
	d.reload()
	var names []string
	for _, r := range d.config.Load().Rules {
		names = append(names, r.Name)
	}
	if diff := cmp.Diff([]string{"GPREEMPT_PRIORITY_THRESHOLD or more", "below GPREEMPT_PRIORITY_THRESHOLD"}, names); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}
	t.Setenv("GPREEMPT_PRIORITY_THRESHOLD", "100")
	if err := check(d.opts, nil, nil); err == nil || !strings.Contains(err.Error(), `"100" is not a threshold`) {
		t.Errorf("%v, want that it is not a threshold", err)
	}
}

// Under the shadow policy the statistics and the events say who would have been suspended, by which rule and for whom.
func TestShadowPolicyReportsWhomItWouldHaveSuspended(t *testing.T) {
	h := newFakeHost(t, "6.12", strings.Replace(trainersAreOffline, "preset: strict", "preset: shadow", 1))
	job := h.start("trainer")
	c, _ := h.serve()
	h.target(c, job, "it is classified", func(t *gpreemptv1.Target) bool { return t.GetClass() == gpreemptv1.Class_CLASS_OFFLINE })
	lease, err := c.Acquire(t.Context(), client.Request{GPUs: client.AllGPUs(), Label: "chat", TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	stats, err := c.Admin().GetStatistics(t.Context(), &gpreemptv1.GetStatisticsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	report := stats.GetStatistics().GetShadow()
	owner := fmt.Sprintf(`"chat" of process %d`, os.Getpid())
	if len(report.GetRows()) != 1 || !report.GetInForce() {
		t.Fatalf("the report: %v", report)
	}
	row := report.GetRows()[0]
	if row.GetTotal().AsDuration() <= 0 || row.GetTotal().AsDuration() > report.GetLasted().AsDuration() {
		t.Errorf("suspended for %v of %v", row.GetTotal().AsDuration(), report.GetLasted().AsDuration())
	}
	row.Total, row.Longest = nil, nil
	want := &gpreemptv1.ShadowRow{TargetId: job.Key().String(), Comm: "trainer", ClassifiedBy: "rule training", GpuCount: 1, Owner: owner, Suspends: 1}
	if diff := cmp.Diff(want, row, protocmp.Transform()); diff != "" {
		t.Errorf("row (-want +got):\n%s", diff)
	}
	stream, err := c.Admin().WatchEvents(t.Context(), &gpreemptv1.WatchEventsRequest{FromStart: true, NoFollow: true})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if e := m.GetEvent(); e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_SHADOW {
			got = append(got, e.GetMessage())
		}
	}
	if len(got) == 0 || got[0] != "trainer, by rule training, for "+owner {
		t.Errorf("events %q", got)
	}
}

// missing is a file system without the files whose names begin in some way.
type missing struct {
	fs.FS
	gone string
}

func (f missing) Open(name string) (fs.File, error) {
	if strings.HasPrefix(name, f.gone) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return f.FS.Open(name)
}

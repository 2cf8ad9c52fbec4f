package daemon

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestWarningIsLoggedOnceWhenRaisedAndOnceWhenCleared(t *testing.T) {
	core, logs := observer.New(zapcore.DebugLevel)
	known := reported{}
	for _, now := range [][]gpreempt.Warning{
		{gpreempt.WarnNoKFD.Warn("no driver"), gpreempt.WarnKernelLogUnreadable.Warn("1 line")},
		{gpreempt.WarnNoKFD.Warn("no driver"), gpreempt.WarnKernelLogUnreadable.Warn("2 lines")},
		{gpreempt.WarnNoKFD.Warn("no driver")},
		nil,
		{gpreempt.WarnNoKFD.Warn("no driver, again")},
	} {
		known.log(zap.New(core), now)
	}
	var got []string
	for _, e := range logs.All() {
		got = append(got, e.Level.String()+": "+e.Message+": "+e.ContextMap()["code"].(string))
	}
	want := []string{
		"error: warning raised: NO_KFD", "warn: warning raised: KERNEL_LOG_UNREADABLE",
		"info: warning cleared: KERNEL_LOG_UNREADABLE", "info: warning cleared: NO_KFD", "error: warning raised: NO_KFD",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
	k := gpreempt.WarningKinds()
	last := logs.All()[4].ContextMap()
	for _, kind := range k {
		if kind == gpreempt.WarnNoKFD && (last["remedy"] != kind.Remedy || last["text"] != "no driver, again" || last["severity"] != kind.Severity) {
			t.Errorf("the log has %v", last)
		}
	}
}

func TestWarningsAreKeptByPartInAFixedOrder(t *testing.T) {
	var w warnings
	w.set("scan", gpreempt.Warning{Code: "S"})
	w.set("access", gpreempt.Warning{Code: "A1"}, gpreempt.Warning{Code: "A2"})
	w.set("reload", gpreempt.Warning{Code: "R"})
	w.set("scan", gpreempt.Warning{Code: "S2"})
	w.set("reload")
	w.set("gpus")
	want := []gpreempt.Warning{{Code: "A1"}, {Code: "A2"}, {Code: "S2"}}
	if diff := cmp.Diff(want, w.list()); diff != "" {
		t.Error(diff)
	}
}

func TestOfflineTargetsWhoseWorkIsAnnouncedAreOneWarning(t *testing.T) {
	server := gpreempt.ProcessKey{PID: 7, Start: 1}
	target := func(pid int32, class gpreempt.Class, owners ...gpreempt.ProcessKey) scheduler.TargetInfo {
		return scheduler.TargetInfo{Key: gpreempt.ProcessKey{PID: pid, Start: 1}, Class: class, Owners: owners}
	}
	for _, test := range []struct {
		targets []scheduler.TargetInfo
		want    []gpreempt.Warning
	}{
		{nil, nil},
		{[]scheduler.TargetInfo{target(7, gpreempt.Online, server), target(8, gpreempt.Unmanaged, server), target(9, gpreempt.Offline)}, nil},
		{[]scheduler.TargetInfo{target(7, gpreempt.Offline, server), target(8, gpreempt.Offline, server)}, []gpreempt.Warning{
			gpreempt.WarnOwnerOffline.Warn("offline: process 7 by rule a, announced by process 7; process 8 by rule a, announced by process 7"),
		}},
		{slices.Repeat([]scheduler.TargetInfo{target(7, gpreempt.Offline, server)}, 7), []gpreempt.Warning{gpreempt.WarnOwnerOffline.Warn(
			"offline: " + strings.Repeat("process 7 by rule a, announced by process 7; ", 5) + "2 more")}},
	} {
		if diff := cmp.Diff(test.want, offlineOwners(test.targets, func(gpreempt.ProcessKey) string { return "rule a" })); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestTargetsThatCannotBeSuspendedAreOneWarning(t *testing.T) {
	target := func(pid int32, cannot bool) scheduler.TargetInfo {
		return scheduler.TargetInfo{Key: gpreempt.ProcessKey{PID: pid, Start: 1}, Class: gpreempt.Offline, CannotSuspend: cannot}
	}
	why := func(key gpreempt.ProcessKey) string { return map[int32]string{7: "no helper"}[key.PID] }
	for _, test := range []struct {
		targets []scheduler.TargetInfo
		want    []gpreempt.Warning
	}{
		{[]scheduler.TargetInfo{target(7, false)}, nil},
		{[]scheduler.TargetInfo{target(7, true), target(8, true), target(9, false)}, []gpreempt.Warning{gpreempt.WarnCannotSuspend.Warn("2 targets: process 7: no helper; process 8")}},
		{slices.Repeat([]scheduler.TargetInfo{target(8, true)}, 7), []gpreempt.Warning{gpreempt.WarnCannotSuspend.Warn("7 targets: " + strings.Repeat("process 8; ", 5) + "2 more")}},
	} {
		if diff := cmp.Diff(test.want, cannotSuspend(test.targets, why)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestSlowJobsAreOneWarning(t *testing.T) {
	job := func(name string, slow bool) scheduler.JobInfo {
		return scheduler.JobInfo{Name: name, Targets: 8, Ran: 0.0061, Over: 57*time.Second + time.Millisecond, Slow: slow}
	}
	const each = ": 8 processes, 0.6% of the last 57s"
	for _, test := range []struct {
		jobs []scheduler.JobInfo
		want []gpreempt.Warning
	}{
		{nil, nil},
		{[]scheduler.JobInfo{job("torch-1", false)}, nil},
		{[]scheduler.JobInfo{job("torch-1", false), job("torch-2", true)}, []gpreempt.Warning{
			gpreempt.WarnJobSlow.Warn("all processes of a job ran together for less than the share floor of 10%: torch-2" + each),
		}},
		{[]scheduler.JobInfo{job("a", true), job("b", true), job("c", true), job("d", true), job("e", true), job("f", true), job("g", true)}, []gpreempt.Warning{
			gpreempt.WarnJobSlow.Warn("all processes of a job ran together for less than the share floor of 10%: a" + each + "; b" + each + "; c" + each + "; d" + each + "; e" + each + "; 2 more"),
		}},
	} {
		if diff := cmp.Diff(test.want, jobsBelowFloor(test.jobs, 0.1)); diff != "" {
			t.Errorf("%d jobs (-want +got):\n%s", len(test.jobs), diff)
		}
	}
}

func TestNodeThatCannotBeReadIsAWarningUntilItCan(t *testing.T) {
	d, h := newDaemonOnHost(t, noGroups)
	h.addGPU(2, 4711)
	bad := "sys/class/kfd/kfd/topology/nodes/2/gpu_id"
	h.put(bad, "-1\n")
	look := func() (gpus int, warned []string) {
		d.findNewGPUs()
		for _, w := range d.warnings.list() {
			warned = append(warned, w.Code+": "+w.Text)
		}
		return len(d.inventory.GPUs()), warned
	}
	gpus, warned := look()
	want := []string{`GPU_UNREADABLE: KFD topology: node 2: ` + bad + `:1: "-1" is not a decimal number of 32 bits: ` +
		`see what the driver says of its GPU (dmesg | grep -i amdgpu), and compare with rocminfo`}
	if diff := cmp.Diff(want, warned); diff != "" || gpus != 1 {
		t.Errorf("%d GPUs; warnings (-want +got):\n%s", gpus, diff)
	}
	h.put(bad, "4711\n") // without another generation
	d.topologyRead = d.topologyRead.Add(-rereadUnreadable)
	if gpus, warned = look(); gpus != 2 || warned != nil {
		t.Errorf("%d GPUs, warnings %q once the node can be read", gpus, warned)
	}
}

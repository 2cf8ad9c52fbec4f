package e2e

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// warned returns the warning with a code, or nil.
func (d *daemon) warned(code string) *gpreemptv1.Warning {
	d.t.Helper()
	for _, w := range d.status().GetWarnings() {
		if w.GetCode() == code {
			return w
		}
	}
	return nil
}

func TestReloadOfARuleMakesARunningJobOffline(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startJob("simulation")
	d.eventually("the job is known", func() bool { return d.target(pid) != nil })
	lease := d.announce(t.Context())
	since := d.revision()
	d.reload(atOnce + `
  - name: simulations
    match:
      comm: "sim*"
    class: offline
    priority: 2
`)
	d.awaitTarget(pid, since, suspended)
	if got := d.target(pid); got.GetDecidedBy() != "rule simulations" || got.GetPriority() != 2 {
		t.Errorf("it is decided by %q with priority %d, want the new rule and 2", got.GetDecidedBy(), got.GetPriority())
	}
	d.reload(atOnce)
	d.awaitTarget(pid, since, running)
	d.checkRuns(pid)
	d.complete(lease.GetLeaseId())
	d.stopJob(pid)
}

func TestReloadOfAnInvalidFileChangesNothing(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	before, err := d.admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	// The first half of it would be good.
	d.reload(`policy:
  preset: share
  share_flor: 0.2
rules: []
log:
  level: loud
`)
	d.eventually("the warning", func() bool { return d.warned("CONFIG_REJECTED") != nil })
	r := d.ctl("status")
	for _, want := range []string{"1 warning", d.config + ":3", "share_flor", "share_floor", d.config + ":6", "loud", "try: "} {
		if !strings.Contains(r.Out, want) {
			t.Errorf("gpctl status does not say %q:\n%s", want, r.Out)
		}
	}
	after, err := d.admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	if by := d.target(pid).GetDecidedBy(); by != "rule training" {
		t.Errorf("the job is decided by %q, want the rule there was", by)
	}
	d.reload(atOnce)
	d.eventually("the warning goes", func() bool { return len(d.status().GetWarnings()) == 0 })
	d.stopJob(pid)
}

func TestReloadNamesKeysThatNeedARestart(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	d.reload(atOnce + "metrics:\n  address: 127.0.0.1:1\nlimits:\n  leases_per_user: 1\n")
	d.eventually("the warning", func() bool { return d.warned("RESTART_NEEDED") != nil })
	w := d.warned("RESTART_NEEDED")
	if !strings.Contains(w.GetText(), "metrics.address") || strings.Contains(w.GetText(), "leases_per_user") || w.GetRemedy() == "" {
		t.Errorf("the warning is %v, want the one key that needs a restart, and how", w)
	}
	// What needs none is in force.
	d.announce(t.Context())
	_, err := d.online.NotifyOnline(t.Context(), announcement())
	checkError(t, "a second lease", err, wantLeasesPerClient)
	// It is repeated while it applies, and no longer.
	d.reload(atOnce + "metrics:\n  address: 127.0.0.1:1\n")
	d.eventually("the limit is gone", func() bool {
		_, err := d.online.NotifyOnline(t.Context(), announcement())
		return err == nil
	})
	d.eventually("the warning stays", func() bool { return d.warned("RESTART_NEEDED") != nil })
	d.reload(atOnce)
	d.eventually("the warning goes", func() bool { return d.warned("RESTART_NEEDED") == nil })
}

// policy returns the policy in force.
func (d *daemon) policy() *gpreemptv1.Policy {
	d.t.Helper()
	resp, err := d.admin.GetPolicy(d.t.Context(), &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	return resp.GetPolicy()
}

// SetPolicy lasts until the next reload, whether the file has changed or not.
func TestReloadReplacesAPolicySetByAnAdmin(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	before := d.policy()
	d.check(0, "until the daemon reloads or restarts", "policy", "set", "shadow")
	if !d.policy().GetShadow() {
		t.Fatal("the policy is not in force")
	}
	d.reload(atOnce)
	d.eventually("the policy of the file is in force", func() bool { return !d.policy().GetShadow() })
	if diff := cmp.Diff(before, d.policy(), protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

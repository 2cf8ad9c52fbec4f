package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// check runs gpctl and checks its exit status and that it says something.
func (d *daemon) check(code int, says string, args ...string) {
	d.t.Helper()
	d.checkResult(d.ctl(args...), code, says, args)
}

func (d *daemon) checkResult(r result, code int, says string, args []string) {
	d.t.Helper()
	if r.Code != code || !strings.Contains(r.Out+r.Err, says) {
		d.t.Errorf("%s: exit status %d, %q, %q; want %d and %q", strings.Join(args, " "), r.Code, r.Out, r.Err, code, says)
	}
}

// export runs gplab trace export.
func (d *daemon) export(says string, args ...string) {
	d.t.Helper()
	args = append([]string{"trace", "export"}, args...)
	d.checkResult(d.lab(args...), 0, says, args)
}

func TestGpctlSuspendsAndResumes(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	target := fmt.Sprint(pid)

	since := d.revision()
	d.check(0, "undo: gpctl target resume "+target, "target", "suspend", target, "--ttl", "1m")
	d.awaitTarget(pid, since, suspended)
	d.checkFrozen(pid)
	d.check(0, "by-hand", "target", "explain", target)
	d.check(0, "is running, held running for", "target", "resume", target, "--hold", "1m")
	d.checkRuns(pid)

	// A hold takes precedence over a lease.
	lease, err := d.online.NotifyOnline(t.Context(), announcement())
	if err != nil {
		t.Fatal(err)
	}
	if lease.GetQuiesced() || lease.GetReason() != gpreemptv1.QuiesceReason_QUIESCE_REASON_HOLD {
		t.Errorf("answered %v, %v, want not quiet for the hold", lease.GetQuiesced(), lease.GetReason())
	}
	d.check(0, "hold", "target", "explain", target)
	since = d.revision()
	d.check(0, "is ", "target", "resume", target) // without --hold it ends the hold
	d.awaitTarget(pid, since, suspended)
	d.complete(lease.GetLeaseId())
	d.awaitTarget(pid, since, running)
	d.stopJob(pid)
}

func TestGpctlClassifiesAJobNoRuleMatches(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startJob("simulation")
	d.eventually("the job is known", func() bool { return d.target(pid) != nil })
	target := fmt.Sprint(pid)

	d.check(6, "gpctl target classify", "target", "suspend", target, "--ttl", "1m")
	lease := d.announce(t.Context())
	d.checkRuns(pid)
	since := d.revision()
	d.check(0, "class offline, priority 3, by admin", "target", "classify", target, "offline", "--priority", "3")
	d.awaitTarget(pid, since, suspended)
	d.checkFrozen(pid)
	since = d.revision()
	d.check(0, "class unmanaged, priority 7, by default", "target", "classify", target, "auto")
	d.awaitTarget(pid, since, running)
	d.checkRuns(pid)

	// After the ttl the rules apply again.
	since = d.revision()
	d.check(0, "by admin, for 5s", "target", "classify", target, "offline", "--ttl", "5s") // suspending takes less
	d.awaitTarget(pid, since, suspended)
	d.awaitTarget(pid, since, running)
	if got := d.target(pid); got.GetClass() != gpreemptv1.Class_CLASS_UNMANAGED || got.GetDecidedBy() != "default" {
		t.Errorf("after the ttl it is %v by %q, want unmanaged by default", got.GetClass(), got.GetDecidedBy())
	}
	d.complete(lease.GetLeaseId())
	d.stopJob(pid)
}

func TestDrainResumesEverything(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	lease := d.announce(t.Context())
	d.checkFrozen(pid)
	d.check(0, "draining: nothing is suspended", "drain", "on", "--wait")
	if got := d.target(pid).GetState(); got != running {
		t.Errorf("the job is %v when drain --wait answers", got)
	}
	d.checkRuns(pid)
	d.check(0, "yes: nothing is suspended", "status")
	second, err := d.online.NotifyOnline(t.Context(), announcement())
	if err != nil {
		t.Fatal(err)
	}
	if second.GetReason() != gpreemptv1.QuiesceReason_QUIESCE_REASON_DRAINING {
		t.Errorf("announced while draining: %v", second.GetReason())
	}
	since := d.revision()
	d.check(0, "leases suspend offline work again", "drain", "off")
	d.awaitTarget(pid, since, suspended)
	d.complete(lease.GetLeaseId())
	d.complete(second.GetLeaseId())
	d.awaitTarget(pid, since, running)
	d.stopJob(pid)
}

func TestShadowPolicyReportsAndDoesNotAct(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	d.check(0, "would be shadow; not changed", "policy", "set", "shadow", "--dry-run")
	d.check(0, "the policy is shadow", "policy", "set", "shadow")
	since := d.revision()
	lease, err := d.online.NotifyOnline(t.Context(), announcement())
	if err != nil {
		t.Fatal(err)
	}
	if lease.GetQuiesced() || lease.GetReason() != gpreemptv1.QuiesceReason_QUIESCE_REASON_SHADOW {
		t.Errorf("answered %v, %v, want not quiet for the shadow", lease.GetQuiesced(), lease.GetReason())
	}
	d.events.await("the shadow event", since, func(e *gpreemptv1.Event) bool {
		return e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_SHADOW && pidOf(e.GetTargetId()) == pid && e.GetToTarget() == suspended
	})
	d.checkRuns(pid)
	if n := d.target(pid).GetSuspends(); n != 0 {
		t.Errorf("the target was suspended %d times under a shadow policy", n)
	}
	var stats gpreemptv1.GetStatisticsResponse
	d.ctlJSON(&stats, "stats")
	if s := stats.GetStatistics(); s.GetShadowSuspends() != 1 || s.GetSuspends() != 0 {
		t.Errorf("counted %d shadow suspends and %d suspends, want 1 and 0", s.GetShadowSuspends(), s.GetSuspends())
	}

	since = d.revision()
	d.check(0, "the policy is strict", "policy", "set", "strict")
	d.awaitTarget(pid, since, suspended)
	d.complete(lease.GetLeaseId())
	d.awaitTarget(pid, since, running)
	d.stopJob(pid)
}

func TestEventsFollowStreamsEveryChange(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	cmd := exec.CommandContext(t.Context(), gpctl, "--socket", d.socket, "events", "--follow", "--all", "-o", "json")
	cmd.Env = environment()
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d.check(0, "suspended", "target", "suspend", fmt.Sprint(pid), "--ttl", "1m")
	d.check(0, "running", "target", "resume", fmt.Sprint(pid))
	d.check(0, "the policy is custom", "policy", "set", "strict", "--knob", "max_wait=1s", "--knob", "linger=1ms")

	// Until the policy changes; each line is one event.
	var said []string
	for seen := bufio.NewScanner(out); seen.Scan(); {
		var m gpreemptv1.WatchEventsResponse
		if err := protojson.Unmarshal(seen.Bytes(), &m); err != nil {
			t.Fatalf("%v in %s", err, seen.Text())
		}
		e := m.GetEvent()
		if want := uint64(len(said) + 1); e.GetRevision() != want {
			t.Errorf("revision %d, want %d", e.GetRevision(), want)
		}
		said = append(said, summary(e))
		if e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_POLICY {
			break
		}
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it ends by the signal
	if errs.Len() > 0 {
		t.Errorf("gpctl events --follow complains: %s", &errs)
	}
	var targets, admins []string
	for _, s := range said {
		if kind, what, _ := strings.Cut(s, " "); kind == "target" {
			targets = append(targets, what)
		} else if kind == "admin" {
			admins = append(admins, what)
		}
	}
	wantTargets := []string{
		"> running: seen", "running > suspending: by-hand", "suspending > suspended: done",
		"suspended > resuming: pin-over", "resuming > running: done",
	}
	if diff := cmp.Diff(wantTargets, targets); diff != "" {
		t.Error(diff)
	}
	if len(admins) != 3 || !strings.HasPrefix(admins[0], "target suspend") || !strings.HasPrefix(admins[1], "target resume") ||
		!strings.HasPrefix(admins[2], "policy set") {
		t.Errorf("the verbs of the admin are %q", admins)
	}
	d.stopJob(pid)
}

// summary returns the part of an event that is the same in each run.
func summary(e *gpreemptv1.Event) string {
	word := func(s fmt.Stringer, prefix string) string {
		w := strings.ToLower(strings.TrimPrefix(s.String(), prefix))
		if w == "unspecified" {
			return ""
		}
		return w
	}
	switch e.GetKind() {
	case gpreemptv1.EventKind_EVENT_KIND_TARGET:
		return "target " + strings.TrimSpace(word(e.GetFromTarget(), "TARGET_STATE_")+" > "+word(e.GetToTarget(), "TARGET_STATE_")) + ": " + e.GetCause()
	case gpreemptv1.EventKind_EVENT_KIND_ADMIN:
		_, what, _ := strings.Cut(e.GetMessage(), ": ")
		return "admin " + what
	default:
		return word(e.GetKind(), "EVENT_KIND_")
	}
}

func TestGpctlExitStatusNamesTheFailure(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	d.check(0, "no warnings", "status")
	d.check(2, "--ttl 2s", "target", "suspend", "1")                  // no ttl
	d.check(2, "--help", "policy", "set", "--knob", "no_such_knob=1") // no such knob
	d.check(4, "gpctl target list", "target", "explain", "1")         // no such target
	d.check(4, "lease_id", "lease", "release", "nonsense")            // no such lease
	d.check(6, "", "policy", "set", "no-such-preset")                 // refused
	d.check(6, "0 to 0.95", "policy", "set", "--knob", "share_floor=0.99")

	gone := start(t, atOnce)
	gone.stop()
	gone.check(3, "does not exist", "status") // no daemon
}

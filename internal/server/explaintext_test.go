package server

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestEachCheckSaysWhatItLookedAt(t *testing.T) {
	const now = time.Minute
	one := []scheduler.MemberFacts{{Key: gpreempt.ProcessKey{PID: 100, Start: 1}, Ready: true}}
	members := func(change func(m *scheduler.MemberFacts)) scheduler.Facts {
		m := one[0]
		change(&m)
		return scheduler.Facts{Members: []scheduler.MemberFacts{m}}
	}
	refusing := scheduler.MemberFacts{Key: gpreempt.ProcessKey{PID: 101, Start: 1}, Refusal: gpreempt.ReasonCannotSuspend}
	for _, tc := range []struct {
		check string
		facts scheduler.Facts
		want  string
	}{
		{scheduler.CheckClass, scheduler.Facts{Class: gpreempt.Online}, "class online, priority 0"},
		{
			scheduler.CheckClass,
			scheduler.Facts{Class: gpreempt.Offline, Priority: 5, Job: "train", Members: make([]scheduler.MemberFacts, 3)},
			"class offline, priority 5; 3 processes of job train",
		},
		{scheduler.CheckQuarantine, scheduler.Facts{QuarantinedUntil: now}, "none"},
		{scheduler.CheckQuarantine, scheduler.Facts{QuarantinedUntil: now + 5*time.Minute, QuarantineCause: scheduler.CauseQuarantine}, "ends in 5m0s"},
		{
			scheduler.CheckQuarantine,
			scheduler.Facts{QuarantinedUntil: now + time.Second, QuarantineCause: scheduler.CauseReset},
			"the driver reset a queue that was the process's, or may have been; ends in 1s",
		},
		{
			scheduler.CheckQuarantine,
			scheduler.Facts{QuarantinedUntil: now + time.Second, QuarantineCause: scheduler.CauseStuck},
			"a call of the process held its lock in the driver; ends in 1s",
		},
		{
			scheduler.CheckQuarantine, members(func(m *scheduler.MemberFacts) { m.Stuck = true }),
			"a call of the process holds its lock in the driver; none",
		},
		{scheduler.CheckDrain, scheduler.Facts{}, "not draining"},
		{scheduler.CheckDrain, scheduler.Facts{Draining: true}, "draining"},
		{scheduler.CheckBreaker, scheduler.Facts{}, "closed"},
		{
			scheduler.CheckBreaker,
			scheduler.Facts{Breakers: []scheduler.OpenBreaker{{GPU: 1, Closes: now + 30*time.Second}, {GPU: 2, Closes: now + time.Second}}},
			"GPU 1 open for 30s, GPU 2 open for 1s",
		},
		{scheduler.CheckPinRun, scheduler.Facts{PinnedToRun: now + 50*time.Millisecond}, "ends in 50ms"},
		{scheduler.CheckMustRun, scheduler.Facts{RunUntil: now + 10*time.Millisecond}, "must run for 10ms more; no share floor"},
		{
			scheduler.CheckMustRun,
			scheduler.Facts{RunUntil: now + 5*time.Millisecond, ShareFloor: 0.5, BudgetLeft: time.Millisecond},
			"must run for 5ms more; the share floor of 50% permits 1ms more of suspension",
		},
		{scheduler.CheckMustRun, scheduler.Facts{ShareFloor: 0.1, BudgetLeft: 18 * time.Second}, "the share floor of 10% permits 18s more of suspension"},
		{scheduler.CheckCap, scheduler.Facts{}, "no share cap"},
		{scheduler.CheckCap, scheduler.Facts{ShareCap: 0.5, CreditLeft: 4 * time.Second}, "the share cap of 50% permits to run for 4s more"},
		{scheduler.CheckCap, scheduler.Facts{ShareCap: 0.5, CapEnds: now + 3*time.Second}, "the share cap of 50% is reached; ends in 3s"},
		{scheduler.CheckMechanism, scheduler.Facts{Members: one}, "attached"},
		{scheduler.CheckMechanism, scheduler.Facts{Members: one, Shadow: true}, "not attached: a shadow policy attaches to nothing"},
		{scheduler.CheckMechanism, members(func(m *scheduler.MemberFacts) { m.Ready = false }), "not attached"},
		{
			scheduler.CheckMechanism,
			scheduler.Facts{Members: make([]scheduler.MemberFacts, 1), AttachAt: now + 20*time.Second},
			"not attached yet: attach_after ends in 20s, and a lease on its GPUs attaches at once",
		},
		{
			scheduler.CheckMechanism,
			scheduler.Facts{Members: make([]scheduler.MemberFacts, 1), AttachAt: scheduler.Never},
			"not attached before it has a queue",
		},
		{
			scheduler.CheckMechanism, members(func(m *scheduler.MemberFacts) { m.AttachStuck = true }),
			"a call of the process holds its lock in the driver, and it cannot be attached to",
		},
		{
			scheduler.CheckMechanism, members(func(m *scheduler.MemberFacts) { m.Refusal = gpreempt.ReasonDRMQueues }),
			"it has user queues of DRM, which no enabled mechanism can suspend",
		},
		{
			scheduler.CheckMechanism,
			scheduler.Facts{Members: append(one[:1:1], refusing)},
			"it could not be suspended or attached to at the last attempt: 101@1",
		},
		{
			scheduler.CheckMechanism,
			scheduler.Facts{Members: []scheduler.MemberFacts{refusing, {Key: gpreempt.ProcessKey{PID: 102, Start: 1}, Refusal: gpreempt.ReasonDRMQueues}}},
			"it has user queues of DRM, which no enabled mechanism can suspend: 102@1; it could not be suspended or attached to at the last attempt: 101@1",
		},
		{
			scheduler.CheckMechanism, members(func(m *scheduler.MemberFacts) {
				m.Refusal, m.Refusals, m.OnResist = gpreempt.ReasonResisted, 1, gpreempt.Resistance{KillAfter: 2}
			}),
			"it is traced, debugged or resumed by another program; 1 refused suspensions of process 100, on_resist: {kill: 2}",
		},
		{scheduler.CheckPinSuspend, scheduler.Facts{}, "none"},
		{scheduler.CheckPinSuspend, scheduler.Facts{Pin: scheduler.CauseByHand, PinnedToSuspend: now + time.Second}, "an admin suspended it; ends in 1s"},
		{
			scheduler.CheckPinSuspend,
			scheduler.Facts{Pin: scheduler.CauseHQDBudget, PinnedToSuspend: now + time.Second},
			"idle, and suspended to keep hardware slots free; ends in 1s",
		},
		{scheduler.CheckLease, scheduler.Facts{Priority: 5, Top: -1}, "no lease (target priority 5)"},
		{
			scheduler.CheckLease,
			scheduler.Facts{Top: 11, Owners: []gpreempt.ProcessKey{{PID: 7, Start: 1}, {PID: 8, Start: 1}}},
			"highest lease priority 11, target priority 0; not counted, because they are for this process: the leases of 7@1, 8@1",
		},
		{scheduler.CheckLinger, scheduler.Facts{LingerUntil: now + time.Second}, "ends in 1s"},
		{scheduler.CheckOtherwise, scheduler.Facts{}, "a target runs unless a check above decides"},
	} {
		tc.facts.Now = now
		if diff := cmp.Diff(tc.want, explained{tc.facts}.detail(tc.check)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.check, diff)
		}
	}
}

func TestTheVerdictSaysWhatBecomesOfATarget(t *testing.T) {
	shadow := scheduler.Facts{Shadow: true}
	for want, e := range map[string]scheduler.Explanation{
		"Running: no lease covers its GPUs (no-lease).":                                                    {State: scheduler.TargetRunning, Cause: scheduler.CauseNoLease},
		"Running: no lease covers its GPUs (no-lease); the share cap of 30% permits to run for 4.2s more.": {State: scheduler.TargetRunning, Cause: scheduler.CauseNoLease, Facts: scheduler.Facts{ShareCap: 0.3, CreditLeft: 4200 * time.Millisecond}},
		"Suspended: the share cap is used up (share-cap).":                                                 {State: scheduler.TargetSuspended, Suspend: true, Cause: scheduler.CauseShareCap, Facts: scheduler.Facts{ShareCap: 0.3, CapEnds: time.Second}},
		"Suspending: a lease covers its GPUs (lease).":                                                     {State: scheduler.TargetSuspending, Suspend: true, Cause: scheduler.CauseLease},
		"Suspended: a lease covers its GPUs (lease).":                                                      {State: scheduler.TargetSuspended, Suspend: true, Cause: scheduler.CauseLease},
		"Resuming: the last lease has ended (lease-ended).":                                                {State: scheduler.TargetResuming, Cause: scheduler.CauseLeaseEnded},
		"To be suspended: a lease covers its GPUs (lease).":                                                {State: scheduler.TargetRunning, Suspend: true, Cause: scheduler.CauseLease},
		"Running (the shadow policy suspends nothing): a lease covers its GPUs (lease).":                   {State: scheduler.TargetRunning, Suspend: true, Cause: scheduler.CauseLease, Facts: shadow},
	} {
		if got := verdictText(&e); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestEveryCauseOfTheDocumentsHasWords(t *testing.T) {
	text, err := os.ReadFile("../../docs/operate.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "## Causes")
	table, _, _ = strings.Cut(table, "**Exclude a GPU**")
	rows := regexp.MustCompile(`(?m)^\| ([^|]*) \|.*\|$`).FindAllStringSubmatch(table, -1)
	if len(rows) < 15 {
		t.Fatalf("%d rows of causes", len(rows))
	}
	for _, row := range rows[1:] { // after the heading
		for cause := range strings.SplitSeq(row[1], ", ") {
			if cause = strings.Trim(cause, "`"); api.Cause(cause) == cause {
				t.Errorf("%s has no words", cause)
			}
		}
	}
}

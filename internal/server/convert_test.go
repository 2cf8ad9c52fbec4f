package server

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// TestEnumsHaveTheNumbersOfTheAPI compares names, to detect a value added in the
// middle of either.
func TestEnumsHaveTheNumbersOfTheAPI(t *testing.T) {
	check := func(e protoreflect.Enum, prefix string, name func(uint8) string, aliases map[string]string) {
		t.Helper()
		values := e.Descriptor().Values()
		for i := range values.Len() {
			v := values.Get(i)
			api := strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(string(v.Name()), prefix), "_", "-"))
			got := name(uint8(v.Number()))
			if alias, ok := aliases[got]; ok {
				got = alias
			}
			if api != got && !(v.Number() == 0 && api == "unspecified") {
				t.Errorf("%s: %d is %q in the API and %q in the scheduler", prefix, v.Number(), api, got)
			}
		}
		if extra := name(uint8(values.Len())); !strings.HasSuffix(extra, fmt.Sprintf("(%d)", values.Len())) {
			t.Errorf("%s: the API has no %q", prefix, extra)
		}
	}
	check(gpreemptv1.TargetState(0), "TARGET_STATE_", func(n uint8) string { return scheduler.TargetState(n).String() }, nil)
	check(gpreemptv1.LeaseState(0), "LEASE_STATE_", func(n uint8) string { return scheduler.LeaseState(n).String() }, nil)
	check(gpreemptv1.LeaseEnd(0), "LEASE_END_", func(n uint8) string { return scheduler.LeaseEnd(n).String() }, nil)
	reasons := map[gpreempt.Reason]gpreemptv1.QuiesceReason{}
	for _, why := range scheduler.Answers() {
		if quiesceReason(why) == 0 {
			t.Errorf("the API has no reason for the answer %q", why)
		}
		if v := quiesceReason(why); api.EnumName(v) == string(why) {
			reasons[why] = v
		}
	}
	if diff := cmp.Diff(quiesceReasons, reasons); diff != "" {
		t.Errorf("reasons of answers in the API and in the scheduler (-API +scheduler):\n%s", diff)
	}
	if got := quiesceReason(gpreempt.ReasonResisted); got != gpreemptv1.QuiesceReason_QUIESCE_REASON_CANNOT_SUSPEND {
		t.Errorf("a target that resists is %v in the answer", got)
	}

	got := map[scheduler.RecordKind]gpreemptv1.EventKind{}
	for _, k := range []scheduler.RecordKind{
		scheduler.RecordTarget, scheduler.RecordLease, scheduler.RecordBreaker, scheduler.RecordPolicy, scheduler.RecordDrain, scheduler.RecordShadow,
	} {
		got[k] = gpreemptv1.EventKind(k)
	}
	if diff := cmp.Diff(map[scheduler.RecordKind]gpreemptv1.EventKind{
		scheduler.RecordTarget: gpreemptv1.EventKind_EVENT_KIND_TARGET, scheduler.RecordLease: gpreemptv1.EventKind_EVENT_KIND_LEASE,
		scheduler.RecordBreaker: gpreemptv1.EventKind_EVENT_KIND_BREAKER, scheduler.RecordPolicy: gpreemptv1.EventKind_EVENT_KIND_POLICY,
		scheduler.RecordDrain: gpreemptv1.EventKind_EVENT_KIND_DRAIN, scheduler.RecordShadow: gpreemptv1.EventKind_EVENT_KIND_SHADOW,
	}, got); diff != "" {
		t.Errorf("kinds of events (-want +got):\n%s", diff)
	}
	for _, c := range []gpreempt.Class{gpreempt.Unmanaged, gpreempt.Online, gpreempt.Offline} {
		if back, ok := classOf(classMessage(c)); !ok || back != c || !strings.EqualFold("CLASS_"+c.String(), classMessage(c).String()) {
			t.Errorf("class %v is %v in the API, and back %v", c, classMessage(c), back)
		}
	}
}

func FuzzParseLeaseID(f *testing.F) {
	for _, s := range []string{"", "-", "000000000000feed-1", "000000000000beef-1", "000000000000feed-01", "000000000000feed-18446744073709551616"} {
		f.Add(s)
	}
	prefix := leasePrefix(epoch)
	f.Fuzz(func(t *testing.T, s string) {
		id, err := parseLeaseID(prefix, s)
		if err == nil && leaseID(prefix, id) != s {
			t.Errorf("%q is read as %d, which is written %q", s, id, leaseID(prefix, id))
		}
		if err != nil && gpreempt.ReasonOf(err) != gpreempt.ReasonUnknownLease {
			t.Errorf("%q: %v, want UNKNOWN_LEASE", s, err)
		}
	})
}

func TestShadowEventsNameCommandRuleAndOwner(t *testing.T) {
	of := scheduler.Shadowed{Comm: "python", By: "rule train", GPUs: 1}
	with := func(change func(*scheduler.Shadowed)) *scheduler.Shadowed {
		s := of
		change(&s)
		return &s
	}
	for want, r := range map[string]scheduler.Record{
		"python, by rule train": {Shadow: with(func(s *scheduler.Shadowed) { s.Cause = scheduler.CauseLeaseEnded })},
		`python, by rule train, for "chat" of process 9`: {Lease: 1, Shadow: with(func(s *scheduler.Shadowed) { s.Client.PID, s.Label = 9, "chat" })},
		"python, by rule train, for process 9":           {Lease: 1, Shadow: with(func(s *scheduler.Shadowed) { s.Client.PID = 9 })},
		"python, by rule train, for an admin":            {Lease: 1, Shadow: with(func(*scheduler.Shadowed) {})},
		"python, by rule train, for a certificate":       {Lease: 1, Shadow: with(func(s *scheduler.Shadowed) { s.Client.Start = 5 })},
	} {
		if got := shadowMessage(r); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := ownerText(scheduler.Shadowed{Cause: scheduler.CauseHQDBudget}); got != "hqd-budget" {
		t.Errorf("without a lease: %q", got)
	}
}

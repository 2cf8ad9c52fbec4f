package term_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestEnumNamesAreDocumented(t *testing.T) {
	got := map[string][]string{
		"class":        term.EnumNames[gpreemptv1.Class](),
		"target state": term.EnumNames[gpreemptv1.TargetState](),
		"lease state":  term.EnumNames[gpreemptv1.LeaseState](),
		"lease end":    term.EnumNames[gpreemptv1.LeaseEnd](),
		"event":        term.EnumNames[gpreemptv1.EventKind](),
		"change":       term.EnumNames[gpreemptv1.QueueChange](),
		"reason":       term.EnumNames[gpreemptv1.QuiesceReason](),
	}
	want := map[string][]string{
		"class":        {"unmanaged", "online", "offline"},
		"target state": {"running", "suspending", "suspended", "resuming", "quarantined", "gone"},
		"lease state":  {"requested", "quiescing", "held", "ended"},
		"lease end":    {"completed", "expired", "disconnected", "client-died", "idle", "released"},
		"event":        {"target", "lease", "breaker", "policy", "drain", "shadow", "admin", "reset"},
		"change":       {"added", "modified", "removed"},
		"reason": {
			"done", "nothing-to-do", "max-wait", "deferred", "not-awaited", "share-floor", "unsafe", "shadow",
			"draining", "ended", "hold", "stuck", "drm-queues", "queue-reset", "cannot-suspend",
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
}

func TestClassNamesAreThoseOfTheDomain(t *testing.T) {
	want := []string{gpreempt.Unmanaged.String(), gpreempt.Online.String(), gpreempt.Offline.String()}
	if diff := cmp.Diff(want, term.EnumNames[gpreemptv1.Class]()); diff != "" {
		t.Errorf("(-domain +API):\n%s", diff)
	}
}

func TestParseEnumAcceptsEachName(t *testing.T) {
	for _, name := range term.EnumNames[gpreemptv1.QuiesceReason]() {
		e, err := term.ParseEnum[gpreemptv1.QuiesceReason](name)
		if err != nil || api.EnumName(e) != name {
			t.Errorf("ParseEnum(%q) = %v (%q), %v", name, e, api.EnumName(e), err)
		}
	}
	for _, s := range []string{"CLASS_OFFLINE", "Offline"} {
		if e, err := term.ParseEnum[gpreemptv1.Class](s); err != nil || e != gpreemptv1.Class_CLASS_OFFLINE {
			t.Errorf("ParseEnum(%q) = %v, %v", s, e, err)
		}
	}
}

func TestValuesWithoutANameAreNumbers(t *testing.T) {
	if got := api.EnumName(gpreemptv1.Class_CLASS_UNSPECIFIED); got != "" {
		t.Errorf("UNSPECIFIED = %q, want none", got)
	}
	if got := api.EnumName(gpreemptv1.Class(99)); got != "99" {
		t.Errorf("a value of a newer daemon = %q, want its number", got)
	}
	for _, s := range []string{"", "unspecified", "CLASS_UNSPECIFIED", "ofline"} {
		_, err := term.ParseEnum[gpreemptv1.Class](s)
		if err == nil {
			t.Errorf("ParseEnum(%q) accepted it", s)
			continue
		}
		if want := `invalid value "` + s + `": use one of unmanaged, online, offline`; err.Error() != want {
			t.Errorf("ParseEnum(%q): %q, want %q", s, err, want)
		}
	}
}

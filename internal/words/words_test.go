package words_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/words"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestWordsAreThoseOfTheDocumentation(t *testing.T) {
	got := map[string][]string{
		"class":        words.All[gpreemptv1.Class](),
		"target state": words.All[gpreemptv1.TargetState](),
		"lease state":  words.All[gpreemptv1.LeaseState](),
		"lease end":    words.All[gpreemptv1.LeaseEnd](),
		"suspend_when": words.All[gpreemptv1.SuspendWhen](),
		"linger":       words.All[gpreemptv1.Linger](),
		"gang":         words.All[gpreemptv1.GangScope](),
		"event":        words.All[gpreemptv1.EventKind](),
		"change":       words.All[gpreemptv1.QueueChange](),
		"reason":       words.All[gpreemptv1.QuiesceReason](),
	}
	want := map[string][]string{
		"class":        {"unmanaged", "online", "offline"},
		"target state": {"running", "suspending", "suspended", "resuming", "quarantined", "gone"},
		"lease state":  {"requested", "quiescing", "held", "ended"},
		"lease end":    {"completed", "expired", "disconnected", "client-died", "idle", "released"},
		"suspend_when": {"at-once", "eta", "slack"},
		"linger":       {"none", "fixed", "adaptive"},
		"gang":         {"process", "job"},
		"event":        {"target", "lease", "breaker", "policy", "drain", "shadow", "admin"},
		"change":       {"added", "modified", "removed"},
		"reason": {
			"done", "nothing-to-do", "max-wait", "deferred", "not-awaited", "share-floor", "unsafe", "shadow",
			"draining", "ended", "hold",
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("words (-want +got):\n%s", diff)
	}
}

// The config file and the API hand the scheduler's numbers over by conversion.
func TestSchedulerNumbersAreThoseOfTheAPI(t *testing.T) {
	got := []string{
		words.Of(gpreemptv1.SuspendWhen(scheduler.SuspendAtOnce)),
		words.Of(gpreemptv1.SuspendWhen(scheduler.SuspendETA)),
		words.Of(gpreemptv1.SuspendWhen(scheduler.SuspendSlack)),
		words.Of(gpreemptv1.Linger(scheduler.LingerNone)),
		words.Of(gpreemptv1.Linger(scheduler.LingerFixed)),
		words.Of(gpreemptv1.Linger(scheduler.LingerAdaptive)),
		words.Of(gpreemptv1.GangScope(scheduler.GangProcess)),
		words.Of(gpreemptv1.GangScope(scheduler.GangJob)),
	}
	want := []string{"at-once", "eta", "slack", "none", "fixed", "adaptive", "process", "job"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("words of the scheduler's enums (-want +got):\n%s", diff)
	}
}

func TestClassWordsAreThoseOfTheDomain(t *testing.T) {
	for _, w := range words.All[gpreemptv1.Class]() {
		if _, err := gpreempt.ParseClass(w); err != nil {
			t.Errorf("gpreempt.ParseClass(%q): %v", w, err)
		}
	}
}

func TestParseReadsWhatOfWrites(t *testing.T) {
	for _, w := range words.All[gpreemptv1.QuiesceReason]() {
		e, err := words.Parse[gpreemptv1.QuiesceReason](w)
		if err != nil || words.Of(e) != w {
			t.Errorf("Parse(%q) = %v (%q), %v", w, e, words.Of(e), err)
		}
	}
	for _, s := range []string{"LINGER_FIXED", "Fixed"} {
		if e, err := words.Parse[gpreemptv1.Linger](s); err != nil || e != gpreemptv1.Linger_LINGER_FIXED {
			t.Errorf("Parse(%q) = %v, %v", s, e, err)
		}
	}
}

func TestUnknownValuesAreSaidAsSuch(t *testing.T) {
	if got := words.Of(gpreemptv1.Class_CLASS_UNSPECIFIED); got != "" {
		t.Errorf("UNSPECIFIED = %q, want nothing", got)
	}
	if got := words.Of(gpreemptv1.Class(99)); got != "99" {
		t.Errorf("a value of a newer daemon = %q, want its number", got)
	}
	for _, s := range []string{"", "unspecified", "CLASS_UNSPECIFIED", "ofline"} {
		_, err := words.Parse[gpreemptv1.Class](s)
		if err == nil {
			t.Errorf("Parse(%q) accepted it", s)
			continue
		}
		if want := `"` + s + `" is none of unmanaged, online, offline`; err.Error() != want {
			t.Errorf("Parse(%q): %q, want %q", s, err, want)
		}
	}
}

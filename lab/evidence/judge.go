package evidence

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Result is what a verdict says.
type Result string

// The results.
const (
	Pass       Result = "PASS"
	Fail       Result = "FAIL"
	CannotTell Result = "CANNOT TELL"
)

// Verdict is what a profile makes of a run.
type Verdict struct {
	Result  Result `json:"result"`
	Profile string `json:"profile"`
	Origin  Origin `json:"origin"`
	// Reasons say why the result is not PASS, what decided first; empty for PASS.
	Reasons []string `json:"reasons,omitempty"`
	// Unverified is what was not looked at, and does not change the result.
	Unverified []string `json:"unverified,omitempty"`
	// Criteria has an entry for each protected arm and limit, in the order of arms and names.
	Criteria []Criterion `json:"criteria"`
}

// Criterion is a figure with its limit.
type Criterion struct {
	Arm  string `json:"arm"`
	Name string `json:"name"`
	// Figure is absent when it was not measured.
	Figure *float64 `json:"figure,omitempty"`
	Limit  float64  `json:"limit"`
	// AtLeast: the figure must be at least the limit; otherwise it must be below.
	AtLeast bool   `json:"at_least,omitempty"`
	Unit    string `json:"unit"`
	// Spread is how much the figure differs between the repeats.
	Spread float64 `json:"spread"`
	Result Result  `json:"result"`
	Why    string  `json:"why,omitempty"`
}

// Judge returns the verdict on a run. It is FAIL when a limit is exceeded or the run itself shows
// an error, and CANNOT TELL without what a verdict needs: only a run in which everything ran,
// nothing failed, and each figure is within its limit by more than the repeats differ is PASS.
func Judge(run *Run, p Profile) Verdict {
	v := Verdict{Result: Pass, Profile: p.Name, Origin: run.Origin}
	decided := 0
	note := func(result Result, format string, args ...any) {
		if v.Result != Fail {
			v.Result = result
		}
		at := len(v.Reasons)
		if result == Fail { // what decided comes first
			at = decided
			decided++
		}
		v.Reasons = slices.Insert(v.Reasons, at, fmt.Sprintf(format, args...))
	}
	run.complete(note)
	protected := 0
	for i := range run.Arms {
		arm := &run.Arms[i]
		if arm.Missing != "" {
			note(CannotTell, "%s was left out: %s", arm.Name, arm.Missing)
			continue
		}
		arm.sound(note)
		if arm.Kind != Protected {
			continue
		}
		protected++
		// A model has no hardware slots that could be looked at.
		if unread := arm.slotsUnread(); unread != "" && run.Origin != Simulated {
			v.Unverified = append(v.Unverified, arm.Name+": whether the hardware slots of suspended processes are empty"+unread)
		}
		for _, name := range slices.Sorted(maps.Keys(p.Limits)) {
			c, known := criteria[name]
			if !known {
				note(CannotTell, "the profile limits %q, which is not a criterion", name)
				continue
			}
			var base []Repeat
			if at := run.first(c.base); c.base != "" && at >= 0 {
				base = run.Arms[at].Repeats
			}
			got := c.evaluate(name, p.Limits[name], arm, base)
			v.Criteria = append(v.Criteria, got)
			if got.Result != Pass {
				note(got.Result, "%s: %s: %s", arm.Name, name, got.Why)
			}
		}
	}
	switch {
	case protected == 0:
		note(CannotTell, "no arm is protected")
	case len(p.Limits) == 0:
		note(CannotTell, "the profile has no limit")
	}
	return v
}

// slotsUnread says in how many repeats the slots of suspended processes were not read, and why in the first of them; "" if
// they were read in all.
func (a *Arm) slotsUnread() (text string) {
	n, why := 0, ""
	for i := range a.Repeats {
		if len(pool(a.Repeats[i:i+1], reading(HQDsSuspended))) == 0 {
			n++
			why = cmp.Or(why, a.Repeats[i].SlotsUnread)
		}
	}
	if n == 0 {
		return ""
	}
	text = fmt.Sprintf(", in %d of %d repeats", n, len(a.Repeats))
	if why != "" {
		text += ": " + why
	}
	return text
}

// complete notes what is missing in a run, and what it says of itself.
func (run *Run) complete(note func(Result, string, ...any)) {
	if run.Origin == Hardware && !strings.HasPrefix(run.Backend, "kfd") || run.Origin != Hardware && !strings.HasPrefix(run.Backend, string(run.Origin)) {
		note(CannotTell, "its origin is %s, and the daemon named %q: figures of two origins cannot be mixed", run.Origin, run.Backend)
	}
	if run.Planned == 0 && len(run.Arms) == 0 {
		note(CannotTell, "it has no arm")
	}
	for _, f := range run.Faults {
		result := CannotTell
		if f.Fails {
			result = Fail
		}
		if f.Arm == "" {
			note(result, "%s", f.What)
		} else {
			note(result, "%s, repeat %d: %s", f.Arm, f.Repeat+1, f.What)
		}
	}
	if n := len(run.Alarms); n > 0 {
		note(Fail, "%d alarms, the first from %s: %s", n, run.Alarms[0].From, run.Alarms[0].Text)
	}
	for _, arm := range run.Arms {
		if want := max(1, run.Planned); len(arm.Repeats) < want && arm.Missing == "" {
			note(CannotTell, "%s: %d of %d repeats were run", arm.Name, len(arm.Repeats), want)
		}
	}
}

// sound notes what went wrong in an arm.
func (a *Arm) sound(note func(Result, string, ...any)) {
	if a.Kind == Baseline {
		return
	}
	// In an arm to compare with it makes the comparison impossible; in a protected arm it is a failure.
	worse := CannotTell
	if a.Kind == Protected {
		worse = Fail
	}
	suspends := 0
	for i := range a.Repeats {
		r := &a.Repeats[i]
		where := fmt.Sprintf("%s, repeat %d: ", a.Name, i+1)
		suspends += len(r.Suspends)
		failed, first := 0, ""
		for _, q := range r.Requests {
			if q.Failed != "" {
				if failed == 0 {
					first = q.Failed
				}
				failed++
			}
		}
		if failed > 0 {
			note(worse, "%s%d of %d online requests failed, the first with: %s", where, failed, len(r.Requests), first)
		}
		if a.Kind != OfflineAlone && len(r.Requests) == 0 {
			note(CannotTell, "%sno online request was made", where)
		}
		if r.Unprotected > 0 && a.Kind == Protected {
			note(Fail, "%s%d requests ran without a lease", where, r.Unprotected)
		}
		if r.Lost > 0 || r.Repeated > 0 {
			note(Fail, "%s%d packets of offline work were lost and %d ran twice", where, r.Lost, r.Repeated)
		}
		if a.Kind != OnlineAlone {
			switch {
			case r.WorkUnit == "":
				note(CannotTell, "%sthe progress of the offline work is not known", where)
			case r.Work <= 0:
				note(worse, "%sthe offline work made no progress", where)
			}
		}
		if stuck := pool(a.Repeats[i:i+1], reading(HQDsSuspended)); len(stuck) > 0 && stuck[len(stuck)-1] > 0 {
			note(Fail, "%s%.0f hardware slots had queues of suspended processes", where, stuck[len(stuck)-1])
		}
	}
	if a.Kind == Protected && suspends == 0 && len(a.Repeats) > 0 {
		note(CannotTell, "%s: nothing was suspended", a.Name)
	}
}

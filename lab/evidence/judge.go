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
	// Arm is "" for what is about the whole run.
	Arm  string `json:"arm"`
	Name string `json:"name"`
	// Always: it is demanded of each run, whatever the profile says, and is listed only if it is
	// not kept. Its limit is 0: the figure counts what must not happen.
	Always bool `json:"always,omitempty"`
	// Figure is absent when it was not measured.
	Figure *float64 `json:"figure,omitempty"`
	Limit  float64  `json:"limit"`
	// AtLeast: the figure must be at least the limit; otherwise it must be below.
	AtLeast bool   `json:"at_least,omitempty"`
	Unit    string `json:"unit"`
	// Spread is how much the figure differs between the repeats, absent with fewer than two.
	Spread *float64 `json:"spread,omitempty"`
	Result Result   `json:"result"`
	Why    string   `json:"why,omitempty"`
	// Busy: the repeats differ because the host was too busy for an emulated machine.
	Busy bool `json:"busy,omitempty"`
}

// Judge returns the verdict on a run. It is FAIL when a limit is exceeded or the run itself shows
// an error, and CANNOT TELL without what a verdict needs: only a run in which everything ran,
// nothing failed, and each figure is within its limit by more than the repeats differ is PASS.
func Judge(run *Run, p Profile) Verdict {
	v := Verdict{Profile: p.Name, Origin: run.Origin}
	var found findings
	var limits []Criterion
	run.complete(found.add)
	protected, judged := 0, 0
	for i := range run.Arms {
		arm := &run.Arms[i]
		if arm.Missing != "" {
			found.add(finding{result: CannotTell, name: "arm", arm: arm.Name, leftOut: true, say: arm.Missing})
			continue
		}
		arm.sound(found.add)
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
				found.add(finding{result: CannotTell, name: "profile", say: fmt.Sprintf("the profile limits %q, which is not a criterion", name)})
				continue
			}
			if why := run.LeftOut[c.base]; c.base != "" && why != "" {
				v.Unverified = append(v.Unverified, fmt.Sprintf("%s: %s: there is no arm %s: %s", arm.Name, name, c.base, why))
				continue
			}
			var base []Repeat
			if at := run.first(c.base); c.base != "" && at >= 0 {
				base = run.Arms[at].Repeats
			}
			got := c.evaluate(name, p.Limits[name], arm, base)
			if got.Result == CannotTell && got.Figure != nil && !c.extent {
				if busy := run.busyHost(); busy != "" {
					got.Busy, got.Why = true, busy
				}
			}
			limits = append(limits, got)
			judged++
			if got.Result != Pass {
				found.add(finding{result: got.Result, name: name, limit: true, arm: arm.Name, say: got.Why})
			}
		}
	}
	switch {
	case protected == 0:
		found.add(finding{result: CannotTell, name: "arms", say: "no arm is protected"})
	case len(p.Limits) == 0:
		found.add(finding{result: CannotTell, name: "profile", say: "the profile has no limit"})
	case judged == 0:
		found.add(finding{result: CannotTell, name: "profile", say: "no limit of the profile applies to the arms of this run"})
	}
	v.Result, v.Reasons = found.result(), found.reasons(run)
	v.Criteria = append(found.criteria(), limits...)
	return v
}

// busyTail is how many times as long as its median the 99th percentile of the server alone may take on an emulated
// machine. Its processors are the host's: other work there makes some requests much slower than others.
const busyTail = 10

// busyHost says why an emulated run measured other work of its host, "" if it did not.
func (run *Run) busyHost() string {
	at := run.first(OnlineAlone)
	if run.Origin != Emulated || at < 0 {
		return ""
	}
	alone := pool(run.Arms[at].Repeats, latencies)
	if len(alone) < minForP50 || quantile(0.99)(alone) <= busyTail*quantile(0.5)(alone) {
		return ""
	}
	return fmt.Sprintf("this host is too busy to measure (the server alone needed %.3g ms, and %.3g ms at its slowest): repeat on a quiet host",
		quantile(0.5)(alone), quantile(1)(alone))
}

// slotsUnread says in how many repeats the slots of suspended processes were not read, and why in the first of them; "" if
// they were read in all.
func (a *Arm) slotsUnread() string {
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
	return fmt.Sprintf(", in %d of %d repeats", n, len(a.Repeats)) + after(": ", why)
}

// complete notes what is missing in a run, and what it says of itself.
func (run *Run) complete(note func(finding)) {
	if run.Origin == Hardware && !strings.HasPrefix(run.Backend, "kfd") || run.Origin != Hardware && !strings.HasPrefix(run.Backend, string(run.Origin)) {
		note(finding{result: CannotTell, name: "origin", say: fmt.Sprintf("its origin is %s, and the daemon named %q: figures of two origins cannot be mixed", run.Origin, run.Backend)})
	}
	if run.Planned == 0 && len(run.Arms) == 0 {
		note(finding{result: CannotTell, name: "arms", say: "it has no arm"})
	}
	for _, f := range run.Faults {
		result := CannotTell
		if f.Fails {
			result = Fail
		}
		note(finding{result: result, name: "faults", arm: f.Arm, repeat: f.Repeat + 1, n: 1, say: f.What})
	}
	if n := len(run.Alarms); n > 0 {
		what := "{n} alarms, the first"
		if n == 1 {
			what = "an alarm"
		}
		note(finding{result: Fail, name: "alarms", n: n, say: fmt.Sprintf("%s from %s: %s", what, run.Alarms[0].From, run.Alarms[0].Text)})
	}
	for _, arm := range run.Arms {
		if want := max(1, run.Planned); len(arm.Repeats) < want && arm.Missing == "" {
			note(finding{result: CannotTell, name: "repeats", arm: arm.Name, say: fmt.Sprintf("%d of %d repeats were run", len(arm.Repeats), want)})
		}
	}
}

// sound notes what went wrong in an arm.
func (a *Arm) sound(note func(finding)) {
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
		add := func(result Result, name string, n, of int, say string) {
			note(finding{result: result, name: name, arm: a.Name, repeat: i + 1, n: n, of: of, say: say})
		}
		suspends += len(r.Suspends)
		failed, first := 0, ""
		for _, q := range r.Requests {
			if q.Failed != "" {
				failed++
				first = cmp.Or(first, q.Failed)
			}
		}
		if failed > 0 {
			add(worse, "failed_requests", failed, len(r.Requests), "{n} of {of} online requests failed, the first with: "+first)
		}
		if a.Kind != OfflineAlone && len(r.Requests) == 0 {
			add(CannotTell, "requests", 0, 0, "no online request was made")
		}
		if r.Unprotected > 0 && a.Kind == Protected {
			add(Fail, "requests_without_lease", r.Unprotected, len(r.Requests), "{n} of {of} requests ran without a lease"+after(", the first because: ", r.UnprotectedWhy))
		}
		if r.Lost > 0 || r.Repeated > 0 {
			add(Fail, "packets", int(r.Lost+r.Repeated), 0, fmt.Sprintf("%d packets of offline work were lost and %d ran twice", r.Lost, r.Repeated))
		}
		if a.Kind != OnlineAlone {
			switch {
			case r.WorkUnit == "":
				add(CannotTell, "offline_progress", 0, 0, "the progress of the offline work is not known"+after(": ", r.WorkUnknown))
			case r.Work <= 0:
				add(worse, "offline_progress", 0, 0, "the offline work made no progress")
			}
		}
		if stuck := pool(a.Repeats[i:i+1], reading(HQDsSuspended)); len(stuck) > 0 && stuck[len(stuck)-1] > 0 {
			add(Fail, "slots_in_use", int(stuck[len(stuck)-1]), 0, "{n} hardware slots had queues of suspended processes")
		}
	}
	if a.Kind == Protected && suspends == 0 && len(a.Repeats) > 0 {
		note(finding{result: CannotTell, name: "suspends", arm: a.Name, say: nothingSuspended})
	}
}

// nothingSuspended is why a protected arm says nothing of suspends and resumes.
const nothingSuspended = "nothing was suspended"

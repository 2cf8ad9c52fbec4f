package report

import (
	"cmp"
	"fmt"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// The results of a check.
const (
	resultYes     = "yes"
	resultNo      = "NO"
	resultUnknown = "cannot tell"
)

// checkSection is the functional table: what each run shows about the function, without limits.
func checkSection(runs []evidence.Run, all []arm) section {
	s := section{ID: "checks", Title: "What was checked"}
	s.text("Whether the run did what it should, apart from how fast. The samples decide; nothing is assumed.")
	t := table{Head: []string{"run", "check", "result", "figures"}}
	for i := range runs {
		run := &runs[i]
		var own []arm
		for _, a := range all {
			if a.run == run {
				own = append(own, a)
			}
		}
		for _, c := range checks {
			if run.Origin == evidence.Simulated && c.name == slotCheck {
				continue // a model has none
			}
			result, text := c.check(run, own)
			t.Rows = append(t.Rows, []string{clean(run.Name), c.name, result, text})
		}
	}
	s.Tables = append(s.Tables, t)
	return s
}

// slotCheck is the name of the check that needs a driver.
const slotCheck = "hardware slots of suspended queues became empty"

var checks = []struct {
	name  string
	check func(*evidence.Run, []arm) (result, text string)
}{
	{"every arm ran", checkRan},
	{"online requests have a result", checkResults},
	{"offline work progressed in each repeat", checkProgress},
	{"offline work was suspended and resumed", checkSuspended},
	{"no packet of offline work was lost or repeated", checkPackets},
	{"at most one preemption for each request", checkPreemptions},
	{slotCheck, checkSlots},
	{"no fault of the run", checkFaults},
	{"no alarm of daemon or kernel", checkAlarms},
}

func verdictOf(ok bool) string {
	if ok {
		return resultYes
	}
	return resultNo
}

func checkRan(_ *evidence.Run, all []arm) (result, text string) {
	empty, repeats := 0, 0
	for i := range all {
		if len(all[i].Repeats) == 0 {
			empty++
		}
		for _, r := range all[i].Repeats {
			repeats++
			if r.Seconds <= 0 {
				empty++
			}
		}
	}
	return verdictOf(empty == 0 && repeats > 0), fmt.Sprintf("%d arms, %d repeats, %d did not run", len(all), repeats, empty)
}

func checkResults(_ *evidence.Run, all []arm) (result, text string) {
	done, failed := 0, 0
	for i := range all {
		done += len(all[i].latencies)
		failed += all[i].sum.Failed
	}
	if done+failed == 0 {
		return resultUnknown, "no requests"
	}
	return verdictOf(failed == 0), fmt.Sprintf("%d of %d", done, done+failed)
}

func checkProgress(_ *evidence.Run, all []arm) (result, text string) {
	repeats, without := 0, 0
	for i := range all {
		if all[i].Kind == evidence.OnlineAlone {
			continue
		}
		for _, r := range all[i].Repeats {
			repeats++
			if r.Work <= 0 {
				without++
			}
		}
	}
	if repeats == 0 {
		return resultUnknown, "no repeat has offline work"
	}
	return verdictOf(without == 0), fmt.Sprintf("%d of %d repeats", repeats-without, repeats)
}

func checkSuspended(_ *evidence.Run, all []arm) (result, text string) {
	protected, suspended, resumed := 0, 0, 0
	for i := range all {
		if all[i].Kind == evidence.Protected {
			protected++
			suspended += len(timed(&all[i], suspends))
			resumed += len(timed(&all[i], resumes))
		}
	}
	text = fmt.Sprintf("%d suspensions, %d resumes", suspended, resumed)
	switch {
	case protected == 0:
		return resultUnknown, "no protected arm"
	case suspended == 0 || resumed == 0:
		return resultUnknown, text
	}
	return resultYes, text
}

func checkPackets(_ *evidence.Run, all []arm) (result, text string) {
	lost, repeated, work := uint64(0), uint64(0), 0.0
	for i := range all {
		work += all[i].sum.WorkRate
		lost += all[i].sum.Lost
		repeated += all[i].sum.Repeated
	}
	text = fmt.Sprintf("%d lost, %d repeated", lost, repeated)
	if lost+repeated == 0 && work <= 0 {
		return resultUnknown, "no offline work"
	}
	return verdictOf(lost+repeated == 0), text
}

func checkPreemptions(_ *evidence.Run, all []arm) (result, text string) {
	most, n := 0, 0
	for i := range all {
		if all[i].Kind != evidence.Protected {
			continue
		}
		for _, r := range all[i].Repeats {
			for _, q := range r.Requests {
				n++
				most = max(most, q.Preemptions)
			}
		}
	}
	if n == 0 {
		return resultUnknown, "no request of a protected arm"
	}
	return verdictOf(most <= 1), fmt.Sprintf("at most %d", most)
}

func checkSlots(_ *evidence.Run, all []arm) (result, text string) {
	readings, most, why := 0, 0.0, ""
	for i := range all {
		for _, r := range all[i].Repeats {
			why = cmp.Or(why, r.SlotsUnread)
			for _, sample := range r.Samples {
				if v, ok := sample.Values[evidence.HQDsSuspended]; ok {
					readings++
					most = max(most, v)
				}
			}
		}
	}
	if readings == 0 {
		return resultUnknown, "the slots were not read while queues were suspended: " + cmp.Or(clean(why), "no reason is known")
	}
	return verdictOf(most == 0), fmt.Sprintf("%d readings, at most %g slots in use", readings, most)
}

func checkFaults(run *evidence.Run, _ []arm) (result, text string) {
	return verdictOf(len(run.Faults) == 0), fmt.Sprintf("%d faults", len(run.Faults))
}

func checkAlarms(run *evidence.Run, _ []arm) (result, text string) {
	return verdictOf(len(run.Alarms) == 0), fmt.Sprintf("%d alarms", len(run.Alarms))
}

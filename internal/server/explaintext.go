package server

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// The words for what the scheduler reports as facts: why a target runs or is suspended.

// verdictText says what becomes of a target, in words and with the cause of docs/operate.md.
func verdictText(e *scheduler.Explanation) string {
	state, more := "Running", ""
	switch {
	case e.State == scheduler.TargetSuspending:
		state = "Suspending"
	case e.State == scheduler.TargetSuspended:
		state = "Suspended"
	case e.State == scheduler.TargetResuming:
		state = "Resuming"
	case e.Suspend && e.Facts.Shadow:
		state = "Running (the shadow policy suspends nothing)"
	case e.Suspend:
		state = "To be suspended"
	case e.Cause == scheduler.CauseNoLease && e.Facts.ShareCap > 0:
		more = "; " + explained{e.Facts}.shareCap()
	}
	return fmt.Sprintf("%s: %s (%s)%s.", state, api.Cause(string(e.Cause)), e.Cause, more)
}

// explained are facts with the words for them.
type explained struct{ scheduler.Facts }

// detail says what a check has looked at.
func (x explained) detail(check string) string {
	switch check {
	case scheduler.CheckClass:
		text := fmt.Sprintf("class %v, priority %d", x.Class, x.Priority)
		if x.Job != "" {
			text += fmt.Sprintf("; %d processes of job %s", len(x.Members), x.Job)
		}
		return text
	case scheduler.CheckQuarantine:
		return x.quarantine()
	case scheduler.CheckDrain:
		return map[bool]string{true: "draining", false: "not draining"}[x.Draining]
	case scheduler.CheckBreaker:
		return x.breaker()
	case scheduler.CheckPinRun:
		return x.ends(x.PinnedToRun)
	case scheduler.CheckMustRun:
		return x.mustRun()
	case scheduler.CheckMechanism:
		return x.mechanism()
	case scheduler.CheckPinSuspend:
		return x.pinned()
	case scheduler.CheckCap:
		return x.shareCap()
	case scheduler.CheckLease:
		return x.lease()
	case scheduler.CheckLinger:
		return x.ends(x.LingerUntil)
	case scheduler.CheckOtherwise:
		return "a target runs unless a check above decides"
	}
	return ""
}

// left is the time until t.
func (x explained) left(t scheduler.Time) time.Duration {
	return (t - x.Now).Round(time.Millisecond)
}

// ends describes something that lasts until a time.
func (x explained) ends(until scheduler.Time) string {
	if until <= x.Now {
		return "none"
	}
	return fmt.Sprintf("ends in %v", x.left(until))
}

// members returns good, or bad with the members for which it is true.
func (x explained) members(good, bad string, is func(scheduler.MemberFacts) bool) string {
	var keys []string
	for _, m := range x.Members {
		if is(m) {
			keys = append(keys, m.Key.String())
		}
	}
	switch {
	case len(keys) == 0:
		return good
	case len(x.Members) == 1:
		return bad
	default:
		return bad + ": " + strings.Join(keys, ", ")
	}
}

func (x explained) pinned() string {
	switch x.Pin {
	case "":
		return "none"
	case scheduler.CauseByHand:
		return "an admin suspended it; " + x.ends(x.PinnedToSuspend)
	default:
		return "idle, and suspended to keep hardware slots free; " + x.ends(x.PinnedToSuspend)
	}
}

func (x explained) quarantine() string {
	ends := x.ends(x.QuarantinedUntil)
	stuck := x.members("", "a call of the process holds its lock in the driver", func(m scheduler.MemberFacts) bool { return m.Stuck })
	switch {
	case stuck != "":
		return stuck + "; " + ends
	case x.Now < x.QuarantinedUntil && x.QuarantineCause == scheduler.CauseReset:
		return "the driver reset a queue that was the process's, or may have been; " + ends
	case x.Now < x.QuarantinedUntil && x.QuarantineCause == scheduler.CauseStuck:
		return "a call of the process held its lock in the driver; " + ends
	}
	return ends
}

func (x explained) breaker() string {
	var open []string
	for _, b := range x.Breakers {
		open = append(open, fmt.Sprintf("GPU %v open for %v", b.GPU, x.left(b.Closes)))
	}
	return cmp.Or(strings.Join(open, ", "), "closed")
}

func (x explained) mustRun() string {
	floor := "no share floor"
	if x.ShareFloor > 0 {
		floor = fmt.Sprintf("the share floor of %.0f%% permits %v more of suspension", 100*x.ShareFloor, x.BudgetLeft.Round(time.Millisecond))
	}
	if x.Now < x.RunUntil {
		return fmt.Sprintf("must run for %v more; %s", x.left(x.RunUntil), floor)
	}
	return floor
}

func (x explained) shareCap() string {
	text := fmt.Sprintf("the share cap of %.0f%%", 100*x.ShareCap)
	switch {
	case x.ShareCap == 0:
		return "no share cap"
	case x.Now < x.CapEnds:
		return text + " is reached; " + x.ends(x.CapEnds)
	}
	return fmt.Sprintf("%s permits to run for %v more", text, x.CreditLeft.Round(time.Millisecond))
}

func (x explained) mechanism() string {
	if x.Shadow {
		return "not attached: a shadow policy attaches to nothing"
	}
	var refuses string
	for _, o := range slices.Backward(gpreempt.Obstacles()) {
		if text := x.members("", "it "+o.Obstacle(), func(m scheduler.MemberFacts) bool { return m.Refusal == o }); text != "" {
			refuses += map[bool]string{true: "; "}[refuses != ""] + text
		}
	}
	stuck := x.members("", "a call of the process holds its lock in the driver, and it cannot be attached to", func(m scheduler.MemberFacts) bool { return m.AttachStuck })
	switch {
	case refuses != "":
		for _, m := range x.Members {
			if m.Refusals > 0 || m.OnResist.Enforced() {
				refuses += fmt.Sprintf("; %d refused suspensions of process %d, on_resist: %v", m.Refusals, m.Key.PID, m.OnResist)
			}
		}
		return refuses
	case stuck != "":
		return stuck
	}
	text := x.members("attached", "not attached", func(m scheduler.MemberFacts) bool { return !m.Ready })
	switch {
	case x.AttachAt <= x.Now:
		return text
	case x.AttachAt == scheduler.Never:
		return text + " before it has a queue"
	}
	return fmt.Sprintf("%s yet: attach_after ends in %v, and a lease on its GPUs attaches at once", text, x.left(x.AttachAt))
}

func (x explained) lease() string {
	text := fmt.Sprintf("no lease (target priority %d)", x.Priority)
	if x.Top >= 0 {
		text = fmt.Sprintf("highest lease priority %d, target priority %d", x.Top, x.Priority)
	}
	for i, owner := range x.Owners {
		text += fmt.Sprintf("%s%v", map[bool]string{true: "; not counted, because they are for this process: the leases of ", false: ", "}[i == 0], owner)
	}
	return text
}

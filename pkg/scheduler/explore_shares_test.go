package scheduler

import "time"

// What the explorer knows of the share floor and the share cap.

// charge empties or fills the share budget of a job.
func (x *explored) charge(g *modelUnit) {
	dt := x.now - g.chargedAt
	g.chargedAt = x.now
	switch limit := x.policies[x.policy].ShareWindow / 2; {
	case x.policies[x.policy].ShareFloor == 0:
	case g.away:
		g.budget -= dt
	default:
		g.budget = min(g.budget+min(dt, limit), limit)
	}
}

// start fills the buckets.
func (x *explored) start() {
	for i := range x.units {
		x.units[i].budget = x.core.policy.ShareWindow
	}
	for i := range x.credit {
		x.credit[i] = x.core.policy.ShareWindow
	}
}

// credits returns the credits of the processes as of now. A job is suspended or runs as a whole.
func (x *explored) credits() [mostProcesses]time.Duration {
	credit, dt := x.credit, x.now-x.creditAt
	for i := range x.places {
		switch full := x.policies[x.policy].maxCredit(); {
		case x.policies[x.policy].ShareCap == 1 || x.processes[i].unmanaged:
		case x.member(x.places[i].unit, func(i int) bool { return x.processes[i].away }):
			credit[i] = min(credit[i]+min(dt, full+x.policies[x.policy].MinRun), full)
		default:
			credit[i] = max(credit[i]-dt, -x.policies[x.policy].MinRun)
		}
	}
	return credit
}

// member reports whether something is true of a process of a job that is not unmanaged.
func (x *explored) member(g uint8, is func(int) bool) bool {
	for i, at := range x.places {
		if at.unit == g && !x.processes[i].unmanaged && is(i) {
			return true
		}
	}
	return false
}

// usedUp reports whether the share cap asks to suspend a job: from when its credit, the least of its
// processes, is used until it is full.
func (x *explored) usedUp(g uint8) bool {
	credit, least := x.credits(), time.Duration(1)
	if x.units[g].capped {
		least = x.policies[x.policy].maxCredit()
	}
	return x.policies[x.policy].ShareCap < 1 && x.member(g, func(i int) bool { return credit[i] < least })
}

// reclassify changes the class of a process. What it may run goes with it.
func (x *explored) reclassify(n int) {
	x.credit, x.creditAt = x.credits(), x.now
	p, g := &x.processes[n], x.places[n].unit
	if p.unmanaged = !p.unmanaged; p.unmanaged {
		return
	}
	least := x.credit[n]
	x.member(g, func(i int) bool { least = min(least, x.credit[i]); return false })
	x.member(g, func(i int) bool { x.credit[i] = least; return false })
}

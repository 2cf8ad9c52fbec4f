package scheduler

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ParkAfterIdle is how long a target has had no work, and no new queue, before the HQD
// budget may park it. A parked target that is resumed begins anew, except at the end of a
// turn of that length or more, so that no target is parked more often than that.
const ParkAfterIdle = time.Second

// HQDBudget divides the slots for compute queues of every GPU, in percent. When more queues
// are mapped than it permits, idle offline targets are parked: suspended without a lease, the
// lowest priority first, until the rest fits. The zero value parks nothing.
type HQDBudget struct {
	// Online is what offline queues leave free for the queues of all others.
	Online int `json:"online"`
	// Offline is the most that queues of offline targets may take.
	Offline int `json:"offline"`
	// Spare is what all queues together leave free, for those that are created next.
	Spare int `json:"spare"`
}

// On reports whether the budget parks anything.
func (b HQDBudget) On() bool { return b != HQDBudget{} }

// Validate checks the shares.
func (b HQDBudget) Validate() error {
	switch {
	case !b.On():
		return nil
	case b.Online < 0 || b.Offline < 0 || b.Spare < 0:
		return fmt.Errorf("online %d, offline %d, spare %d: a share is at least 0 percent", b.Online, b.Offline, b.Spare)
	case b.Online+b.Offline+b.Spare != 100:
		return errors.New("online, offline and spare are percent of the same slots: their sum must be 100")
	}
	return nil
}

// GPUQueues is a number of compute queues on a GPU.
type GPUQueues struct {
	GPU    gpreempt.GPUID `json:"gpu"`
	Queues int            `json:"queues"`
}

// parking is what the HQD budget keeps beside the gangs.
type parking struct {
	budget HQDBudget
	timer  timer
}

// fire does nothing: every Step looks at the budget again.
func (*parking) fire(*Core) {}

// hqdUse is the use of the slots of a GPU, as the last balance found it.
type hqdUse struct {
	// all and offline are the compute queues, parked ones included.
	all, offline int
	// mapped and mappedOffline are without those of parked targets.
	mapped, mappedOffline int
}

// over returns by how many queues a number of queues is above the budget of the GPU; 0 or
// less for none, and for a GPU whose slots are not known.
func (b HQDBudget) over(u *gpu, all, offline int) int {
	if u.slots == 0 {
		return 0
	}
	return max(all-u.slots*(100-b.Spare)/100, offline-u.slots*b.Offline/100)
}

func (c *Core) targetLoad(ev TargetLoad) {
	t := c.targets[ev.Target]
	if t == nil {
		return
	}
	if !t.loaded || t.busy && !ev.Busy {
		t.idleSince = c.now
	}
	t.loaded, t.busy, t.load = true, ev.Busy, ev.Queues
}

// setHQDBudget replaces the budget. Without one nothing stays parked.
func (c *Core) setHQDBudget(b HQDBudget) {
	c.parking.budget = b
	if b.On() {
		return
	}
	c.timers.clear(&c.parking.timer)
	for _, t := range c.order {
		c.unpark(t.gang)
	}
}

func (c *Core) unpark(g *gang) {
	if !g.parked {
		return
	}
	since := c.now
	if g.suspended && c.now >= c.turnEnds(g) && c.policy.MaxSuspend >= ParkAfterIdle {
		since += c.policy.MinRun - ParkAfterIdle // it takes over from others as soon as it may
	}
	g.parked = false
	for _, m := range g.members {
		m.idleSince = max(m.idleSince, since)
	}
	c.mark(g)
}

// active notes that the target did something: it is not idle now.
func (c *Core) active(t *target) {
	if t.loaded {
		t.idleSince = c.now
	}
	c.unpark(t.gang)
}

// balance decides which gangs the HQD budget parks. It counts parked gangs and those that a
// lease suspends as if they ran, so that a decision does not depend on its own effect.
func (c *Core) balance() {
	p := c.parking
	if !p.budget.On() {
		return
	}
	c.countQueues()
	var idle []*gang
	for _, t := range c.order {
		g := t.gang
		g.wanted = false
		if g.members[0] == t && c.mayPark(g) && c.hasTurn(g) {
			idle = append(idle, g)
		}
	}
	slices.SortStableFunc(idle, func(a, b *gang) int {
		return cmp.Or(cmp.Compare(b.parkedRank(), a.parkedRank()), cmp.Compare(a.priority, b.priority))
	})
	for _, g := range idle {
		if g.relieves(p.budget) {
			g.wanted = true
			for _, m := range g.members {
				m.addTo(c, -1)
			}
		}
	}
	for _, t := range c.order {
		switch g := t.gang; {
		case g.members[0] != t:
		case g.wanted && !g.parked:
			g.parked = true
			c.mark(g)
		case g.parked && !g.wanted && (!c.mayPark(g) || c.spareBudget(g) <= 0 || c.fits(g)):
			c.unpark(g)
		}
	}
	c.setParkingTimer()
}

func (g *gang) parkedRank() int {
	if g.parked {
		return 1
	}
	return 0
}

// countQueues counts the compute queues of every GPU.
func (c *Core) countQueues() {
	for _, u := range c.gpuOrder {
		u.use = hqdUse{}
	}
	for _, t := range c.order {
		t.addTo(c, 1)
		for _, q := range t.load {
			if u := c.gpus[q.GPU]; u != nil && !t.unmapped() {
				u.use.mapped += q.Queues
				if t.class == gpreempt.Offline {
					u.use.mappedOffline += q.Queues
				}
			}
		}
	}
}

// unmapped reports whether the target is off the GPUs because it is parked. One that a lease
// suspends counts as mapped: it returns when the lease ends.
func (t *target) unmapped() bool { return t.gang.parked && t.state == TargetSuspended }

// addTo adds the queues of the target to those of its GPUs.
func (t *target) addTo(c *Core, sign int) {
	for _, q := range t.load {
		if u := c.gpus[q.GPU]; u != nil {
			u.use.all += sign * q.Queues
			if t.class == gpreempt.Offline {
				u.use.offline += sign * q.Queues
			}
		}
	}
}

// relieves reports whether the gang has queues on a GPU with too many.
func (g *gang) relieves(b HQDBudget) bool {
	return slices.ContainsFunc(g.gpus, func(u *gpu) bool { return b.over(u, u.use.all, u.use.offline) > 0 && g.queuesOn(u.id) > 0 })
}

func (g *gang) queuesOn(id gpreempt.GPUID) (n int) {
	for _, m := range g.members {
		for _, q := range m.load {
			if q.GPU == id {
				n += q.Queues
			}
		}
	}
	return n
}

// fits reports whether a parked gang that need not be parked can return now, and counts it as
// mapped then: the gang that is parked in its place has to be suspended first.
func (c *Core) fits(g *gang) bool {
	n := func(u *gpu) (n int) {
		for _, m := range g.members {
			for _, q := range m.load {
				if q.GPU == u.id && m.unmapped() {
					n += q.Queues
				}
			}
		}
		return n
	}
	for _, u := range g.gpus {
		if n(u) > 0 && c.parking.budget.over(u, u.use.mapped+n(u), u.use.mappedOffline+n(u)) > 0 {
			return false
		}
	}
	for _, u := range g.gpus {
		u.use.mapped, u.use.mappedOffline = u.use.mapped+n(u), u.use.mappedOffline+n(u)
	}
	return true
}

// mayPark reports whether nothing forbids that the gang is parked: no check asks that it runs,
// and every member has been idle for long enough.
func (c *Core) mayPark(g *gang) bool {
	return !c.policy.Shadow && g.idle() && c.now >= c.idleAt(g) && !c.mustNotPark(g)
}

// idle reports whether it is known that no member has work.
func (g *gang) idle() bool {
	return !g.any(func(t *target) bool { return !t.loaded || t.busy })
}

// mustNotPark reports whether a check asks that the gang runs.
func (c *Core) mustNotPark(g *gang) bool {
	for i := range len(checks) - 1 {
		if !checks[i].suspend && checks[i].cause(c, g) != "" {
			return true
		}
	}
	return false
}

// hasTurn reports whether the gang can be chosen. Its turn ends a while before it has to run,
// so that another can take its place first.
func (c *Core) hasTurn(g *gang) bool {
	return (!g.suspended || c.now < c.turnEnds(g)) && c.spareBudget(g) > c.spareLead()
}

func (c *Core) turnEnds(g *gang) Time {
	return g.suspendedSince + c.policy.MaxSuspend - c.policy.MaxSuspend/8
}

func (c *Core) spareLead() time.Duration { return c.budgetCap() / 16 }

// spareBudget returns how much of the share budget parking may use up: half of it is left for
// leases.
func (c *Core) spareBudget(g *gang) time.Duration {
	if floorPPM(c.policy.ShareFloor) == 0 {
		return Never
	}
	return c.budgetLeft(g) - c.budgetCap()/2
}

// idleAt returns since when every member has been idle for long enough.
func (c *Core) idleAt(g *gang) (at Time) {
	for _, m := range g.members {
		at = max(at, m.idleSince+ParkAfterIdle)
	}
	return at
}

// setParkingTimer arms the timer for the next time at which balance may decide otherwise
// without an event.
func (c *Core) setParkingTimer() {
	p := c.parking
	due := Never
	add := func(t Time) {
		if t > c.now {
			due = min(due, t)
		}
	}
	for _, t := range c.order {
		g := t.gang
		switch {
		case g.members[0] != t:
		case g.parked:
			add(c.turnEnds(g))
			if spare := c.spareBudget(g); spare != Never {
				add(c.now + spare)
				add(c.now + spare - c.spareLead())
			}
		case !c.policy.Shadow && g.idle() && !c.mustNotPark(g) && g.relieves(p.budget):
			add(c.idleAt(g))
			if missing := c.spareLead() - c.spareBudget(g); missing >= 0 {
				// It fills while the gang runs, see charge.
				add(c.now + max(time.Millisecond, time.Duration(float64(missing)*c.policy.ShareFloor/(1-c.policy.ShareFloor))))
			}
		}
	}
	if due == Never {
		c.timers.clear(&p.timer)
	} else {
		c.timers.set(&p.timer, due)
	}
}

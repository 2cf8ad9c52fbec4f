package scheduler

import (
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// A lease suspends neither its owner nor the owner's kin. Who announces has work that somebody
// waits for, whatever class a rule gave it; and a lease that waits for its own end is of no use.
// The leases of others suspend them as before. See docs/adr/0055.

// setOwner sets the owner of a client that has none.
func (c *Core) setOwner(cl *client, owner gpreempt.ProcessKey) {
	if cl.id.IsAdmin() || owner.IsZero() || !cl.owner.IsZero() {
		return
	}
	cl.owner = owner
	c.owners[owner]++
	c.rejoinKin(owner)
}

// leaveOwner is called when a client is gone.
func (c *Core) leaveOwner(cl *client) {
	if cl.owner.IsZero() {
		return
	}
	if c.owners[cl.owner]--; c.owners[cl.owner] == 0 {
		delete(c.owners, cl.owner)
	}
	c.rejoinKin(cl.owner)
}

// rejoinKin moves the owner and its kin to the jobs where they belong now, and has settle look
// at these: a lease may have become their own.
func (c *Core) rejoinKin(owner gpreempt.ProcessKey) {
	for _, t := range c.order {
		switch {
		case t.Target != owner && !slices.Contains(t.Kin, owner):
		case slices.Equal(t.job.owners, c.ownersOf(t)):
			c.mark(t.job)
		default:
			c.leave(t)
			c.join(t)
		}
	}
}

// ownersOf returns the owners whose leases do not suspend the target, by key.
func (c *Core) ownersOf(t *target) (owners []gpreempt.ProcessKey) {
	if len(c.owners) == 0 {
		return nil
	}
	add := func(key gpreempt.ProcessKey) {
		if c.owners[key] > 0 {
			owners = append(owners, key)
		}
	}
	add(t.Target)
	for _, key := range t.Kin {
		add(key)
	}
	slices.SortFunc(owners, gpreempt.ProcessKey.Compare)
	return slices.Compact(owners)
}

// ownedBy reports whether the job is the work of the lease's owner.
func (j *job) ownedBy(l *lease) bool {
	return len(j.owners) > 0 && slices.Contains(j.owners, l.client.owner)
}

// offline reports whether the class of the job permits a suspension.
func (j *job) offline() bool { return len(j.members) > 0 && j.members[0].Class == gpreempt.Offline }

// outrankedBy reports whether the lease has the higher priority, and is not the job's own.
func (j *job) outrankedBy(l *lease) bool { return l.req.Priority > j.priority && !j.ownedBy(l) }

// leasesChanged has settle look at the jobs of a GPU for which a lease that began or ended
// can make a difference.
func (c *Core) leasesChanged(u *gpu) {
	if u.setTop() {
		c.markGPU(u)
		return
	}
	for _, j := range u.jobs {
		if len(j.owners) > 0 {
			c.mark(j)
		}
	}
}

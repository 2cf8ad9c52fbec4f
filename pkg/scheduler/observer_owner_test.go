package scheduler_test

import (
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// changeOwner sets the owner of a client, or removes it: the owner and its kin change jobs.
func (o *Observer) changeOwner(client scheduler.ClientID, owner gpreempt.ProcessKey) {
	if o.owners[client] == owner {
		return
	}
	before := map[gpreempt.ProcessKey][]gpreempt.ProcessKey{}
	for key, t := range o.Targets {
		before[key] = o.ownersOf(t.TargetSeen)
	}
	jobs := map[gpreempt.ProcessKey][]*seenTarget{}
	for key, t := range o.Targets {
		jobs[key] = o.job(t)
	}
	delete(o.owners, client)
	if !owner.IsZero() {
		o.owners[client] = owner
	}
	for key, t := range o.Targets {
		if slices.Equal(before[key], o.ownersOf(t.TargetSeen)) {
			continue
		}
		o.Counts["OwnersChanged"]++
		o.calmJob(t.Job, o.now+o.policy.MinRun)
		for _, m := range slices.Concat(jobs[key], o.job(t)) {
			m.lingerUntil, m.leased = 0, false
		}
	}
}

// ownersOf returns the owners whose leases do not suspend a target, by key.
func (o *Observer) ownersOf(t scheduler.TargetSeen) (owners []gpreempt.ProcessKey) {
	for _, owner := range o.owners {
		if owner == t.Target || slices.Contains(t.Kin, owner) {
			owners = append(owners, owner)
		}
	}
	slices.SortFunc(owners, gpreempt.ProcessKey.Compare)
	return slices.Compact(owners)
}

// owns reports whether a target is the work of the lease's owner.
func (o *Observer) owns(l *seenLease, t *seenTarget) bool {
	return slices.Contains(o.ownersOf(t.TargetSeen), o.owners[l.Client])
}

// regrouped ends the linger of a job that is not what it was.
func (o *Observer) regrouped(t *seenTarget, to scheduler.TargetSeen) {
	if t.Class == to.Class && t.Priority == to.Priority && t.Job == to.Job && slices.Equal(t.GPUs, to.GPUs) && slices.Equal(o.ownersOf(t.TargetSeen), o.ownersOf(to)) &&
		t.state != scheduler.TargetNone {
		return
	}
	for _, m := range o.job(t) {
		m.lingerUntil, m.leased = 0, false
	}
}

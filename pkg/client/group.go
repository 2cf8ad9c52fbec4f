package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Member is a host of a Group.
type Member struct {
	// Name is the host in errors and results.
	Name string
	// Client is that of the host's daemon. The Group does not close it.
	Client *Client
	// GPUs are the GPUs that the work uses on this host; nil: those of the request.
	GPUs []GPU
}

// Group announces work that runs on several hosts at once, such as a model whose layers or tensors
// are divided among hosts: one of its processes announces for all.
//
// A Group fails open as its clients do: with a host that does not answer, or refuses, the work runs, and
// the lease says on which hosts it is protected. If a client has FailClosed, its error is that of
// the group, and no host keeps a lease.
//
// Leases exclude no other lease, so groups that announce at the same time on the same hosts do
// not wait for each other. A Group may be used by several goroutines.
type Group struct{ members []Member }

// NewGroup returns a group of hosts.
func NewGroup(members ...Member) *Group { return &Group{members} }

// GroupLease has the leases of an announcement on all hosts of a group.
type GroupLease struct {
	members []Member
	leases  []*Lease
	lost    chan struct{}
}

// Acquire announces work on all hosts at once. It returns when each of them has answered or its
// time has passed, which is that of one host: r.MaxWait and 0.1 s, and longer for a host that does not answer
// for the first time if r.MaxWait is not set (see Request). The errors are those of Client.Acquire, with
// the names of the hosts; the leases of all hosts are released then.
func (g *Group) Acquire(ctx context.Context, r Request) (*GroupLease, error) {
	l := &GroupLease{members: g.members, leases: make([]*Lease, len(g.members)), lost: make(chan struct{})}
	failures := make([]error, len(g.members))
	l.each(func(i int, m Member) {
		own := r
		if m.GPUs != nil {
			own.GPUs = m.GPUs
		}
		lease, err := m.Client.Acquire(ctx, own)
		l.leases[i], failures[i] = lease, named(m, err)
	})
	if err := errors.Join(failures...); err != nil {
		return nil, errors.Join(err, l.Release(ctx))
	}
	first := sync.OnceFunc(func() { close(l.lost) })
	for _, lease := range l.leases {
		lease.whenLost(first)
	}
	return l, nil
}

// Do runs fn with a lease, as Client.Do does.
func (g *Group) Do(ctx context.Context, r Request, fn func(ctx context.Context) error) (err error) {
	lease, err := g.Acquire(ctx, r)
	if err != nil {
		return err
	}
	defer func() {
		for i, failed := range lease.release(ctx) {
			if failed != nil && g.members[i].Client.failClosed {
				err = errors.Join(err, failed)
			}
		}
	}()
	return fn(ctx)
}

// each calls do for all members at once and returns when all calls have.
func (l *GroupLease) each(do func(i int, m Member)) {
	var all sync.WaitGroup
	for i, m := range l.members {
		all.Go(func() { do(i, m) })
	}
	all.Wait()
}

func named(m Member, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("host %s: %w", m.Name, err)
}

// Leases returns the leases of the hosts, in the order of NewGroup.
func (l *GroupLease) Leases() []*Lease { return l.leases }

// Protected reports whether the work is protected on every host.
func (l *GroupLease) Protected() bool { return l.all((*Lease).Protected) }

// Quiet reports whether the GPUs of every host were quiet when it answered.
func (l *GroupLease) Quiet() bool { return l.all((*Lease).Quiet) }

func (l *GroupLease) all(is func(*Lease) bool) bool {
	for _, lease := range l.leases {
		if !is(lease) {
			return false
		}
	}
	return true
}

// Unprotected returns why the daemons of some hosts granted no lease, with their names, or nil.
func (l *GroupLease) Unprotected() error {
	var all []error
	for i, lease := range l.leases {
		all = append(all, named(l.members[i], lease.Cause()))
	}
	return errors.Join(all...)
}

// Lost returns a channel that is closed when the first lease ends before Release (see Lease.Lost). The
// leases of the other hosts continue.
func (l *GroupLease) Lost() <-chan struct{} { return l.lost }

// Release ends the leases of all hosts at once, as Lease.Release does, and returns the errors with the names of
// the hosts. It may be called again.
func (l *GroupLease) Release(ctx context.Context) error { return errors.Join(l.release(ctx)...) }

func (l *GroupLease) release(ctx context.Context) []error {
	failures := make([]error, len(l.members))
	l.each(func(i int, m Member) {
		if lease := l.leases[i]; lease != nil { // nil if its Acquire failed
			failures[i] = named(m, lease.Release(ctx))
		}
	})
	return failures
}

// Package container implements the lookup of a container's name, image, labels and pod,
// through the sockets of the container runtimes.
//
// The peers may misbehave: every answer is bounded in size and time, a peer that fails is
// not asked again for a while, and a slow peer does not delay the others. The number of
// containers is bounded too: a user can invent as many containers as there can be
// cgroups.
package container

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// maxEntries is the largest number of containers that are kept. Those with a process
	// on a GPU are far fewer; the rest is room for earlier ones.
	maxEntries = 512
	// maxQueries is how many containers are queried at once.
	maxQueries = 16
	// refreshEvery is how often a known container is queried again. Only its name (Docker's
	// rename) and the labels of its pod can change.
	refreshEvery = 2 * time.Minute
	// idleAfter is how long a container is queried after its last Lookup.
	idleAfter = 10 * time.Minute
	// retryFirst doubles up to retryLast, or to unknownLast if no runtime knows the
	// container.
	retryFirst  = time.Second
	retryLast   = 30 * time.Second
	unknownLast = 5 * time.Minute
)

// Config is what a Resolver needs.
type Config struct {
	// Sockets are the paths of the runtimes' unix sockets. Those whose file name begins
	// with docker or podman use Docker's API, all others the CRI. A socket of a user other
	// than root and the daemon's is not queried.
	Sockets []string
	// Cgroup returns the control group of a process, which that of a container's first
	// process is compared with. It is called from several goroutines; nil compares nothing.
	Cgroup func(pid int32) (gpreempt.Cgroup, error)
	// Changed is called, from several goroutines, when the result of Lookup for a
	// container has changed. It must not block.
	Changed func(containerID string)
	// Log receives a line when a socket fails and when it works again; it may be nil.
	Log *zap.Logger
	// Now is the clock; nil means time.Now. It is called from several goroutines.
	Now func() time.Time
}

// Resolver looks up containers. Its methods may be called from any goroutine.
type Resolver struct {
	cfg     Config
	sockets []*socket
	// wake makes Run check what is due.
	wake chan struct{}

	mu      sync.Mutex // guards all below
	entries map[key]*entry
	queries int // that are running
}

// New returns a Resolver without any containers; Run makes the queries.
func New(cfg Config) *Resolver {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	r := &Resolver{cfg: cfg, wake: make(chan struct{}, 1), entries: map[key]*entry{}}
	for _, path := range cfg.Sockets {
		r.sockets = append(r.sockets, newSocket(path, cfg.Log))
	}
	return r
}

// Lookup returns what is known of the container of a process. It never blocks: at first
// nothing is known, and Changed is called when that changes. The maps are shared and must
// not be changed.
//
// It should be called every few minutes while the process lives. A container that was
// not looked up for ten minutes is not queried, and removed if nothing is known of it.
func (r *Resolver) Lookup(g gpreempt.Cgroup) (c gpreempt.Container, known bool) {
	if g.ContainerID == "" || len(r.sockets) == 0 {
		return gpreempt.Container{}, false
	}
	now := r.cfg.Now()
	k := key{g.ContainerID, g.ContainerPath}
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entries[k]
	if e == nil {
		r.makeRoom()
		e = &entry{key: k, runtime: g.Runtime, pod: g.PodUID, due: now}
		r.entries[k] = e
	}
	e.used = now
	if !e.busy && !e.due.After(now) {
		notify(r.wake)
	}
	return e.found, e.ever
}

// Run queries the sockets for the containers that are looked up, until ctx ends. It returns
// when its goroutines have ended.
func (r *Resolver) Run(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case <-timer.C:
		}
		due, next := r.takeDue()
		for _, e := range due {
			work.Go(func() {
				r.resolve(ctx, e)
				notify(r.wake)
			})
		}
		timer.Reset(next)
	}
}

// resolve queries the sockets for one container and keeps the result.
func (r *Resolver) resolve(ctx context.Context, e *entry) {
	result := e.check(r.query(ctx, e), r.cfg.Cgroup)
	now := r.cfg.Now()
	r.mu.Lock()
	r.queries--
	changed := e.update(result, now) && r.entries[e.key] == e
	r.mu.Unlock()
	if changed && ctx.Err() == nil {
		r.cfg.Changed(e.key.id)
	}
}

// notify wakes the goroutine that receives from c, now or when it receives next.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

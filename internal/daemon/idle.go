package daemon

import (
	"context"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// idleInterval is the time between two checks of the queues of a client whose lease ends
// by idleness.
const idleInterval = time.Millisecond

// idleWatch reports to the scheduler whether clients that cannot call Complete have work.
// It sleeps while there are no such clients.
type idleWatch struct {
	runner *scheduler.Runner
	busy   func(context.Context, gpreempt.ProcessKey) (busy, known bool)
	wake   chan struct{}
}

// start starts checking if it sleeps. It does not block.
func (w *idleWatch) start() { wakeUp(w.wake) }

func (w *idleWatch) run(ctx context.Context) { pollWhile(ctx, w.wake, idleInterval, w.check) }

// wakeUp has pollWhile call its check. It does not block.
func wakeUp(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// pollWhile calls check at intervals, from each wake-up until check returns false, and returns
// when ctx ends.
func pollWhile(ctx context.Context, wake <-chan struct{}, interval time.Duration, check func(context.Context) bool) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		ticker.Stop()
		select {
		case <-ctx.Done():
			return
		case <-wake:
		}
		ticker.Reset(interval)
		for check(ctx) {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}
}

// check reports on every client with such a lease, and returns whether there is one.
func (w *idleWatch) check(ctx context.Context) bool {
	var watched []scheduler.ClientID
	w.runner.View(func(c *scheduler.Core) { watched = c.IdleWatched() })
	for _, id := range watched {
		if busy, known := w.busy(ctx, gpreempt.ProcessKey(id)); known {
			w.runner.Post(scheduler.ClientBacklog{Client: id, Busy: busy})
		}
	}
	return len(watched) > 0
}

// announcer is a runner that starts the idle watch.
type announcer struct {
	*scheduler.Runner
	idle *idleWatch
}

// Announce handles an announcement.
func (a announcer) Announce(req scheduler.LeaseRequested, reply scheduler.Reply) (scheduler.LeaseID, time.Duration, error) {
	id, ttl, err := a.Runner.Announce(req, reply)
	if err == nil && req.OnIdle {
		a.idle.start()
	}
	return id, ttl, err
}

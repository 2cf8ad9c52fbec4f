package daemon

import (
	"context"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// idleEvery is how often the queues of a client are looked at while it holds a
// lease that ends by idleness.
const idleEvery = time.Millisecond

// idleWatch tells the scheduler whether clients that cannot call Complete still
// have work. It sleeps while there are none.
type idleWatch struct {
	runner *scheduler.Runner
	client func(scheduler.ClientID) gpreempt.ProcessKey
	busy   func(context.Context, gpreempt.ProcessKey) (busy, known bool)
	wake   chan struct{}
}

// kick says that there may be somebody to watch. It does not block.
func (w *idleWatch) kick() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *idleWatch) run(ctx context.Context) {
	ticker := time.NewTicker(idleEvery)
	defer ticker.Stop()
	for {
		ticker.Stop()
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		}
		ticker.Reset(idleEvery)
		for w.look(ctx) {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}
}

// look reports on every client with such a lease; false when there is none.
func (w *idleWatch) look(ctx context.Context) bool {
	var watched []scheduler.ClientID
	w.runner.View(func(c *scheduler.Core) { watched = c.IdleWatched() })
	for _, id := range watched {
		if busy, known := w.busy(ctx, w.client(id)); known {
			w.runner.Post(scheduler.ClientBacklog{Client: id, Busy: busy})
		}
	}
	return len(watched) > 0
}

// announcer is the runner as the server sees it; it wakes the idle watch.
type announcer struct {
	*scheduler.Runner
	onIdleLease func()
}

// Announce takes in an announcement.
func (a announcer) Announce(req scheduler.LeaseRequested, reply scheduler.Reply) (scheduler.LeaseID, time.Duration, error) {
	id, ttl, err := a.Runner.Announce(req, reply)
	if err == nil && req.OnIdle {
		a.onIdleLease()
	}
	return id, ttl, err
}

func (d *daemon) onIdleLease() { d.idle.kick() }

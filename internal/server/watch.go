package server

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

var errSlowReader error = &gpreempt.Error{
	Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonSlowReader,
	Message: "this stream was read too slowly: the next entries are no longer stored",
	Next:    "list again and watch from the revision of the list",
}

// watchError returns the error that ends a stream. REVISION_COMPACTED at its start
// means that the client requested too old a revision; later it means that the client
// reads too slowly.
func watchError(err error, started bool) error {
	if started && gpreempt.ReasonOf(err) == gpreempt.ReasonRevisionCompacted {
		return errSlowReader
	}
	return err
}

// WatchEvents streams the event log after a revision.
func (a adminService) WatchEvents(req *gpreemptv1.WatchEventsRequest, st grpc.ServerStreamingServer[gpreemptv1.WatchEventsResponse]) error {
	log := a.s.cfg.Events
	after := req.GetAfterRevision()
	if after == 0 && !req.GetFromStart() {
		after = log.Revision()
	}
	var entries []events.Entry
	for started := false; ; started = true {
		var err error
		if entries, err = log.Read(after, entries[:0]); err != nil {
			return watchError(err, started)
		}
		if len(entries) > 0 {
			if err := a.s.seated(st.Context(), func() error {
				for _, e := range entries {
					if err := st.Send(&gpreemptv1.WatchEventsResponse{Event: a.s.eventMessage(e)}); err != nil {
						return err
					}
					after = e.Revision
				}
				return nil
			}); err != nil {
				return err
			}
			continue
		}
		if req.GetNoFollow() {
			return nil
		}
		if err := log.Wait(st.Context(), after); err != nil {
			return err
		}
	}
}

// WatchQueues streams queue changes after an inventory revision. A change of
// the target's state, class or priority is sent as MODIFIED for each of its queues,
// with the revision unchanged: it is not in the inventory, so a client that watches
// from a revision again must list the states again.
func (a adminService) WatchQueues(req *gpreemptv1.WatchQueuesRequest, st grpc.ServerStreamingServer[gpreemptv1.WatchQueuesResponse]) error {
	w := queueWatch{s: a.s, stream: st, queues: req.GetAfterRevision(), events: a.s.cfg.Events.Revision()}
	if req.GetAfterRevision() == 0 {
		if err := a.s.seated(st.Context(), w.sendPresent); err != nil {
			return err
		}
	}
	for started := req.GetAfterRevision() == 0; ; started = true {
		var changed, modified bool
		if err := a.s.seated(st.Context(), func() (err error) {
			if changed, err = w.sendChanges(); err == nil {
				modified, err = w.sendModified()
			}
			return err
		}); err != nil {
			return watchError(err, started)
		}
		if changed || modified {
			continue
		}
		if err := w.wait(); err != nil {
			return err
		}
	}
}

// queueWatch is one WatchQueues stream.
type queueWatch struct {
	s      *Server
	stream grpc.ServerStreamingServer[gpreemptv1.WatchQueuesResponse]
	// queues and events are the revisions up to which changes have been sent.
	queues, events uint64
}

func (w *queueWatch) send(change gpreemptv1.QueueChange, at time.Time, q gpreempt.QueueEntry, t *target) error {
	return w.stream.Send(&gpreemptv1.WatchQueuesResponse{Revision: w.queues, Change: change, At: timestamppb.New(at), Queue: queueMessage(q, t)})
}

func (w *queueWatch) sendPresent() error {
	queues, revision := w.s.cfg.Inventory.Queues()
	sn := w.s.snapshot(nil)
	w.queues = revision
	for _, q := range queues {
		if err := w.send(gpreemptv1.QueueChange_QUEUE_CHANGE_ADDED, q.FirstSeen, q, sn.target(q.Process)); err != nil {
			return err
		}
	}
	return nil
}

// sendChanges sends the next changes of the inventory.
func (w *queueWatch) sendChanges() (some bool, err error) {
	changes, err := w.s.cfg.Inventory.Read(w.queues, nil)
	if err != nil || len(changes) == 0 {
		return false, err
	}
	sn := w.s.snapshot(nil)
	for _, c := range changes {
		kind := gpreemptv1.QueueChange_QUEUE_CHANGE_REMOVED
		switch c.Kind {
		case inventory.Added:
			kind = gpreemptv1.QueueChange_QUEUE_CHANGE_ADDED
		case inventory.Modified:
			kind = gpreemptv1.QueueChange_QUEUE_CHANGE_MODIFIED
		case inventory.Removed:
		}
		w.queues = c.Revision
		if err := w.send(kind, c.At, c.Queue, sn.target(c.Queue.Process)); err != nil {
			return true, err
		}
	}
	return true, nil
}

// sendModified sends the queues of the targets that changed in the next events.
func (w *queueWatch) sendModified() (some bool, err error) {
	entries, err := w.s.cfg.Events.Read(w.events, nil)
	if err != nil || len(entries) == 0 {
		return false, err
	}
	w.events = entries[len(entries)-1].Revision
	changed := entries[len(entries)-1].At
	touched := map[gpreempt.ProcessKey]bool{}
	for _, e := range entries {
		// A new target is reported by its queues being added.
		if e.Record.Kind == scheduler.RecordTarget && e.Record.FromTarget != scheduler.TargetNone || e.Admin != "" {
			touched[e.Record.Target] = true
		}
	}
	delete(touched, gpreempt.ProcessKey{})
	if len(touched) == 0 {
		return true, nil
	}
	// Queues that were created meanwhile must be sent as added first.
	queues, revision := w.s.cfg.Inventory.Queues()
	for revision != w.queues {
		if _, err := w.sendChanges(); err != nil {
			return true, err
		}
		queues, revision = w.s.cfg.Inventory.Queues()
	}
	sn := w.s.snapshot(nil)
	for _, q := range queues {
		if t := sn.target(q.Process); t != nil && touched[q.Process] {
			if err := w.send(gpreemptv1.QueueChange_QUEUE_CHANGE_MODIFIED, changed, q, t); err != nil {
				return true, err
			}
		}
	}
	return true, nil
}

// wait returns when there may be more to send.
func (w *queueWatch) wait() error {
	ctx, cancel := context.WithCancelCause(w.stream.Context())
	other := make(chan struct{})
	go func() {
		defer close(other)
		cancel(moreOr(w.s.cfg.Events.Wait(ctx, w.events)))
	}()
	cancel(moreOr(w.s.cfg.Inventory.Wait(ctx, w.queues)))
	<-other
	if err := context.Cause(ctx); !errors.Is(err, errMore) {
		return err
	}
	return nil
}

// errMore ends the wait of a queueWatch that has more to send.
var errMore = errors.New("there is more to send")

func moreOr(err error) error {
	if err == nil {
		return errMore
	}
	return err
}

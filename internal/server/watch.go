package server

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
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

// WatchQueues streams queue changes after an inventory revision. The changes of targets are events.
func (a adminService) WatchQueues(req *gpreemptv1.WatchQueuesRequest, st grpc.ServerStreamingServer[gpreemptv1.WatchQueuesResponse]) error {
	w := queueWatch{s: a.s, stream: st, after: req.GetAfterRevision()}
	if req.GetAfterRevision() == 0 {
		if err := a.s.seated(st.Context(), w.sendPresent); err != nil {
			return err
		}
	}
	for started := req.GetAfterRevision() == 0; ; started = true {
		changed := false
		if err := a.s.seated(st.Context(), func() (err error) {
			changed, err = w.sendChanges()
			return err
		}); err != nil {
			return watchError(err, started)
		}
		if changed {
			continue
		}
		if err := a.s.cfg.Inventory.Wait(st.Context(), w.after); err != nil {
			return err
		}
	}
}

// queueWatch is one WatchQueues stream.
type queueWatch struct {
	s      *Server
	stream grpc.ServerStreamingServer[gpreemptv1.WatchQueuesResponse]
	after  uint64 // the revision up to which changes have been sent
}

func (w *queueWatch) send(change gpreemptv1.QueueChange, at time.Time, q gpreempt.QueueEntry, t *target) error {
	return w.stream.Send(&gpreemptv1.WatchQueuesResponse{Revision: w.after, Change: change, At: timestamppb.New(at), Queue: queueMessage(q, t)})
}

func (w *queueWatch) sendPresent() error {
	queues, revision := w.s.cfg.Inventory.Queues()
	sn := w.s.snapshot(nil)
	w.after = revision
	for _, q := range queues {
		if err := w.send(gpreemptv1.QueueChange_QUEUE_CHANGE_ADDED, q.FirstSeen, q, sn.target(q.Process)); err != nil {
			return err
		}
	}
	return nil
}

// sendChanges sends the next changes of the inventory.
func (w *queueWatch) sendChanges() (some bool, err error) {
	changes, err := w.s.cfg.Inventory.Read(w.after, nil)
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
		w.after = c.Revision
		if err := w.send(kind, c.At, c.Queue, sn.target(c.Queue.Process)); err != nil {
			return true, err
		}
	}
	return true, nil
}

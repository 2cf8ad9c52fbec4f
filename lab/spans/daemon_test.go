package spans_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/spans"
)

// daemon is the part of a daemon that an exporter follows. It keeps the last kept events.
type daemon struct {
	gpreemptv1.AdminServiceClient
	watched chan struct{} // has one for each stream that was opened

	mu      sync.Mutex // guards all below
	started time.Time
	events  []*gpreemptv1.Event // all of them
	kept    int
	down    bool
	wake    chan struct{} // closed and replaced with each change
}

func newDaemon() *daemon {
	return &daemon{watched: make(chan struct{}, 100), started: time.Unix(1000, 0), kept: 10_000, wake: make(chan struct{})}
}

// change changes the daemon and wakes its streams.
func (d *daemon) change(how func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	how()
	close(d.wake)
	d.wake = make(chan struct{})
}

func (d *daemon) append(e *gpreemptv1.Event) {
	d.change(func() {
		e.Revision = uint64(len(d.events) + 1)
		e.At = timestamppb.New(d.started.Add(e.GetClock().AsDuration()))
		d.events = append(d.events, e)
	})
}

var errDown = status.Error(codes.Unavailable, "no daemon there")

func (d *daemon) GetStatus(context.Context, *gpreemptv1.GetStatusRequest, ...grpc.CallOption) (*gpreemptv1.GetStatusResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.down {
		return nil, errDown
	}
	return &gpreemptv1.GetStatusResponse{
		Version: "v0.3.0", Backend: "simulated", StartedAt: timestamppb.New(d.started), EventRevision: uint64(len(d.events)),
	}, nil
}

func (d *daemon) WatchEvents(ctx context.Context, req *gpreemptv1.WatchEventsRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[gpreemptv1.WatchEventsResponse], error) {
	d.watched <- struct{}{}
	d.mu.Lock()
	defer d.mu.Unlock()
	return &stream{d: d, ctx: ctx, after: int(req.GetAfterRevision()), once: req.GetNoFollow(), started: d.started}, nil
}

type stream struct {
	grpc.ClientStream
	d       *daemon
	ctx     context.Context //nolint:containedctx // as a client's stream has it
	after   int
	once    bool
	started time.Time
}

func (s *stream) Recv() (*gpreemptv1.WatchEventsResponse, error) {
	for {
		s.d.mu.Lock()
		events, kept, wake := s.d.events, s.d.kept, s.d.wake
		broken := s.d.down || s.d.started != s.started
		s.d.mu.Unlock()
		oldest := max(0, len(events)-kept)
		if s.after == 0 {
			s.after = oldest
		}
		switch {
		case broken:
			return nil, errDown
		case s.after < oldest:
			return nil, status.Error(codes.OutOfRange, "the events after this revision are no longer kept")
		case s.after < len(events):
			s.after++
			return &gpreemptv1.WatchEventsResponse{Event: events[s.after-1]}, nil
		case s.once:
			return nil, io.EOF
		}
		select {
		case <-wake:
		case <-s.ctx.Done():
			return nil, status.FromContextError(s.ctx.Err()).Err()
		}
	}
}

// spansOfPreemption is how many spans a preemption makes.
const spansOfPreemption = 8

// preempt appends the events of a lease of 8 ms that suspends two targets, announced by
// a client that sent a trace context or "".
func (d *daemon) preempt(lease int, parent string) {
	const ms = time.Millisecond
	id := fmt.Sprintf("e-%d", lease)
	leased := func(at time.Duration, from, to gpreemptv1.LeaseState, cause string) *gpreemptv1.Event {
		e := &gpreemptv1.Event{Kind: gpreemptv1.EventKind_EVENT_KIND_LEASE, Clock: durationpb.New(at), LeaseId: id, FromLease: from, ToLease: to, Cause: cause}
		if to == gpreemptv1.LeaseState_LEASE_STATE_ENDED {
			e.End = gpreemptv1.LeaseEnd_LEASE_END_COMPLETED
		}
		return e
	}
	moved := func(at time.Duration, pid int, from, to gpreemptv1.TargetState, cause string, took time.Duration) {
		e := &gpreemptv1.Event{
			Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, Clock: durationpb.New(at), TargetId: fmt.Sprintf("%d@%d", pid, lease),
			FromTarget: from, ToTarget: to, Cause: cause, Took: durationpb.New(took),
		}
		if to == gpreemptv1.TargetState_TARGET_STATE_SUSPENDING {
			e.LeaseId = id
		}
		d.append(e)
	}
	const (
		none, requested, quiescing = gpreemptv1.LeaseState_LEASE_STATE_UNSPECIFIED, gpreemptv1.LeaseState_LEASE_STATE_REQUESTED, gpreemptv1.LeaseState_LEASE_STATE_QUIESCING
		held, ended                = gpreemptv1.LeaseState_LEASE_STATE_HELD, gpreemptv1.LeaseState_LEASE_STATE_ENDED
		running, suspending        = gpreemptv1.TargetState_TARGET_STATE_RUNNING, gpreemptv1.TargetState_TARGET_STATE_SUSPENDING
		suspended, resuming        = gpreemptv1.TargetState_TARGET_STATE_SUSPENDED, gpreemptv1.TargetState_TARGET_STATE_RESUMING
	)
	t0 := 10 * time.Second
	announced := leased(t0, none, requested, "announced")
	announced.Took = durationpb.New(20 * time.Microsecond)
	if parent != "" {
		announced.Trace = &gpreemptv1.TraceContext{Traceparent: parent, Tracestate: "vendor=1"}
	}
	d.append(announced)
	d.append(leased(t0, requested, quiescing, "started"))
	for pid := range 2 {
		moved(t0, 1+pid, running, suspending, "lease", 0)
	}
	moved(t0+1*ms, 1, suspending, suspended, "done", ms)
	moved(t0+2*ms, 2, suspending, suspended, "done", 2*ms)
	d.append(leased(t0+2*ms, quiescing, held, "quiet"))
	d.append(leased(t0+8*ms, held, ended, ""))
	for pid := range 2 {
		moved(t0+8*ms, 1+pid, suspended, resuming, "lease-ended", 0)
	}
	for pid := range 2 {
		moved(t0+9*ms, 1+pid, resuming, running, "done", ms)
	}
}

// follower is an exporter that follows a daemon.
type follower struct {
	*spans.Exporter
	warnings chan error
	stop     func() // waits for its end, and returns once it has ended
}

func follow(t *testing.T, d *daemon, endpoint string) *follower {
	t.Helper()
	f := &follower{warnings: make(chan error, 64)}
	defer func() { <-d.watched }() // what happens from now on is followed
	var err error
	f.Exporter, err = spans.NewExporter(t.Context(), spans.ExporterConfig{Endpoint: endpoint, Daemon: d, Warn: func(err error) { f.warnings <- err }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Follow(ctx) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(f.stop)
	return f
}

// next returns the next warning.
func (f *follower) next(t *testing.T) error {
	t.Helper()
	select {
	case err := <-f.warnings:
		return err
	case <-time.After(longest):
		t.Fatal("no warning came")
		return errors.New("unreachable")
	}
}

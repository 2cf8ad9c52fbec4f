package client

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// maxOutstanding is how many announcements of a stream the daemon answers at a time.
const maxOutstanding = 128

// announce sends an announcement over the client's stream. When the stream breaks
// before the answer, its lease has ended with it, so announce tries once more: the
// stream may have broken long ago, undetected.
func (c *Client) announce(ctx context.Context, a *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, *stream, error) {
	select {
	case c.outstanding <- struct{}{}:
		defer func() { <-c.outstanding }()
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	answer, st, err := c.try(ctx, a)
	if gpreempt.ReasonOf(err) == gpreempt.ReasonDaemonUnavailable && ctx.Err() == nil {
		answer, st, err = c.try(ctx, a)
	}
	return answer, st, err
}

func (c *Client) try(ctx context.Context, a *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, *stream, error) {
	st, err := c.stream(ctx)
	if err != nil {
		return nil, nil, err
	}
	answer, err := st.call(ctx, &gpreemptv1.SessionRequest{Frame: &gpreemptv1.SessionRequest_Announce{Announce: a}})
	if err != nil {
		return nil, nil, err
	}
	if answer.GetAnnounced() == nil {
		return nil, nil, errWrongFrame
	}
	return answer.GetAnnounced(), st, nil
}

var errWrongFrame error = &gpreempt.Error{
	Code: gpreempt.CodeInternal, Reason: gpreempt.ReasonBadFrame,
	Message: "gpreemptd answered with a frame of the wrong type",
	Next:    "check that the daemon and this program have the same version",
}

// stream returns the current stream, and opens one if there is none or it is broken.
func (c *Client) stream(ctx context.Context) (*stream, error) {
	select {
	case c.opening <- struct{}{}:
		defer func() { <-c.opening }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if c.current == nil || c.current.held.isBroken() {
		st, err := openStream(ctx, c.background, c)
		if err != nil {
			return nil, err
		}
		c.current = st
	}
	return c.current, nil
}

// stream is a Session of the API: its leases end with it.
type stream struct {
	c      *Client
	rpc    gpreemptv1.OnlineService_SessionClient
	cancel context.CancelFunc
	held   leaseSet

	// sending is held while a frame is being sent. watchdog is used by its holder: it
	// cancels the stream when a send exceeds the deadline of its caller, as it does
	// when the daemon has stopped reading.
	sending  chan struct{}
	watchdog *time.Timer

	mu      sync.Mutex // guards all below
	tag     uint64
	waiting map[uint64]chan<- *gpreemptv1.SessionResponse

	done chan struct{} // closed when the stream is broken and its leases are lost
	err  error         // why; written before done is closed
}

// openStream opens a stream that ends with life; ctx bounds the opening.
func openStream(ctx, life context.Context, c *Client) (*stream, error) {
	life, cancel := context.WithCancel(life)
	stop := context.AfterFunc(ctx, cancel)
	rpc, err := c.online.Session(life)
	if !stop() {
		cancel()
		return nil, ctx.Err()
	}
	if err != nil {
		cancel()
		return nil, FromStatus(err)
	}
	st := &stream{
		c: c, rpc: rpc, cancel: cancel,
		sending: make(chan struct{}, 1), watchdog: time.AfterFunc(time.Hour, cancel),
		waiting: make(map[uint64]chan<- *gpreemptv1.SessionResponse),
		done:    make(chan struct{}),
	}
	st.watchdog.Stop()
	if !c.spawn(st.receive) {
		cancel()
		return nil, ErrClosed
	}
	return st, nil
}

// receive delivers answers until the stream breaks.
func (st *stream) receive() {
	for {
		answer, err := st.rpc.Recv()
		if err == nil {
			st.deliver(answer)
			continue
		}
		st.err = FromStatus(err)
		if errors.Is(err, io.EOF) {
			st.err = &gpreempt.Error{
				Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonDaemonUnavailable,
				Message: "gpreemptd ended the session", Next: "acquire again",
			}
		}
		st.cancel()
		st.held.breakAll()
		close(st.done)
		return
	}
}

func (st *stream) deliver(answer *gpreemptv1.SessionResponse) {
	st.mu.Lock()
	waiter, ok := st.waiting[answer.GetTag()]
	delete(st.waiting, answer.GetTag())
	st.mu.Unlock()
	switch {
	case ok:
		waiter <- answer // it has room
	case answer.GetAnnounced() != nil:
		// Its caller has stopped waiting and would never release it.
		st.c.spawn(func() {
			ctx, cancel := context.WithTimeout(st.c.background, releaseBound)
			defer cancel()
			_ = st.complete(ctx, answer.GetAnnounced().GetLeaseId()) // else it ends with its TTL
		})
	}
}

// call sends a frame and returns its answer. The end of ctx does not cancel a frame
// that was sent; see deliver for a late answer.
func (st *stream) call(ctx context.Context, frame *gpreemptv1.SessionRequest) (*gpreemptv1.SessionResponse, error) {
	waiter := make(chan *gpreemptv1.SessionResponse, 1)
	st.mu.Lock()
	st.tag++
	frame.Tag = st.tag
	st.waiting[frame.GetTag()] = waiter
	st.mu.Unlock()

	if err := st.send(ctx, frame); err != nil {
		st.abandon(frame.GetTag())
		return nil, err
	}
	var answer *gpreemptv1.SessionResponse
	select {
	case answer = <-waiter:
	case <-st.done:
		if st.abandon(frame.GetTag()) {
			return nil, st.err
		}
		answer = <-waiter // received just before the end
	case <-ctx.Done():
		if st.abandon(frame.GetTag()) {
			return nil, ctx.Err()
		}
		answer = <-waiter // received just in time
	}
	if refused := answer.GetError(); refused != nil {
		return nil, FromFrame(refused)
	}
	return answer, nil
}

// abandon is called when no call waits for the answer to tag any more. It reports
// whether that answer was outstanding.
func (st *stream) abandon(tag uint64) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	_, outstanding := st.waiting[tag]
	delete(st.waiting, tag)
	return outstanding
}

func (st *stream) send(ctx context.Context, frame *gpreemptv1.SessionRequest) error {
	select {
	case st.sending <- struct{}{}:
		defer func() { <-st.sending }()
	case <-st.done:
		return st.err
	case <-ctx.Done():
		return ctx.Err()
	}
	if deadline, ok := ctx.Deadline(); ok {
		st.watchdog.Reset(time.Until(deadline))
		defer st.watchdog.Stop()
	}
	err := st.rpc.Send(frame)
	if errors.Is(err, io.EOF) { // Recv returns the reason
		<-st.done
		return st.err
	}
	return FromStatus(err)
}

func (st *stream) complete(ctx context.Context, id string) error {
	answer, err := st.call(ctx, &gpreemptv1.SessionRequest{
		Frame: &gpreemptv1.SessionRequest_Complete{Complete: &gpreemptv1.CompleteRequest{LeaseId: id}},
	})
	if err == nil && answer.GetCompleted() == nil {
		err = errWrongFrame
	}
	return err
}

func (st *stream) renew(ctx context.Context, id string, ttl time.Duration) (time.Duration, error) {
	answer, err := st.call(ctx, &gpreemptv1.SessionRequest{
		Frame: &gpreemptv1.SessionRequest_Renew{Renew: &gpreemptv1.RenewRequest{LeaseId: id, Ttl: durationpb.New(ttl)}},
	})
	if err == nil && answer.GetRenewed() == nil {
		err = errWrongFrame
	}
	return answer.GetRenewed().GetTtl().AsDuration(), err
}

package client

import (
	"context"
	"sync"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Session announces by frames of one stream, which cost less than calls. When the
// stream breaks, its leases are lost, and the next Acquire opens another stream.
type Session struct {
	c      *Client
	ctx    context.Context // of the session and its streams
	cancel context.CancelCauseFunc
	// opening is held while a stream is being opened.
	opening chan struct{}

	mu      sync.Mutex // guards current
	current *stream
}

// Session returns a session that lives until Close, until ctx is done or until the
// client is closed. Its stream is opened by the first Acquire.
func (c *Client) Session(ctx context.Context) (*Session, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := c.ended(); err != nil {
		return nil, err
	}
	s := &Session{c: c, opening: make(chan struct{}, 1)}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	return s, nil
}

// Acquire is Client.Acquire over the session's stream. After Close it returns
// ErrClosed, and after the end of the session's context its cause.
func (s *Session) Acquire(ctx context.Context, r Request) (*Lease, error) {
	return s.c.acquire(ctx, s, &r)
}

// Do is Client.Do over the session's stream.
func (s *Session) Do(ctx context.Context, r Request, fn func(ctx context.Context) error) error {
	return s.c.do(ctx, s, &r, fn)
}

// ended returns an error when the session cannot announce any more.
func (s *Session) ended() error {
	if err := s.c.ended(); err != nil {
		return err
	}
	return context.Cause(s.ctx)
}

// Close ends the stream and with it the session's leases.
func (s *Session) Close() error {
	s.cancel(ErrClosed)
	s.mu.Lock()
	st := s.current
	s.mu.Unlock()
	if st != nil {
		<-st.done
	}
	return nil
}

// announce sends the announcement over the session's stream. When the stream breaks
// before the answer, its lease has ended with it, so announce tries once more: the
// stream may have broken long ago, undetected.
func (s *Session) announce(ctx context.Context, a *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, link, error) {
	answer, st, err := s.try(ctx, a)
	if gpreempt.ReasonOf(err) == gpreempt.ReasonDaemonUnavailable && ctx.Err() == nil {
		answer, st, err = s.try(ctx, a)
	}
	if err != nil {
		return nil, nil, err
	}
	return answer, st, nil
}

func (s *Session) try(ctx context.Context, a *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, *stream, error) {
	st, err := s.stream(ctx)
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
func (s *Session) stream(ctx context.Context) (*stream, error) {
	if st := s.open(); st != nil {
		return st, nil
	}
	select {
	case s.opening <- struct{}{}:
		defer func() { <-s.opening }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if st := s.open(); st != nil {
		return st, nil // another goroutine opened it meanwhile
	}
	st, err := openStream(ctx, s.ctx, s.c)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.current = st
	s.mu.Unlock()
	return st, nil
}

func (s *Session) open() *stream {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == nil || s.current.held.isBroken() {
		return nil
	}
	return s.current
}

package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// maxOutstanding is how many announcements of one stream may wait until their
// answer is sent. With streamsPerClient and the connections of a user, it
// bounds the memory that a client which does not read can take.
const maxOutstanding = 128

// session is one Session stream. One goroutine reads frames and sends the answers
// that are known at once; the handler sends the later ones. So neither waits for
// the scheduler.
type session struct {
	s      *Server
	stream grpc.BidiStreamingServer[gpreemptv1.SessionRequest, gpreemptv1.SessionResponse]
	caller *connection
	// scope is the scope of the leases announced here.
	scope scope
	trace *scheduler.TraceContext // of the client; nil when it sent none
	// answers has announcements that were answered later. It has room for all that
	// are outstanding, so the scheduler's reply never blocks.
	answers     chan *announcement
	outstanding atomic.Int32

	sending sync.Mutex // held in each send: a stream allows one sender at a time
}

// Session is NotifyOnline, Complete and Renew over one stream.
func (o onlineService) Session(st grpc.BidiStreamingServer[gpreemptv1.SessionRequest, gpreemptv1.SessionResponse]) error {
	ctx := st.Context()
	ses := &session{
		s: o.s, stream: st, caller: callerOf(ctx), trace: traceContext(ctx),
		answers: make(chan *announcement, maxOutstanding),
	}
	ended := make(chan error, 1)
	// The reader ends with the stream, which ends when this handler returns. The
	// reader ends the leases, because the handler may be blocked by a client that
	// does not read its answers.
	go func() {
		err := ses.read()
		ses.end()
		ended <- err
	}()
	for {
		select {
		case a := <-ses.answers:
			if err := ses.send(ses.announced(a)); err != nil {
				return err
			}
		case err := <-ended:
			for err == nil && len(ses.answers) > 0 { // of a half-closed stream: all are there
				err = ses.send(ses.announced(<-ses.answers))
			}
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// end ends every lease announced on the stream. A stream ends before the death of
// its process is reported, so end checks whether the process is exiting.
func (ses *session) end() {
	how := scheduler.EndDisconnected
	if ses.caller.Exiting() {
		how = scheduler.EndClientDied
	}
	c := ses.caller.client
	ses.s.endAll(c, c.endScope(&ses.scope), how)
}

// read handles frames until the client has sent its last; then the error is nil.
func (ses *session) read() (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = ses.s.panicked(gpreemptv1.OnlineService_Session_FullMethodName, r)
		}
	}()
	for {
		req, err := ses.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		resp, err := ses.frame(req)
		if err != nil {
			ses.s.countRefusal(err)
			resp = &gpreemptv1.SessionResponse{Frame: &gpreemptv1.SessionResponse_Error{Error: api.ToFrame(err)}}
		}
		if resp == nil {
			continue // answered later
		}
		resp.Tag = req.GetTag()
		if err := ses.send(resp); err != nil {
			return err
		}
	}
}

// frame handles one frame. Without response and error, it is answered later.
func (ses *session) frame(req *gpreemptv1.SessionRequest) (*gpreemptv1.SessionResponse, error) {
	c := ses.caller.client
	if err := c.takeRequest(ses.s.cfg.Limits(), auth.Cost(gpreemptv1.OnlineService_Session_FullMethodName)); err != nil {
		return nil, err
	}
	switch f := req.GetFrame().(type) {
	case *gpreemptv1.SessionRequest_Announce:
		return ses.announce(req.GetTag(), f.Announce)
	case *gpreemptv1.SessionRequest_Complete:
		completed, err := ses.s.complete(c, f.Complete)
		if err != nil {
			return nil, err
		}
		return &gpreemptv1.SessionResponse{Frame: &gpreemptv1.SessionResponse_Completed{Completed: completed}}, nil
	case *gpreemptv1.SessionRequest_Renew:
		renewed, err := ses.s.renew(c, f.Renew)
		if err != nil {
			return nil, err
		}
		return &gpreemptv1.SessionResponse{Frame: &gpreemptv1.SessionResponse_Renewed{Renewed: renewed}}, nil
	default:
		return nil, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonBadFrame,
			fmt.Sprintf("unknown frame with tag %d", req.GetTag()),
			"set one of announce, complete and renew; a newer client may use frames that an older daemon does not have")
	}
}

// The senders of the answer to an announcement of a stream.
const (
	undecided    = iota // it is in the scheduler
	answeredNow         // the reader: the scheduler answered at once
	answersLater        // the handler
)

// announce passes an announcement to the scheduler. Without response and error, it
// is answered later.
func (ses *session) announce(tag uint64, req *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.SessionResponse, error) {
	arrived := ses.s.cfg.Scheduler.Now()
	if ses.outstanding.Load() >= maxOutstanding {
		return nil, refusal(gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited,
			fmt.Sprintf("%d announcements of this stream have unread answers, the maximum", maxOutstanding),
			"read the answers before announcing more")
	}
	a, err := ses.s.prepare(req, ses.caller.client, ses.caller)
	if err != nil {
		return nil, err
	}
	a.Arrived, a.Trace, a.note.scope, a.tag = arrived, ses.trace, &ses.scope, tag
	ses.outstanding.Add(1)
	if _, err := ses.s.submit(a, func(_ scheduler.LeaseID, answer scheduler.Answer) { // with the scheduler's lock held
		a.answer = answer
		if !a.sender.CompareAndSwap(undecided, answeredNow) {
			ses.answers <- a
		}
	}); err != nil {
		ses.outstanding.Add(-1)
		return nil, err
	}
	if a.sender.CompareAndSwap(undecided, answersLater) {
		return nil, nil //nolint:nilnil // the handler answers
	}
	return ses.announced(a), nil
}

// announced returns the frame that answers an announcement.
func (ses *session) announced(a *announcement) *gpreemptv1.SessionResponse {
	ses.outstanding.Add(-1)
	return &gpreemptv1.SessionResponse{Tag: a.tag, Frame: &gpreemptv1.SessionResponse_Announced{Announced: ses.s.countedAnswer(a)}}
}

func (ses *session) send(resp *gpreemptv1.SessionResponse) error {
	ses.sending.Lock()
	defer ses.sending.Unlock()
	return ses.stream.Send(resp)
}

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
	answers     chan *streamAnnounce
	outstanding atomic.Int32

	sending sync.Mutex // held in each send: a stream allows one sender at a time
}

// Session is NotifyOnline, Complete and Renew over one stream.
func (o onlineService) Session(st grpc.BidiStreamingServer[gpreemptv1.SessionRequest, gpreemptv1.SessionResponse]) error {
	ctx := st.Context()
	ses := &session{
		s: o.s, stream: st, caller: callerOf(ctx), trace: traceContext(ctx),
		answers: make(chan *streamAnnounce, maxOutstanding),
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
		case p := <-ses.answers:
			if err := ses.send(p.response()); err != nil {
				return err
			}
		case err := <-ended:
			for err == nil && len(ses.answers) > 0 { // of a half-closed stream: all are there
				err = ses.send((<-ses.answers).response())
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

// The states of a streamAnnounce: who sends its answer.
const (
	undecided    = iota // it is in the scheduler
	answeredNow         // the reader: the scheduler answered at once
	answersLater        // the handler
)

// streamAnnounce is an announcement of a stream.
type streamAnnounce struct {
	*announcement
	ses   *session
	tag   uint64
	state atomic.Uint32
}

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
	a.Arrived, a.Trace, a.note.scope = arrived, ses.trace, &ses.scope
	p := &streamAnnounce{announcement: a, ses: ses, tag: tag}
	ses.outstanding.Add(1)
	if _, err := ses.s.submit(a, p.reply); err != nil {
		ses.outstanding.Add(-1)
		return nil, err
	}
	if p.state.CompareAndSwap(undecided, answersLater) {
		return nil, nil //nolint:nilnil // the handler answers
	}
	return p.response(), nil
}

// reply stores the scheduler's answer. It is called with the scheduler's lock held.
func (p *streamAnnounce) reply(_ scheduler.LeaseID, answer scheduler.Answer) {
	p.answer = answer
	if !p.state.CompareAndSwap(undecided, answeredNow) {
		p.ses.answers <- p
	}
}

// response returns the frame that answers p.
func (p *streamAnnounce) response() *gpreemptv1.SessionResponse {
	p.ses.outstanding.Add(-1)
	return &gpreemptv1.SessionResponse{Tag: p.tag, Frame: &gpreemptv1.SessionResponse_Announced{Announced: p.ses.s.answered(p.announcement)}}
}

func (ses *session) send(resp *gpreemptv1.SessionResponse) error {
	ses.sending.Lock()
	defer ses.sending.Unlock()
	return ses.stream.Send(resp)
}

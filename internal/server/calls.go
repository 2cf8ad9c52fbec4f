package server

import (
	"context"
	"fmt"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// adminPrefix and onlinePrefix begin the methods of the two services in this package.
	adminPrefix  = "/gpreempt.v1.AdminService/"
	onlinePrefix = "/gpreempt.v1.OnlineService/"
)

// registrar registers services so that each call passes one chain before its
// handler: recovery from panics, identity, rate, bound of calls or streams, right,
// audit. The order is a security property. The chain begins before the message of
// a call is read; interceptors of gRPC would begin after it, and a call whose
// message never arrives would not reach them. And it ends after the answer has been
// passed to gRPC: so to gRPC every method is a stream, which is no difference for clients.
type registrar struct{ s *Server }

// RegisterService registers a service.
func (r registrar) RegisterService(desc *grpc.ServiceDesc, impl any) {
	chained := *desc
	chained.Methods, chained.Streams = nil, slices.Clone(desc.Streams)
	for i := range chained.Streams {
		m := &chained.Streams[i]
		m.Handler = r.s.streaming("/"+desc.ServiceName+"/"+m.StreamName, m.Handler)
	}
	for _, m := range desc.Methods {
		chained.Streams = append(chained.Streams, grpc.StreamDesc{
			StreamName: m.MethodName, Handler: r.s.unary("/"+desc.ServiceName+"/"+m.MethodName, m.Handler),
		})
	}
	r.s.grpc.RegisterService(&chained, impl)
}

// unary returns a handler that calls next, the handler of a method that is not a
// stream, at the end of the chain.
func (s *Server) unary(method string, next grpc.MethodHandler) grpc.StreamHandler {
	need, _ := auth.Need(method)
	reads := need == auth.Read
	return func(srv any, ss grpc.ServerStream) (err error) {
		defer s.finish(method, &err)
		ctx := ss.Context()
		c, err := s.enter(ctx, method)
		if err == nil && !c.client.user.calls.take() {
			c.client.charge(s.cfg.Limits(), refusalBytes)
			err = refusal(gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited,
				fmt.Sprintf("the clients of %s have %d calls in flight, their maximum", c.client.user.id, callsPerUser),
				"wait for answers before the next calls, or use a Session stream")
		}
		if err != nil {
			s.auditRefusal(c, method, nil, err)
			return err
		}
		defer c.client.user.calls.free()
		readInTime := func(req any) error {
			late := time.AfterFunc(messageTime, func() { s.closeSlow(c, method) })
			defer late.Stop()
			err := ss.RecvMsg(req)
			s.countTooLarge(err)
			return err
		}
		if reads {
			if err := c.client.user.reads.wait(ctx); err != nil {
				return err
			}
			defer c.client.user.reads.free()
		}
		free := func() {}
		defer func() { free() }()
		arrived := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (_ any, err error) {
			if free, err = s.takeSeat(ctx, c, method); err != nil {
				free = func() {}
				return nil, err
			}
			need, err := s.allow(c, method)
			if err != nil {
				s.auditRefusal(c, method, req, err)
				return nil, err
			}
			if need == auth.Admin {
				handler = s.audited(c, method, handler)
			}
			if s.simulated != nil && strings.HasPrefix(method, adminPrefix) {
				if err := ss.SetHeader(s.simulated); err != nil {
					return nil, err
				}
			}
			return handler(ctx, req)
		}
		resp, err := next(srv, withCaller(ctx, c), readInTime, arrived)
		if err != nil {
			return err
		}
		return c.sendAnswer(method, resp, true, ss) // encodes it, and does not wait for the client
	}
}

// streaming is unary for streams, whose context ends when the server shuts down.
func (s *Server) streaming(method string, next grpc.StreamHandler) grpc.StreamHandler {
	return func(srv any, ss grpc.ServerStream) (err error) {
		defer s.finish(method, &err)
		c, err := s.enter(ss.Context(), method)
		if err == nil {
			_, err = s.allow(c, method)
		}
		if err == nil && !c.client.streams.take() {
			err = refusal(gpreempt.CodeResourceExhausted, gpreempt.ReasonStreamsPerClient,
				fmt.Sprintf("%v has %d streams open, its maximum", c.peer, streamsPerClient),
				"use the open streams")
		}
		if err != nil {
			s.auditRefusal(c, method, nil, err)
			return err
		}
		defer c.client.streams.free()
		if s.simulated != nil && strings.HasPrefix(method, adminPrefix) {
			if err := ss.SetHeader(s.simulated); err != nil {
				return err
			}
		}
		ctx, cancel := context.WithCancelCause(withCaller(ss.Context(), c))
		defer cancel(nil)
		stop := context.AfterFunc(s.closing, func() { cancel(context.Cause(s.closing)) })
		defer stop()
		return next(srv, &stream{ServerStream: ss, c: c, ctx: ctx, method: method})
	}
}

// finish turns the outcome of a call into what gRPC sends. A panic becomes an
// error, because one bad request must not end the leases of every other client.
// An error is counted by its reason and becomes a status.
func (s *Server) finish(method string, err *error) {
	if r := recover(); r != nil {
		*err = s.panicked(method, r)
	}
	if *err == nil {
		return
	}
	s.countRefusal(*err)
	*err = api.ToStatus(*err)
}

// refusal returns the error of a refused request: what happened, and what to do next.
func refusal(code gpreempt.Code, reason gpreempt.Reason, message, next string) error {
	return &gpreempt.Error{Code: code, Reason: reason, Message: message, Next: next}
}

// panicked logs a panic and returns the error of its call.
func (s *Server) panicked(method string, r any) error {
	s.cfg.Log.Error("a handler panicked", log.Method(method), log.PanicValue(r), log.Stack(debug.Stack()))
	return refusal(gpreempt.CodeInternal, gpreempt.ReasonInternal,
		method+" failed in the daemon",
		"report it with the stack in the daemon's log (journalctl -u gpreemptd)")
}

func (s *Server) countRefusal(err error) {
	if why := gpreempt.ReasonOf(err); why != "" {
		s.cfg.Events.Refused(why)
	}
}

// countTooLarge counts a message that gRPC itself refuses while it is read.
func (s *Server) countTooLarge(err error) {
	if reasonOf(err) == gpreempt.ReasonMessageTooLarge {
		s.cfg.Events.Refused(gpreempt.ReasonMessageTooLarge)
	}
}

// reasonOf returns the reason of an error, also of one that is a status by now; "" without one.
func reasonOf(err error) gpreempt.Reason {
	st := status.Convert(err)
	for _, detail := range st.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == api.Domain {
			return gpreempt.Reason(info.GetReason())
		}
	}
	if st.Code() == codes.ResourceExhausted && strings.Contains(st.Message(), api.TooLarge) {
		return gpreempt.ReasonMessageTooLarge
	}
	return gpreempt.ReasonOf(err)
}

// enter identifies the caller and takes the cost of a call of its rate. The connection is
// nil when nothing proves who calls.
func (s *Server) enter(ctx context.Context, method string) (*connection, error) {
	conn, _ := auth.FromContext(ctx)
	c, ok := conn.(*connection)
	if !ok {
		return nil, errNoIdentity
	}
	if c.refused != nil {
		c.client.charge(s.cfg.Limits(), refusalBytes)
		err := c.refusal(method)
		if !c.explained.Swap(true) {
			s.cfg.Log.Warn("client connection refused", log.Err(err))
		}
		return c, err
	}
	return c, c.client.takeRequest(s.cfg.Limits(), auth.Cost(method))
}

// allow returns the right that a method needs, and an error if a caller lacks it.
func (s *Server) allow(c *connection, method string) (need auth.Rights, err error) {
	need, known := auth.Need(method)
	if !known || !s.cfg.Authz().Rights(c.peer).Allows(need) {
		return need, forbidden(c.peer, method, need)
	}
	return need, nil
}

// closeSlow closes the connection of a client that has begun a call and does not
// send its message: gRPC has no other way to end such a call.
func (s *Server) closeSlow(c *connection, method string) {
	s.cfg.Events.Refused(gpreempt.ReasonSlowRequest)
	s.cfg.Log.Warn("connection closed: the message of a call did not follow its header in time",
		log.Peer(c.peer), log.Method(method), log.Waited(messageTime))
	_ = c.Close()
}

var errNoIdentity error = &gpreempt.Error{
	Code: gpreempt.CodeUnauthenticated, Reason: gpreempt.ReasonNoIdentity,
	Message: "nothing proves the identity of the caller",
	Next:    "connect over the daemon's unix socket, from a process in its pid namespace or one below",
}

func forbidden(peer auth.Peer, method string, need auth.Rights) error {
	e := &gpreempt.Error{
		Code: gpreempt.CodePermissionDenied, Reason: gpreempt.ReasonNotOnline,
		Message: fmt.Sprintf("%v may not call %s", peer, path.Base(method)),
		Next:    howToGet(peer, "online"),
	}
	if need&auth.Online != 0 && !strings.HasPrefix(method, adminPrefix) {
		return e
	}
	e.Reason = gpreempt.ReasonNotAdmin
	// On the socket, the right to announce includes the right to read.
	if _, process := peer.(auth.Process); !process || need != auth.Read {
		e.Next = howToGet(peer, "admin")
	}
	return e
}

// stream is a gRPC stream with the context of the chain. enter took the cost of its first message;
// only a Session has more, and takes that of each frame itself, to answer a refusal by a frame.
type stream struct {
	grpc.ServerStream
	c      *connection
	method string
	ctx    context.Context //nolint:containedctx // grpc.ServerStream returns its context
}

func (s *stream) Context() context.Context { return s.ctx }

// RecvMsg reads a message.
func (s *stream) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	s.c.s.countTooLarge(err)
	return err
}

// SendMsg sends a message.
func (s *stream) SendMsg(m any) error {
	if strings.HasPrefix(s.method, adminPrefix) {
		if err := s.c.pace(s.ctx); err != nil {
			return err
		}
	}
	return s.c.sendAnswer(s.method, m, false, s.ServerStream)
}

// call is one call behind the chain.
type call struct {
	*connection
	audit auditEntry // set by the handler
}

// callKey is the key of a *call in its context.
type callKey struct{}

func withCaller(ctx context.Context, c *connection) context.Context {
	return context.WithValue(ctx, callKey{}, &call{connection: c})
}

// callOf returns the call of a context. Every handler runs behind the chain, so there always is one.
func callOf(ctx context.Context) *call { return ctx.Value(callKey{}).(*call) }

// callerOf returns the connection of a call.
func callerOf(ctx context.Context) *connection { return callOf(ctx).connection }

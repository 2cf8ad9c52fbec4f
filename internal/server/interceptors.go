package server

import (
	"context"
	"fmt"
	"runtime/debug"
	"strings"

	"go.uber.org/zap"
	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/authz"
	"github.com/gpreempt/gpreempt/internal/errgrpc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// interceptUnary is what stands before every call that is not a stream. The
// order is a security property: nothing a handler does can get past recovery,
// and nobody reaches a handler unknown, without the right, or above the rate.
// It is one function rather than a chain because a chain allocates for each link.
func (s *Server) interceptUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	defer s.recoverPanic(info.FullMethod, &err)
	c, need, err := s.admit(ctx, info.FullMethod)
	if err != nil {
		s.auditRefusal(c, info.FullMethod, req, err)
		return nil, errgrpc.ToStatus(err)
	}
	if need == authz.Admin {
		handler = s.audited(c, info.FullMethod, handler)
	}
	if s.simulated != nil && strings.HasPrefix(info.FullMethod, oursForAdmins) {
		if err := grpc.SetHeader(ctx, s.simulated); err != nil {
			return nil, errgrpc.ToStatus(err)
		}
	}
	if resp, err = handler(withCaller(ctx, c), req); err != nil {
		return nil, errgrpc.ToStatus(err)
	}
	return resp, nil
}

// interceptStream is the same for streams, which are counted besides, and whose
// context ends when the server shuts down.
func (s *Server) interceptStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer s.recoverPanic(info.FullMethod, &err)
	c, _, err := s.admit(ss.Context(), info.FullMethod)
	if err != nil {
		s.auditRefusal(c, info.FullMethod, nil, err)
		return errgrpc.ToStatus(err)
	}
	if s.simulated != nil && strings.HasPrefix(info.FullMethod, oursForAdmins) {
		if err := ss.SetHeader(s.simulated); err != nil {
			return errgrpc.ToStatus(err)
		}
	}
	if err := c.client.openStream(s.cfg.Limits()); err != nil {
		s.auditRefusal(c, info.FullMethod, nil, err)
		return errgrpc.ToStatus(err)
	}
	defer c.client.closeStream()
	ctx, cancel := context.WithCancelCause(withCaller(ss.Context(), c))
	defer cancel(nil)
	stop := context.AfterFunc(s.closing, func() { cancel(context.Cause(s.closing)) })
	defer stop()
	if err := handler(srv, &stream{ServerStream: ss, ctx: ctx, foreign: !strings.HasPrefix(info.FullMethod, ours)}); err != nil {
		return errgrpc.ToStatus(err)
	}
	return nil
}

// ours begins the methods of the two services in this package.
const ours = "/gpreempt.v1."

// oursForAdmins begins those of the service for admins.
const oursForAdmins = ours + "AdminService/"

// stream is a gRPC stream with a context of ours.
type stream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // that is what grpc.ServerStream asks for
	// foreign handlers do not know that the context may end before the stream.
	foreign bool
}

func (s *stream) Context() context.Context { return s.ctx }

// RecvMsg lets shutdown end a handler that waits for its client and is not ours.
// The goroutine ends with the stream, right after the handler.
func (s *stream) RecvMsg(m any) error {
	if !s.foreign {
		return s.ServerStream.RecvMsg(m)
	}
	received := make(chan error, 1)
	go func() { received <- s.ServerStream.RecvMsg(m) }()
	select {
	case err := <-received:
		return err
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	}
}

// admit finds out who calls, what right that needs, and whether they have it. The
// connection is given with an error too, when there is one.
func (s *Server) admit(ctx context.Context, method string) (c *connection, need authz.Rights, err error) {
	l := linkOf(ctx)
	if l == nil {
		return nil, 0, errNoIdentity
	}
	if c = s.clients.of(l); c == nil { // it has just ended
		return nil, 0, errNoIdentity
	}
	need, known := authz.Need(method)
	if !known || !s.cfg.Authz().Rights(c.peer).Allows(need) {
		return c, need, forbidden(c.peer, method, need)
	}
	return c, need, c.client.allow(s.cfg.Limits())
}

var errNoIdentity error = &gpreempt.Error{
	Code: gpreempt.CodeUnauthenticated, Reason: gpreempt.ReasonNoIdentity,
	Message: "nothing proves who calls",
	Next:    "connect over the daemon's unix socket, from a process the daemon can see in its pid namespace",
}

func forbidden(peer authz.Peer, method string, need authz.Rights) error {
	e := &gpreempt.Error{
		Code: gpreempt.CodePermissionDenied, Reason: gpreempt.ReasonNotOnline,
		Message: fmt.Sprintf("%v may not call %s", peer, method),
		Next:    howToGet(peer, "online"),
	}
	if need&authz.Online == 0 || strings.HasPrefix(method, "/"+gpreemptv1.AdminService_ServiceDesc.ServiceName+"/") {
		e.Reason = gpreempt.ReasonNotAdmin
		e.Next = howToGet(peer, "admin")
	}
	return e
}

// recoverPanic turns a panic into an error: one bad request must not take every
// other client's leases with it.
func (s *Server) recoverPanic(method string, err *error) {
	if r := recover(); r != nil {
		*err = errgrpc.ToStatus(s.panicked(method, r))
	}
}

func (s *Server) panicked(method string, r any) error {
	s.cfg.Log.Error("a handler panicked", zap.String("method", method), zap.Any("panic", r), zap.ByteString("stack", debug.Stack()))
	return &gpreempt.Error{
		Code: gpreempt.CodeInternal, Reason: gpreempt.ReasonInternal,
		Message: method + " failed inside the daemon",
		Next:    "report it with the stack in the daemon's log (journalctl -u gpreemptd)",
	}
}

package server

import (
	"context"
	"fmt"
	"runtime/debug"
	"strings"

	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/authz"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// interceptUnary is what stands before every call that is not a stream, behind
// guard. The order is a security property: nothing a handler does can get past
// recovery, and nobody reaches a handler unknown, without the right, or above the
// rate.
func (s *Server) interceptUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	defer s.recoverPanic(info.FullMethod, &err)
	c, known := ctx.Value(callerKey{}).(*connection)
	if !known {
		s.auditRefusal(nil, info.FullMethod, req, errNoIdentity)
		return nil, s.refuse(errNoIdentity)
	}
	need, err := s.allow(c, info.FullMethod)
	if err != nil {
		s.auditRefusal(c, info.FullMethod, req, err)
		return nil, s.refuse(err)
	}
	if need == authz.Admin {
		handler = s.audited(c, info.FullMethod, handler)
	}
	if s.simulated != nil && strings.HasPrefix(info.FullMethod, oursForAdmins) {
		if err := grpc.SetHeader(ctx, s.simulated); err != nil {
			return nil, api.ToStatus(err)
		}
	}
	if resp, err = handler(ctx, req); err != nil {
		return nil, s.refuse(err)
	}
	return resp, nil
}

// interceptStream is the same for streams, which are counted besides, and whose
// context ends when the server shuts down.
func (s *Server) interceptStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer s.recoverPanic(info.FullMethod, &err)
	c, err := s.enter(ss.Context())
	if err == nil {
		_, err = s.allow(c, info.FullMethod)
	}
	if err != nil {
		s.auditRefusal(c, info.FullMethod, nil, err)
		return s.refuse(err)
	}
	if s.simulated != nil && strings.HasPrefix(info.FullMethod, oursForAdmins) {
		if err := ss.SetHeader(s.simulated); err != nil {
			return api.ToStatus(err)
		}
	}
	if err := c.client.openStream(s.cfg.Limits()); err != nil {
		s.auditRefusal(c, info.FullMethod, nil, err)
		return s.refuse(err)
	}
	defer c.client.closeStream()
	ctx, cancel := context.WithCancelCause(withCaller(ss.Context(), c))
	defer cancel(nil)
	stop := context.AfterFunc(s.closing, func() { cancel(context.Cause(s.closing)) })
	defer stop()
	if err := handler(srv, &stream{ServerStream: ss, s: s, ctx: ctx, foreign: !strings.HasPrefix(info.FullMethod, ours)}); err != nil {
		return s.refuse(err)
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
	s   *Server
	ctx context.Context //nolint:containedctx // that is what grpc.ServerStream asks for
	// foreign handlers do not know that the context may end before the stream.
	foreign bool
}

func (s *stream) Context() context.Context { return s.ctx }

// RecvMsg lets shutdown end a handler that waits for its client and is not ours.
// The goroutine ends with the stream, right after the handler.
func (s *stream) RecvMsg(m any) error {
	if !s.foreign {
		return s.receive(m)
	}
	received := make(chan error, 1)
	go func() { received <- s.receive(m) }()
	select {
	case err := <-received:
		return err
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	}
}

func (s *stream) receive(m any) error {
	err := s.ServerStream.RecvMsg(m)
	s.s.countTooLarge(err)
	return err
}

// allow returns the right a method needs, and whether a caller has it.
func (s *Server) allow(c *connection, method string) (need authz.Rights, err error) {
	need, known := authz.Need(method)
	if !known || !s.cfg.Authz().Rights(c.peer).Allows(need) {
		return need, forbidden(c.peer, method, need)
	}
	return need, nil
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
		*err = s.refuse(s.panicked(method, r))
	}
}

func (s *Server) panicked(method string, r any) error {
	s.cfg.Log.Error("a handler panicked", logkey.Method(method), logkey.Panic(r), logkey.Stack(debug.Stack()))
	return &gpreempt.Error{
		Code: gpreempt.CodeInternal, Reason: gpreempt.ReasonInternal,
		Message: method + " failed inside the daemon",
		Next:    "report it with the stack in the daemon's log (journalctl -u gpreemptd)",
	}
}

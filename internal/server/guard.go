package server

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// guard registers services whose calls are refused before their message is read
// when their caller is unknown or above its rate. Interceptors come too late for
// that: a call whose message never comes would be none of theirs.
type guard struct{ s *Server }

// RegisterService registers a service.
func (g *guard) RegisterService(desc *grpc.ServiceDesc, impl any) {
	guarded := *desc
	guarded.Methods = make([]grpc.MethodDesc, len(desc.Methods))
	for i, m := range desc.Methods {
		guarded.Methods[i] = grpc.MethodDesc{MethodName: m.MethodName, Handler: g.method("/"+desc.ServiceName+"/"+m.MethodName, m)}
	}
	g.s.grpc.RegisterService(&guarded, impl)
}

// GetServiceInfo is what reflection asks for.
func (g *guard) GetServiceInfo() map[string]grpc.ServiceInfo { return g.s.grpc.GetServiceInfo() }

func (g *guard) method(name string, m grpc.MethodDesc) grpc.MethodHandler {
	s := g.s
	return func(srv any, ctx context.Context, read func(any) error, interceptor grpc.UnaryServerInterceptor) (resp any, err error) {
		defer s.recoverPanic(name, &err)
		c, err := s.enter(ctx)
		if err != nil {
			s.auditRefusal(c, name, nil, err)
			return nil, s.refuse(err)
		}
		if err := c.client.user.begin(); err != nil {
			c.client.charge(s.cfg.Limits(), refusalBytes)
			s.auditRefusal(c, name, nil, err)
			return nil, s.refuse(err)
		}
		defer c.client.user.end()
		timely := func(request any) error {
			late := time.AfterFunc(messageTime, func() { s.cut(c, name) })
			defer late.Stop()
			err := read(request)
			s.countTooLarge(err)
			return err
		}
		return m.Handler(srv, withCaller(ctx, c), timely, interceptor)
	}
}

// enter finds out who calls, and refuses whoever asks too much.
func (s *Server) enter(ctx context.Context) (*connection, error) {
	l := linkOf(ctx)
	if l == nil {
		return nil, errNoIdentity
	}
	c := s.clients.of(l)
	if c == nil { // it has just ended
		return nil, errNoIdentity
	}
	return c, c.client.ask(s.cfg.Limits())
}

// refuse counts an error and makes it a status.
func (s *Server) refuse(err error) error {
	s.countRefusal(err)
	return api.ToStatus(err)
}

func (s *Server) countRefusal(err error) {
	if why := gpreempt.ReasonOf(err); why != "" {
		s.cfg.Events.Refused(why)
	}
}

// countTooLarge counts what gRPC itself refuses when a message is read.
func (s *Server) countTooLarge(err error) {
	if err != nil && gpreempt.ReasonOf(api.FromStatus(err)) == gpreempt.ReasonMessageTooLarge {
		s.cfg.Events.Refused(gpreempt.ReasonMessageTooLarge)
	}
}

// cut ends the connection of a client that does not send what it began: there is
// no other way to end a call whose message is waited for.
func (s *Server) cut(c *connection, method string) {
	s.cfg.Events.Refused(gpreempt.ReasonSlowRequest)
	s.cfg.Log.Warn("a connection is closed: the message of a call did not follow its header in time",
		logkey.Peer(c.peer), logkey.Method(method), logkey.Waited(messageTime))
	_ = c.link.Close()
}

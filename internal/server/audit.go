package server

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// auditMessage is the message of every line of the audit log.
const auditMessage = "admin call"

// The outcomes of a call in the audit log.
const (
	auditDone     = "done"
	auditFailed   = "failed"   // it was allowed, and gave an error
	auditRefused  = "refused"  // it was not allowed, or came too often
	auditPanicked = "panicked" // of which the log tells more
)

// maxAudited is how many bytes of a request the audit log shows.
const maxAudited = 512

// scarce lets a few things a second through and counts the others: whoever is
// refused must not fill the log. Its zero value is ready, its method safe for
// concurrent use.
type scarce struct {
	mu      sync.Mutex // guards all below
	limiter *rate.Limiter
	held    uint64
}

// next reports whether this one gets through, and how many were held back since the
// last that did.
func (s *scarce) next() (held uint64, through bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.limiter == nil {
		s.limiter = rate.NewLimiter(scarceRate, scarceBurst)
	}
	if !s.limiter.Allow() {
		s.held++
		return 0, false
	}
	return s.takeLocked(), true
}

// rest returns how many were held back and not told of.
func (s *scarce) rest() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takeLocked()
}

func (s *scarce) takeLocked() (held uint64) {
	held, s.held = s.held, 0
	return held
}

const (
	scarceRate  = 10
	scarceBurst = 20
)

// deed is what a handler says of the verb it carried out.
type deed struct {
	verb   string
	record scheduler.Record
}

// deedKey is where the context of an audited call has its *deed.
type deedKey struct{}

// audited puts a line into the audit log for each call of a handler, however it
// ends.
func (s *Server) audited(c *connection, method string, next grpc.UnaryHandler) grpc.UnaryHandler {
	return func(ctx context.Context, req any) (resp any, err error) {
		var did deed
		outcome := auditPanicked
		defer func() { s.audit(c, outcome, method, req, err, did.fields(s)...) }()
		resp, err = next(context.WithValue(ctx, deedKey{}, &did), req)
		if outcome = auditDone; err != nil {
			outcome = auditFailed
		}
		return resp, err
	}
}

func (d deed) fields(s *Server) (fields []zap.Field) {
	if d.verb != "" {
		fields = append(fields, logkey.Verb(d.verb))
	}
	if !d.record.Target.IsZero() {
		fields = append(fields, logkey.Target(d.record.Target))
	}
	if d.record.Lease != 0 {
		fields = append(fields, logkey.Lease(leaseID(s.leasePrefix, d.record.Lease)))
	}
	return fields
}

// auditRefusal puts a call of the admin service that did not reach its handler
// into the audit log. c is nil when nothing was proved. A caller that is refused
// all the time gets a line now and then, which says how many there were between.
func (s *Server) auditRefusal(c *connection, method string, req any, err error) {
	if !strings.HasPrefix(method, oursForAdmins) {
		return
	}
	var more []zap.Field
	if c != nil {
		held, through := c.client.refusals.next()
		if !through {
			return
		}
		if held > 0 {
			more = append(more, logkey.Unlogged(held))
		}
	}
	s.audit(c, auditRefused, method, req, err, more...)
}

// auditRest says how many refusals of a client that leaves had no line.
func (s *Server) auditRest(c *connection) {
	if held := c.client.refusals.rest(); held > 0 {
		s.audit(c, auditRefused, "", nil, nil, logkey.Unlogged(held))
	}
}

// audit writes a line. req is nil for a stream, whose request is not read yet.
func (s *Server) audit(c *connection, outcome, method string, req any, err error, more ...zap.Field) {
	level := zapcore.InfoLevel
	if outcome == auditRefused {
		level = zapcore.WarnLevel
	}
	entry := s.cfg.Audit.Check(level, auditMessage)
	if entry == nil {
		return
	}
	fields := []zap.Field{logkey.Audit(), logkey.Outcome(outcome)}
	if method != "" {
		fields = append(fields, logkey.Method(strings.TrimPrefix(method, oursForAdmins)))
	}
	if m, ok := req.(proto.Message); ok {
		fields = append(fields, logkey.Request(requestText(m)))
	}
	if c != nil {
		fields = append(fields, c.fields()...)
	}
	fields = append(fields, more...)
	if err != nil {
		if reason := gpreempt.ReasonOf(api.FromStatus(err)); reason != "" {
			fields = append(fields, logkey.Reason(reason))
		}
		fields = append(fields, logkey.Err(err))
	}
	entry.Write(fields...)
}

// requestText writes a request in one line.
func requestText(m proto.Message) string {
	data, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return "unreadable: " + err.Error() // it holds text that is no UTF-8
	}
	var line bytes.Buffer
	if json.Compact(&line, data) != nil {
		line.Write(data) // what Marshal gives is JSON
	}
	if line.Len() > maxAudited {
		return strings.ToValidUTF8(string(line.Bytes()[:maxAudited]), "") + "..."
	}
	return line.String()
}

package server

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// auditMessage is the message of every line of the audit log.
const auditMessage = "admin call"

// The outcomes of a call in the audit log.
const (
	auditDone     = "done"
	auditFailed   = "failed"   // allowed, and returned an error
	auditRefused  = "refused"  // not allowed, or above the rate
	auditPanicked = "panicked" // the daemon's log has the stack
)

// maxAudited is how many bytes of a request the audit log shows.
const maxAudited = 512

// logLimiter limits the lines about refused calls of a user, so that no number of its
// processes can fill the log. Its methods are safe for concurrent use.
type logLimiter struct {
	lines, ends *rate.Limiter
	skipped     atomic.Uint64
	last        atomic.Pointer[connection] // of the last skipped line
}

func newLogLimiter() *logLimiter {
	return &logLimiter{lines: rate.NewLimiter(10, 20), ends: rate.NewLimiter(1, 1)}
}

// allow reports whether a line about a call may be written, and how many were skipped since
// the last one.
func (l *logLimiter) allow(c *connection) (skipped uint64, ok bool) {
	if !l.lines.Allow() {
		l.last.Store(c)
		l.skipped.Add(1)
		return 0, false
	}
	return l.skipped.Swap(0), true
}

// auditEntry is what a handler reports of the action it carried out.
type auditEntry struct {
	verb   string
	record scheduler.Record
}

// audited returns a handler that writes a line to the audit log for each call of
// next, whatever its outcome.
func (s *Server) audited(c *connection, method string, next grpc.UnaryHandler) grpc.UnaryHandler {
	return func(ctx context.Context, req any) (resp any, err error) {
		entry := &callOf(ctx).audit
		outcome := auditPanicked
		defer func() { s.audit(c, outcome, method, req, err, entry.fields(s)...) }()
		resp, err = next(ctx, req)
		if outcome = auditDone; err != nil {
			outcome = auditFailed
		}
		return resp, err
	}
}

func (e *auditEntry) fields(s *Server) (fields []zap.Field) {
	if e.verb != "" {
		fields = append(fields, log.Verb(e.verb))
	}
	if !e.record.Target.IsZero() {
		fields = append(fields, log.Target(e.record.Target))
	}
	if e.record.Lease != 0 {
		fields = append(fields, log.Lease(leaseID(s.leasePrefix, e.record.Lease)))
	}
	return fields
}

// auditRefusal writes a line to the audit log for a call of the admin service that
// did not reach its handler. c is nil when the caller has no identity. The lines of
// one user are limited; a line says how many were skipped before it.
func (s *Server) auditRefusal(c *connection, method string, req any, err error) {
	if !strings.HasPrefix(method, adminPrefix) {
		return
	}
	limiter := s.unidentified
	if c != nil {
		limiter = c.client.user.refusals
	}
	skipped, ok := limiter.allow(c)
	if !ok {
		return
	}
	var more []zap.Field
	if skipped > 0 {
		more = append(more, log.Unlogged(skipped))
	}
	s.audit(c, auditRefused, method, req, err, more...)
}

// auditSkipped writes a line with the number of refusals of a user that had none, and with the
// process of the last of them.
func (s *Server) auditSkipped(u *user) {
	if skipped := u.refusals.skipped.Swap(0); skipped > 0 {
		s.audit(u.refusals.last.Load(), auditRefused, "", nil, nil, log.Unlogged(skipped))
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
	fields := []zap.Field{log.Audit(true), log.Outcome(outcome)}
	if method != "" {
		fields = append(fields, log.Method(strings.TrimPrefix(method, adminPrefix)))
	}
	if m, ok := req.(proto.Message); ok {
		fields = append(fields, log.Request(requestText(m)))
	}
	if c != nil {
		fields = append(fields, c.fields()...)
	}
	fields = append(fields, more...)
	if err != nil {
		if reason := reasonOf(err); reason != "" {
			fields = append(fields, log.Reason(string(reason)))
		}
		fields = append(fields, log.Err(err))
	}
	entry.Write(fields...)
}

// requestText returns a request as one line of JSON.
func requestText(m proto.Message) string {
	data, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return "unreadable: " + err.Error() // it contains text that is not UTF-8
	}
	var line bytes.Buffer
	if json.Compact(&line, data) != nil {
		line.Write(data) // Marshal returns JSON
	}
	if line.Len() > maxAudited {
		return strings.ToValidUTF8(string(line.Bytes()[:maxAudited]), "") + "..."
	}
	return line.String()
}

package client

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// goAway is in gRPC's text for a connection that the daemon has refused: reason and message.
var goAway = regexp.MustCompile(`ENHANCE_YOUR_CALM, debug data: ("[A-Z_]+: (?:[^"\\]|\\.)*")`)

// FromStatus returns the error of the domain in the status of a call that was made without this package, by
// the generated code. A status without an
// ErrorInfo of the domain becomes a *gpreempt.Error with the status's code; its
// reason is DAEMON_UNAVAILABLE when the daemon cannot be reached,
// MESSAGE_TOO_LARGE when gRPC refused the size, and "" otherwise.
// CANCELED and DEADLINE_EXCEEDED become errors that wrap context.Canceled and
// context.DeadlineExceeded. An error that is not a status is returned unchanged.
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	for _, detail := range st.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == api.Domain {
			next := info.GetMetadata()[api.NextKey]
			message := st.Message()
			if next != "" {
				message = strings.TrimSuffix(message, ": "+next)
			}
			return fromParts(uint32(st.Code()), info.GetReason(), message, next)
		}
	}
	if quoted := goAway.FindStringSubmatch(st.Message()); st.Code() == codes.Unavailable && quoted != nil {
		if text, err := strconv.Unquote(quoted[1]); err == nil {
			reason, message, _ := strings.Cut(text, ": ")
			return fromParts(uint32(codes.ResourceExhausted), reason, message, "use the open connections, or try again later")
		}
	}
	switch {
	case st.Code() == codes.Unavailable:
		return &gpreempt.Error{
			Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonDaemonUnavailable,
			Message: "gpreemptd cannot be reached: " + st.Message(),
			Next:    "check that it runs (systemctl status gpreemptd) and that this user may open its socket",
		}
	case st.Code() == codes.ResourceExhausted && strings.Contains(st.Message(), api.TooLarge):
		return &gpreempt.Error{
			Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonMessageTooLarge,
			Message: st.Message(), Next: "send less in one message",
		}
	}
	return fromParts(uint32(st.Code()), "", st.Message(), "")
}

// FromFrame returns the error of an error frame of a Session stream. nil stays nil.
func FromFrame(f *gpreemptv1.FrameError) error {
	if f == nil {
		return nil
	}
	return fromParts(f.GetCode(), f.GetReason(), f.GetMessage(), f.GetNext())
}

// fromParts returns the error that package api took apart.
func fromParts(code uint32, reason, message, next string) error {
	if reason == "" {
		switch codes.Code(code) {
		case codes.Canceled:
			return &contextError{message, context.Canceled}
		case codes.DeadlineExceeded:
			return &contextError{message, context.DeadlineExceeded}
		default:
		}
	}
	return &gpreempt.Error{Code: gpreempt.Code(code), Reason: gpreempt.Reason(reason), Message: message, Next: next}
}

// contextError is a context error of the other side, with its message.
type contextError struct {
	message string
	cause   error
}

func (e *contextError) Error() string {
	if e.message == e.cause.Error() {
		return e.message
	}
	return fmt.Sprintf("%s (%v)", e.message, e.cause)
}

func (e *contextError) Unwrap() error { return e.cause }

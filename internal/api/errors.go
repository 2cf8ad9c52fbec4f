// Package api implements what the daemon and its clients agree on in addition to the
// generated code: how an error of the domain crosses gRPC, as the status of a
// call or as an error frame of a stream, and back; the names of enum values; and
// the version of a binary.
//
// The status of a *gpreempt.Error has its code, the message "MESSAGE: NEXT" for
// programs that know nothing of gpreempt, and a google.rpc.ErrorInfo with the
// domain "gpreempt", the reason, and NEXT under the metadata key "next".
// FromStatus(ToStatus(e)) equals e.
package api

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// Domain is the domain of every ErrorInfo the daemon sends.
	Domain = "gpreempt"
	// NextKey is the key of the remedy in an ErrorInfo's metadata.
	NextKey = "next"
)

// ToStatus returns err as a gRPC status error. The first *gpreempt.Error in err's
// chain is sent with all its fields, without the text of the errors that wrap it.
// A context error becomes CANCELED or DEADLINE_EXCEEDED, a status error is
// returned unchanged, and any other error becomes INTERNAL. nil stays nil.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*gpreempt.Error](err); !ok {
		if st, ok := status.FromError(err); ok {
			return st.Err()
		}
	}
	e := describe(err)
	text := e.Message
	if e.Next != "" {
		text += ": " + e.Next
	}
	st := status.New(codes.Code(e.Code), text)
	if e.Reason == "" {
		return st.Err()
	}
	info := &errdetails.ErrorInfo{Reason: string(e.Reason), Domain: Domain}
	if e.Next != "" {
		info.Metadata = map[string]string{NextKey: e.Next}
	}
	detailed, err := st.WithDetails(info)
	if err != nil {
		return st.Err() // the text without the details
	}
	return detailed.Err()
}

// goAway is in gRPC's text for a connection that the daemon has refused: reason and message.
var goAway = regexp.MustCompile(`ENHANCE_YOUR_CALM, debug data: ("[A-Z_]+: (?:[^"\\]|\\.)*")`)

// FromStatus returns the error that ToStatus converted. A status without an
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
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == Domain {
			next := info.GetMetadata()[NextKey]
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
	case st.Code() == codes.ResourceExhausted && strings.Contains(st.Message(), "larger than max"):
		return &gpreempt.Error{
			Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonMessageTooLarge,
			Message: st.Message(), Next: "send less in one message",
		}
	}
	return fromParts(uint32(st.Code()), "", st.Message(), "")
}

// ToFrame returns err as an error frame of a Session stream, converted by the
// rules of ToStatus. nil stays nil.
func ToFrame(err error) *gpreemptv1.FrameError {
	if err == nil {
		return nil
	}
	e := describe(err)
	return &gpreemptv1.FrameError{Code: uint32(e.Code), Reason: string(e.Reason), Message: e.Message, Next: e.Next}
}

// FromFrameError returns the error that ToFrame converted. nil stays nil.
func FromFrameError(f *gpreemptv1.FrameError) error {
	if f == nil {
		return nil
	}
	return fromParts(f.GetCode(), f.GetReason(), f.GetMessage(), f.GetNext())
}

// describe returns the parts of err that are sent: code, reason, message and next
// step, as text that protobuf accepts.
func describe(err error) gpreempt.Error {
	e := gpreempt.Error{
		Code: gpreempt.CodeInternal, Reason: gpreempt.ReasonInternal, Message: err.Error(),
		Next: "see the log of gpreemptd (journalctl -u gpreemptd) and report the error",
	}
	if domain, ok := errors.AsType[*gpreempt.Error](err); ok {
		e = *domain
	} else if errors.Is(err, context.Canceled) {
		e = gpreempt.Error{Code: gpreempt.Code(codes.Canceled), Message: err.Error()}
	} else if errors.Is(err, context.DeadlineExceeded) {
		e = gpreempt.Error{Code: gpreempt.Code(codes.DeadlineExceeded), Message: err.Error()}
	} else if st, ok := status.FromError(err); ok {
		e = gpreempt.Error{Code: gpreempt.Code(st.Code()), Message: st.Message()}
	}
	if e.Code == 0 {
		e.Code = gpreempt.CodeInternal // code 0 is OK, which an error must not become
	}
	e.Message = strings.ToValidUTF8(e.Message, "\uFFFD")
	e.Next = strings.ToValidUTF8(e.Next, "\uFFFD")
	return e
}

// fromParts returns the error that describe took apart.
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

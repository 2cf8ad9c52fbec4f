// Package errgrpc hides how an error of the domain crosses gRPC: as the status
// of a call or as an error frame of a stream, and back.
//
// The status of a *gpreempt.Error has its code, the message "MESSAGE: NEXT" for
// programs that know nothing of gpreempt, and a google.rpc.ErrorInfo with the
// domain "gpreempt", the reason, and NEXT under the metadata key "next". What
// is sent is what is received: FromStatus(ToStatus(e)) equals e.
package errgrpc

import (
	"context"
	"errors"
	"fmt"
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
// chain crosses whole, and what was wrapped around it stays here; a canceled
// or overdue context becomes that code; what is a status already is kept; all
// else is INTERNAL. nil stays nil.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ours := errors.AsType[*gpreempt.Error](err); !ours {
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
		return st.Err() // the words without the details
	}
	return detailed.Err()
}

// FromStatus returns back what ToStatus was given. A status that carries no
// ErrorInfo of ours becomes a *gpreempt.Error with its code too, with a reason
// where it is clear: DAEMON_UNAVAILABLE when the daemon cannot be reached,
// MESSAGE_TOO_LARGE when gRPC refused the size; otherwise the reason is "".
// CANCELED and DEADLINE_EXCEEDED become errors that wrap context.Canceled and
// context.DeadlineExceeded. What is no status is given back as it is.
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
			return revive(uint32(st.Code()), info.GetReason(), message, next)
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
	return revive(uint32(st.Code()), "", st.Message(), "")
}

// ToFrame returns err as an error frame of a Session stream, by the rules of
// ToStatus. nil stays nil.
func ToFrame(err error) *gpreemptv1.FrameError {
	if err == nil {
		return nil
	}
	e := describe(err)
	return &gpreemptv1.FrameError{Code: uint32(e.Code), Reason: string(e.Reason), Message: e.Message, Next: e.Next}
}

// FromFrame returns back what ToFrame was given. nil stays nil.
func FromFrame(f *gpreemptv1.FrameError) error {
	if f == nil {
		return nil
	}
	return revive(f.GetCode(), f.GetReason(), f.GetMessage(), f.GetNext())
}

// describe returns what crosses of err: its code, reason and words, as text that
// protobuf accepts.
func describe(err error) gpreempt.Error {
	e := gpreempt.Error{
		Code: gpreempt.CodeInternal, Reason: gpreempt.ReasonInternal, Message: err.Error(),
		Next: "look in the log of gpreemptd (journalctl -u gpreemptd) and report it",
	}
	if ours, ok := errors.AsType[*gpreempt.Error](err); ok {
		e = *ours
	} else if errors.Is(err, context.Canceled) {
		e = gpreempt.Error{Code: gpreempt.Code(codes.Canceled), Message: err.Error()}
	} else if errors.Is(err, context.DeadlineExceeded) {
		e = gpreempt.Error{Code: gpreempt.Code(codes.DeadlineExceeded), Message: err.Error()}
	} else if st, ok := status.FromError(err); ok {
		e = gpreempt.Error{Code: gpreempt.Code(st.Code()), Message: st.Message()}
	}
	if e.Code == 0 {
		e.Code = gpreempt.CodeInternal // its maker forgot; an error must not become OK
	}
	e.Message = strings.ToValidUTF8(e.Message, "\uFFFD")
	e.Next = strings.ToValidUTF8(e.Next, "\uFFFD")
	return e
}

// revive is the other end of describe.
func revive(code uint32, reason, message, next string) error {
	if reason == "" {
		switch codes.Code(code) {
		case codes.Canceled:
			return &gone{message, context.Canceled}
		case codes.DeadlineExceeded:
			return &gone{message, context.DeadlineExceeded}
		default:
		}
	}
	return &gpreempt.Error{Code: gpreempt.Code(code), Reason: gpreempt.Reason(reason), Message: message, Next: next}
}

// gone is a context error that came over the wire, with the words it came with.
type gone struct {
	message string
	cause   error
}

func (g *gone) Error() string {
	if g.message == g.cause.Error() {
		return g.message
	}
	return fmt.Sprintf("%s (%v)", g.message, g.cause)
}

func (g *gone) Unwrap() error { return g.cause }

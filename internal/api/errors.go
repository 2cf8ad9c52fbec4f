// Package api implements what the daemon and its clients agree on in addition to the
// generated code: how an error of the domain crosses gRPC, as the status of a
// call or as an error frame of a stream; the names of enum values; and
// the version of a binary.
//
// The status of a *gpreempt.Error has its code, the message "MESSAGE: NEXT" for
// programs that know nothing of gpreempt, and a google.rpc.ErrorInfo with the
// domain "gpreempt", the reason, and NEXT under the metadata key "next".
// client.FromStatus(ToStatus(e)) equals e.
package api

import (
	"context"
	"errors"
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
	// TooLarge is in gRPC's text for a message above the bound of its size.
	TooLarge = "larger than max"
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

// ToFrame returns err as an error frame of a Session stream, converted by the
// rules of ToStatus. nil stays nil.
func ToFrame(err error) *gpreemptv1.FrameError {
	if err == nil {
		return nil
	}
	e := describe(err)
	return &gpreemptv1.FrameError{Code: uint32(e.Code), Reason: string(e.Reason), Message: e.Message, Next: e.Next}
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

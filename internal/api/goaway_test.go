package api_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// gRPC has the refusal of a connection in the text of an error only.
func TestReasonOfAClosedConnectionIsThatOfTheDaemon(t *testing.T) {
	err := client.FromStatus(status.Error(codes.Unavailable, `closing transport due to: connection error: desc = "error reading from server: EOF", `+
		`received prior goaway: code: ENHANCE_YOUR_CALM, debug data: "CONNECTIONS_PER_USER: certificate \"dns:a\" has 3 connections, its maximum"`))
	want := &gpreempt.Error{
		Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonConnsPerUser,
		Message: `certificate "dns:a" has 3 connections, its maximum`, Next: "use the open connections, or try again later",
	}
	if diff := cmp.Diff(error(want), err); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

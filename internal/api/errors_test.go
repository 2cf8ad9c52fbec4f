package api_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// everyCode returns errors with each code of the domain.
func everyCode() []*gpreempt.Error {
	var all []*gpreempt.Error
	for code, reason := range map[gpreempt.Code]gpreempt.Reason{
		gpreempt.CodeInvalidArgument:    gpreempt.ReasonUnknownGPU,
		gpreempt.CodeNotFound:           gpreempt.ReasonUnknownLease,
		gpreempt.CodeAlreadyExists:      gpreempt.ReasonRequestIDReused,
		gpreempt.CodePermissionDenied:   gpreempt.ReasonForeignLease,
		gpreempt.CodeResourceExhausted:  gpreempt.ReasonLeasesTotal,
		gpreempt.CodeFailedPrecondition: gpreempt.ReasonNotOffline,
		gpreempt.CodeOutOfRange:         gpreempt.ReasonRevisionCompacted,
		gpreempt.CodeInternal:           gpreempt.ReasonInternal,
		gpreempt.CodeUnavailable:        gpreempt.ReasonShuttingDown,
		gpreempt.CodeUnauthenticated:    gpreempt.ReasonNoIdentity,
	} {
		all = append(all,
			&gpreempt.Error{Code: code, Reason: reason, Message: "lease 7: ended", Next: "announce again: leases are cheap"},
			&gpreempt.Error{Code: code, Reason: reason, Message: "lease 7: ended"})
	}
	return all
}

// overTheWire returns a status error as the other side receives it.
func overTheWire(t *testing.T, err error) error {
	t.Helper()
	st, ok := status.FromError(err)
	if !ok {
		t.Fatalf("%v is not a status", err)
	}
	wire, err := proto.Marshal(st.Proto())
	if err != nil {
		t.Fatal(err)
	}
	other := status.New(codes.OK, "").Proto()
	if err := proto.Unmarshal(wire, other); err != nil {
		t.Fatal(err)
	}
	return status.FromProto(other).Err()
}

func TestStatusCarriesAllFieldsOfAnError(t *testing.T) {
	for _, want := range everyCode() {
		st := overTheWire(t, api.ToStatus(fmt.Errorf("notify: %w", want)))
		if got := status.Code(st); got != codes.Code(want.Code) {
			t.Errorf("%v is sent as %v", want, got)
		}
		if diff := cmp.Diff(error(want), client.FromStatus(st)); diff != "" {
			t.Errorf("code %d (-sent +received):\n%s", want.Code, diff)
		}
	}
}

func TestFrameCarriesAllFieldsOfAnError(t *testing.T) {
	for _, want := range everyCode() {
		frame := api.ToFrame(fmt.Errorf("notify: %w", want))
		if diff := cmp.Diff(error(want), client.FromFrame(frame)); diff != "" {
			t.Errorf("code %d (-sent +received):\n%s", want.Code, diff)
		}
	}
}

func TestStatusHasAMessageForOtherPrograms(t *testing.T) {
	err := api.ToStatus(&gpreempt.Error{
		Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownLease,
		Message: "no lease 7", Next: "announce again",
	})
	st, _ := status.FromError(err)
	if want := "no lease 7: announce again"; st.Message() != want {
		t.Errorf("message %q, want %q", st.Message(), want)
	}
	want := []any{&errdetails.ErrorInfo{
		Domain: "gpreempt", Reason: "UNKNOWN_LEASE", Metadata: map[string]string{"next": "announce again"},
	}}
	if diff := cmp.Diff(want, st.Details(), protocmp.Transform()); diff != "" {
		t.Errorf("details (-want +got):\n%s", diff)
	}
}

func TestFrameKeepsMessageAndNextStepApart(t *testing.T) {
	got := api.ToFrame(&gpreempt.Error{
		Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownLease,
		Message: "no lease 7", Next: "announce again",
	})
	want := &gpreemptv1.FrameError{Code: 5, Reason: "UNKNOWN_LEASE", Message: "no lease 7", Next: "announce again"}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("frame (-want +got):\n%s", diff)
	}
}

func TestNilIsNil(t *testing.T) {
	if err := errors.Join(api.ToStatus(nil), client.FromStatus(nil), client.FromFrame(nil)); err != nil {
		t.Error(err)
	}
	if f := api.ToFrame(nil); f != nil {
		t.Errorf("frame %v", f)
	}
}

func TestContextErrorsStayContextErrors(t *testing.T) {
	for _, want := range []error{context.Canceled, context.DeadlineExceeded} {
		wrapped := fmt.Errorf("waiting for quiet GPUs: %w", want)
		if got := client.FromStatus(overTheWire(t, api.ToStatus(wrapped))); !errors.Is(got, want) {
			t.Errorf("status: %v became %v", wrapped, got)
		}
		if got := client.FromFrame(api.ToFrame(wrapped)); !errors.Is(got, want) {
			t.Errorf("frame: %v became %v", wrapped, got)
		}
	}
}

func TestUnknownErrorsAreInternal(t *testing.T) {
	want := &gpreempt.Error{
		Code: gpreempt.CodeInternal, Reason: gpreempt.ReasonInternal, Message: "unexpected EOF",
		Next: "see the log of gpreemptd (journalctl -u gpreemptd) and report the error",
	}
	if diff := cmp.Diff(error(want), client.FromStatus(api.ToStatus(io.ErrUnexpectedEOF))); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(error(want), client.FromFrame(api.ToFrame(io.ErrUnexpectedEOF))); diff != "" {
		t.Errorf("frame (-want +got):\n%s", diff)
	}
}

func TestOtherStatusKeepsItsCode(t *testing.T) {
	other := status.Error(codes.Unimplemented, "unknown service x")
	want := error(&gpreempt.Error{Code: gpreempt.Code(codes.Unimplemented), Message: "unknown service x"})
	if diff := cmp.Diff(want, client.FromStatus(api.ToStatus(other))); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, client.FromFrame(api.ToFrame(other))); diff != "" {
		t.Errorf("frame (-want +got):\n%s", diff)
	}
}

func TestOtherErrorsStayUnchanged(t *testing.T) {
	if got := client.FromStatus(io.EOF); !errors.Is(got, io.EOF) {
		t.Errorf("got %v", got)
	}
}

func TestErrorWithoutCodeIsNeverOK(t *testing.T) {
	if got := status.Code(api.ToStatus(&gpreempt.Error{Reason: gpreempt.ReasonInternal, Message: "no code"})); got != codes.Internal {
		t.Errorf("code %v, want Internal", got)
	}
}

func TestInvalidUTF8IsReplaced(t *testing.T) {
	sent := &gpreempt.Error{Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownTarget, Message: "no \xff", Next: "try \xfe"}
	want := error(&gpreempt.Error{Code: sent.Code, Reason: sent.Reason, Message: "no \uFFFD", Next: "try \uFFFD"})
	if diff := cmp.Diff(want, client.FromStatus(overTheWire(t, api.ToStatus(sent)))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// gRPC itself returns these two errors, and their texts may change.
func TestErrorsOfGRPCHaveReasons(t *testing.T) {
	path := filepath.Join(testutil.TempSocketDir(t), "s")
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	online := gpreemptv1.NewOnlineServiceClient(conn)

	_, err = online.Complete(t.Context(), &gpreemptv1.CompleteRequest{})
	if got := gpreempt.ReasonOf(client.FromStatus(err)); got != gpreempt.ReasonDaemonUnavailable {
		t.Errorf("without a listener: reason %q of %v", got, err)
	}

	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(16))
	gpreemptv1.RegisterOnlineServiceServer(server, gpreemptv1.UnimplementedOnlineServiceServer{})
	served := make(chan error)
	go func() { served <- server.Serve(l) }()
	defer func() {
		server.Stop()
		<-served
	}()
	_, err = online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: strings.Repeat("7", 17)}, grpc.WaitForReady(true))
	if got := gpreempt.ReasonOf(client.FromStatus(err)); got != gpreempt.ReasonMessageTooLarge {
		t.Errorf("too large: reason %q of %v", got, err)
	}
}

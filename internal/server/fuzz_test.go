package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// rawFrame returns an HTTP/2 frame (RFC 9113, 4.1).
func rawFrame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := append([]byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}, 0, 0, 0, 0)
	binary.BigEndian.PutUint32(b[5:], stream)
	return append(b, payload...)
}

// rawCall returns the beginning of the first call of a connection: HEADERS, with literal
// fields (RFC 7541, 6.2.2).
func rawCall(method string) []byte {
	var block []byte
	for _, s := range []string{":method", "POST", ":scheme", "http", ":authority", "x", ":path", method, "content-type", "application/grpc", "te", "trailers"} {
		if s[0] == ':' || s == "content-type" || s == "te" {
			block = append(block, 0)
		}
		block = append(append(block, byte(len(s))), s...)
	}
	return rawFrame(1, 4, 1, block)
}

func rawMessage(m proto.Message) []byte {
	payload, _ := proto.Marshal(m) // a message of the test
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(payload))), payload...)
}

// FuzzConnection writes bytes to the socket of a running server. The server answers the
// next caller, and no lease of the connection remains.
func FuzzConnection(f *testing.F) {
	h := startHost(f)
	preface := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	hello := append(bytes.Clone(preface), rawFrame(4, 0, 0, nil)...)
	announce := &gpreemptv1.NotifyOnlineRequest{Label: "fuzz"}
	for _, call := range [][]byte{
		nil,
		append(rawCall(gpreemptv1.OnlineService_NotifyOnline_FullMethodName), rawFrame(0, 1, 1, rawMessage(announce))...),
		append(rawCall(gpreemptv1.OnlineService_Session_FullMethodName), rawFrame(0, 0, 1, rawMessage(announceFrame(1, announce)))...),
		append(rawCall(gpreemptv1.OnlineService_Session_FullMethodName), rawFrame(0, 0, 1, rawMessage(completeFrame(1, "x")))...),
		append(rawCall(gpreemptv1.AdminService_GetStatus_FullMethodName), rawFrame(0, 1, 1, make([]byte, 5))...),
		append(rawCall(gpreemptv1.AdminService_WatchEvents_FullMethodName), rawFrame(0, 1, 1, make([]byte, 5))...),
		append(rawCall("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"), rawFrame(3, 0, 1, []byte{0, 0, 0, 8})...),
		rawFrame(6, 0, 0, make([]byte, 8)),
		rawFrame(8, 0, 0, []byte{0x7f, 0xff, 0xff, 0xff}),
		rawFrame(4, 0, 0, []byte{0, 4, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}),
		rawFrame(1, 0, 1, []byte{0x82, 0x86}),
	} {
		f.Add(append(bytes.Clone(hello), call...))
	}
	f.Add(preface[:10])
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	admin := h.admin(f)
	f.Fuzz(func(t *testing.T, input []byte) {
		// Calls that change the host would affect the next input.
		for _, verb := range []string{"SetDrain", "SetPolicy", "Classify", "Release", "Suspend", "Resume", "CreateLease"} {
			if bytes.Contains(input, []byte(verb)) {
				t.Skip()
			}
		}
		conn, err := net.Dial("unix", h.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write(input) // the server may have closed before the end
		if err := conn.(*net.UnixConn).CloseWrite(); err == nil {
			// The server closes the connection when the client has ended its side.
			if _, err := io.Copy(io.Discard, conn); err != nil {
				if late, ok := errors.AsType[net.Error](err); ok && late.Timeout() {
					t.Errorf("the server does not close the connection after %q", input)
				}
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{}); err != nil {
			t.Errorf("the next caller gets no answer: %v", err)
		}
		h.until(t, "the end of every lease", func() bool { return len(h.leases()) == 0 })
	})
}

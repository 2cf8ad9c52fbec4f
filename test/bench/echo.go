package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// The messages of each call. The echo's answers have the size of the daemon's.
var (
	announcement = &gpreemptv1.NotifyOnlineRequest{Label: "bench", Ttl: durationpb.New(time.Minute), MaxWait: durationpb.New(5 * time.Second)}
	announced    = &gpreemptv1.NotifyOnlineResponse{
		LeaseId: "0123456789abcdef-1000", Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE, SuspendedTargets: 1,
		GpuIds: []uint32{63420}, Ttl: durationpb.New(time.Minute),
		Timing: &gpreemptv1.Timing{Decide: durationpb.New(12345), Quiesce: durationpb.New(12345), Total: durationpb.New(24680)},
	}
	completed = &gpreemptv1.CompleteResponse{
		End: gpreemptv1.LeaseEnd_LEASE_END_COMPLETED, Held: durationpb.New(99999),
		Timing: &gpreemptv1.Timing{Decide: durationpb.New(9999), Total: durationpb.New(9999)},
	}
)

// echo answers every call at once.
type echo struct {
	gpreemptv1.UnimplementedOnlineServiceServer
}

func (echo) NotifyOnline(context.Context, *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, error) {
	return announced, nil
}

func (echo) Complete(context.Context, *gpreemptv1.CompleteRequest) (*gpreemptv1.CompleteResponse, error) {
	return completed, nil
}

func (echo) Session(stream gpreemptv1.OnlineService_SessionServer) error {
	for {
		frame, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		answer := &gpreemptv1.SessionResponse{Tag: frame.GetTag()}
		if frame.GetComplete() != nil {
			answer.Frame = &gpreemptv1.SessionResponse_Completed{Completed: completed}
		} else {
			answer.Frame = &gpreemptv1.SessionResponse_Announced{Announced: announced}
		}
		if err := stream.Send(answer); err != nil {
			return err
		}
	}
}

// The sockets of the echo in its directory.
func rawSocket(dir string) string  { return filepath.Join(dir, "raw.sock") }
func echoSocket(dir string) string { return filepath.Join(dir, "echo.sock") }

// serveEcho serves bytes and bare gRPC until ctx ends. It prints a line when it is ready.
func serveEcho(ctx context.Context, dir string) error {
	var listeners net.ListenConfig
	raw, err := listeners.Listen(ctx, "unix", rawSocket(dir))
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := raw.Accept()
			if err != nil {
				return // closed
			}
			go pong(conn)
		}
	}()
	lis, err := listeners.Listen(ctx, "unix", echoSocket(dir))
	if err != nil {
		return errors.Join(err, raw.Close())
	}
	server := grpc.NewServer()
	gpreemptv1.RegisterOnlineServiceServer(server, echo{})
	context.AfterFunc(ctx, server.Stop)
	fmt.Println("ready")
	return errors.Join(server.Serve(lis), raw.Close())
}

// pong answers each request with as many bytes as an answer has.
func pong(conn net.Conn) {
	defer conn.Close()
	request, answer := make([]byte, proto.Size(announcement)), make([]byte, proto.Size(announced))
	for {
		if _, err := io.ReadFull(conn, request); err != nil {
			return // the client has closed the connection
		}
		if _, err := conn.Write(answer); err != nil {
			return
		}
	}
}

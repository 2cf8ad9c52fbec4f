package auth

import (
	"context"
	"net"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// serveHealth serves grpc.health.v1 on l and has seen called with every call's
// context; it stops with the test.
func serveHealth(t *testing.T, l net.Listener, seen func(context.Context)) {
	t.Helper()
	server := grpc.NewServer(grpc.Creds(Credentials()), grpc.UnaryInterceptor(
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			seen(ctx)
			return next(ctx, req)
		}))
	healthpb.RegisterHealthServer(server, health.NewServer())
	served := make(chan error)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
}

func check(t *testing.T, path string) (*grpc.ClientConn, error) {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	return conn, err
}

func TestContextOfACallHasItsPeer(t *testing.T) {
	l, path := listen(t, UnixOptions{})
	seen := make(chan Conn, 1)
	serveHealth(t, l, func(ctx context.Context) {
		c, ok := FromContext(ctx)
		if !ok {
			t.Error("no peer in the context of a call")
		}
		p, _ := peer.FromContext(ctx)
		if err := credentials.CheckSecurityLevel(p.AuthInfo, credentials.PrivacyAndIntegrity); err != nil {
			t.Error(err)
		}
		seen <- c
	})
	conn, err := check(t, path)
	if err != nil {
		t.Fatal(err)
	}
	c := <-seen
	if diff := cmp.Diff(myself(t), c.Peer(), sortGroups); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	conn.Close()
	<-c.Done()
	if c.Died() {
		t.Error("Died is true after the client closed its connection")
	}
}

func TestContextWithoutConnectionHasNoPeer(t *testing.T) {
	for name, ctx := range map[string]context.Context{
		"no call":           t.Context(),
		"other credentials": peer.NewContext(t.Context(), &peer.Peer{}),
	} {
		if c, ok := FromContext(ctx); ok || c != nil {
			t.Errorf("%s: got %v, %v", name, c, ok)
		}
	}
}

func TestConnectionsOfOtherListenersAreNotServed(t *testing.T) {
	l, path := listen(t, UnixOptions{})
	serveHealth(t, l.UnixListener, func(context.Context) { t.Error("served") })
	if _, err := check(t, path); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want UNAVAILABLE", err)
	}
}

func TestCredentialsAreForServers(t *testing.T) {
	if _, _, err := Credentials().ClientHandshake(t.Context(), "", nil); err == nil {
		t.Error("a client's handshake succeeded")
	}
}

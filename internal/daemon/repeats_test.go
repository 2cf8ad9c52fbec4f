package daemon

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// The log has the first few refused connections, and when the daemon ends the last, with
// the number of those between. It has every state change and every call of an admin.
func TestDaemonHoldsBackLinesThatRepeatAndWritesTheLastAtItsEnd(t *testing.T) {
	const burst = 5
	core, logs := observer.New(zapcore.DebugLevel)
	opts := simulated(t, testutil.TempSocketDir(t))
	opts.Log = zap.New(core)
	write(t, opts.ConfigPath, noGroups)
	opts.Tune = func(c *config.Config) { c.Limits.Clients.ConnectionsTotal = 1 }
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ready, ended := notifySocket(t), make(chan error, 1)
	go func() { ended <- Run(ctx, opts) }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	admitted, err := grpc.NewClient("unix:"+opts.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = admitted.Close() }()
	if _, err := gpreemptv1.NewAdminServiceClient(admitted).GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{}); err != nil {
		t.Fatal(err)
	}
	var refused []*net.UnixConn
	for range burst + 4 {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: opts.Socket, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		refused = append(refused, conn)
	}
	for _, conn := range refused {
		if _, err := io.Copy(io.Discard, conn); err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		_ = conn.Close()
	}
	for n := range 8 { // each is logged
		if _, err := gpreemptv1.NewAdminServiceClient(admitted).SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{Drain: n%2 == 0}); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	for message, want := range map[string]int{"admin call": 8, "drain began": 4 + 1, "drain ended": 4} { // the shutdown drains, too
		if got := logs.FilterMessage(message).Len(); got != want {
			t.Errorf("%d lines %q, want %d", got, message, want)
		}
	}
	var repeated []any
	for _, e := range logs.FilterMessage("client connection refused").All() {
		repeated = append(repeated, e.ContextMap()["repeated"])
	}
	if all := logs.All(); all[len(all)-1].Message != "stopped, nothing is suspended" {
		t.Errorf("the last line is %q", all[len(all)-1].Message)
	}
	if diff := cmp.Diff(append(make([]any, burst), uint64(3)), repeated); diff != "" {
		t.Errorf("repeats (-want +got):\n%s", diff)
	}
}

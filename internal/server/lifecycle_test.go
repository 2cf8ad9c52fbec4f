package server

import (
	"context"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestHealthReportsSetServing(t *testing.T) {
	h := startHost(t)
	health := grpc_health_v1.NewHealthClient(h.dial(t))
	check := func(service string) grpc_health_v1.HealthCheckResponse_ServingStatus {
		t.Helper()
		r, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: service})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetStatus()
	}
	got := []grpc_health_v1.HealthCheckResponse_ServingStatus{check("")}
	h.server.SetServing(true)
	got = append(got, check(""), check("gpreempt.v1.OnlineService"), check("gpreempt.v1.AdminService"))
	h.server.SetServing(false)
	got = append(got, check(""))
	const down, up = grpc_health_v1.HealthCheckResponse_NOT_SERVING, grpc_health_v1.HealthCheckResponse_SERVING
	if diff := cmp.Diff([]grpc_health_v1.HealthCheckResponse_ServingStatus{down, up, up, up, down}, got); diff != "" {
		t.Errorf("health (-want +got):\n%s", diff)
	}
}

func TestNothingButTheServicesIsServed(t *testing.T) {
	want := []string{"gpreempt.v1.AdminService", "gpreempt.v1.OnlineService", "grpc.health.v1.Health"}
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(startHost(t).server.grpc.GetServiceInfo()))); diff != "" {
		t.Errorf("services (-want +got):\n%s", diff)
	}
}

// TestShutdownDoesNotWaitForIdleStreams opens a stream of each kind, and an
// announcement that waits: Shutdown ends each.
func TestShutdownDoesNotWaitForIdleStreams(t *testing.T) {
	h := startHost(t)
	conn := h.dial(t)
	admin, online := gpreemptv1.NewAdminServiceClient(conn), gpreemptv1.NewOnlineServiceClient(conn)
	session, err := online.Session(testutil.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	c := conversation{t, session}
	c.do(completeFrame(1, "x"))
	queues, err := admin.WatchQueues(testutil.Context(t), &gpreemptv1.WatchQueuesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := queues.Recv(); err != nil {
		t.Fatal(err)
	}
	log, err := admin.WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{FromStart: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := log.Recv(); err != nil {
		t.Fatal(err)
	}
	health, err := grpc_health_v1.NewHealthClient(conn).Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := health.Recv(); err != nil {
		t.Fatal(err)
	}
	h.machine.freeze()
	waited := make(chan error, 1)
	go func() {
		_, err := online.NotifyOnline(context.Background(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})
		waited <- err
	}()
	h.until(t, "the announcement", func() bool { return len(h.leases()) == 1 })

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	h.server.Shutdown(ctx)
	if ctx.Err() != nil {
		t.Fatal("Shutdown waited for a stream")
	}
	want(t, testutil.Receive(t, waited, "the answer"), gpreempt.CodeUnavailable, gpreempt.ReasonShuttingDown)
	if got := h.leases(); len(got) > 0 {
		t.Errorf("the waiting announcement left a lease: %v", got)
	}
	for { // changes that were sent before the end
		if _, err := queues.Recv(); err != nil {
			want(t, err, gpreempt.CodeUnavailable, gpreempt.ReasonShuttingDown)
			break
		}
	}
}

// A handler that hangs in the kernel ends with no context.
func TestShutdownDoesNotWaitForACallThatHangs(t *testing.T) {
	peer := identity(t)
	synctest.Test(t, func(t *testing.T) {
		hangs, release := make(chan struct{}), make(chan struct{})
		h := startInMemory(t, peer, func(cfg *Config, _ *scheduler.Limits) {
			cfg.Diagnose = func(context.Context) *gpreemptv1.DiagnoseResponse {
				close(hangs)
				<-release
				return &gpreemptv1.DiagnoseResponse{}
			}
		})
		admin := h.admin(t)
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			_, _ = admin.Diagnose(context.Background(), &gpreemptv1.DiagnoseRequest{}) // the shutdown ends it
		}()
		<-hangs
		const limit = 3 * time.Second
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			h.server.Shutdown(ctx)
		}()
		select {
		case <-ended:
		case <-time.After(limit + stopTime + time.Millisecond):
			t.Errorf("the shutdown has not ended %v after its context", stopTime)
		}
		close(release)
		<-ended
		<-answered
	})
}

func TestAnnouncementsAreRefusedWhileShuttingDown(t *testing.T) {
	h := startHost(t)
	h.server.close(errShuttingDown)
	before := h.events.Revision()
	_, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{})
	want(t, err, gpreempt.CodeUnavailable, gpreempt.ReasonShuttingDown)
	if got := h.events.Revision(); got != before {
		t.Errorf("the refused announcement left %d events, want none", got-before)
	}
	if _, err := h.admin(t).GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{}); err != nil {
		t.Errorf("GetStatus while shutting down: %v", err)
	}
}

func TestShutdownEndsTheWaitForADrain(t *testing.T) {
	peer := identity(t)
	synctest.Test(t, func(t *testing.T) {
		h := startInMemory(t, peer)
		admin := h.admin(t)
		if _, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)}); err != nil {
			t.Fatal(err)
		}
		h.machine.freeze()
		waited := make(chan error, 1)
		go func() {
			_, err := admin.SetDrain(context.Background(), &gpreemptv1.SetDrainRequest{Drain: true, Wait: true})
			waited <- err
		}()
		h.until(t, "the drain", func() bool { s, _ := h.server.targetState(offline); return s == scheduler.TargetResuming })
		ctx, cancel := context.WithTimeout(t.Context(), settleTime/2)
		defer cancel()
		h.server.Shutdown(ctx)
		if ctx.Err() != nil {
			t.Error("Shutdown waited for the drain")
		}
		want(t, testutil.Receive(t, waited, "the answer"), gpreempt.CodeUnavailable, gpreempt.ReasonShuttingDown)
	})
}

func TestResumeOfATargetSuspendedForALeaseReturnsAtOnce(t *testing.T) {
	peer := identity(t)
	synctest.Test(t, func(t *testing.T) {
		h := startInMemory(t, peer)
		if _, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), settleTime/2)
		defer cancel()
		r, err := h.admin(t).ResumeTarget(ctx, &gpreemptv1.ResumeTargetRequest{TargetId: offline.String()})
		if err != nil || r.GetState() != gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
			t.Errorf("resumed: %v, %v; want the state suspended", r, err)
		}
	})
}

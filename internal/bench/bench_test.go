// Package bench measures what the daemon adds to gRPC itself. Every figure is a
// ratio inside one run: the two sides take turns, so a noisy machine disturbs
// both alike.
package bench

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	simv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/sim/v1"
	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/daemon"
	"github.com/gpreempt/gpreempt/internal/gpusim"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

const configYAML = `
policy: {preset: strict, linger: none}
rules:
  - {name: training, match: {comm: train}, class: offline}
limits: {requests_per_second: 1000000, burst: 1000000}
discovery: {interval: 50ms}
log: {level: error}
`

// echo answers with messages of the same size as the daemon's and does nothing.
type echo struct {
	gpreemptv1.UnimplementedOnlineServiceServer
}

func (echo) NotifyOnline(context.Context, *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, error) {
	return &gpreemptv1.NotifyOnlineResponse{
		LeaseId: "0123456789abcdef-1", Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE, SuspendedTargets: 1,
		GpuIds: []uint32{63420}, Ttl: durationpb.New(time.Second),
		Timing: &gpreemptv1.Timing{Decide: durationpb.New(12345), Quiesce: durationpb.New(12345), Total: durationpb.New(12345)},
	}, nil
}

func listen(b *testing.B, path string) net.Listener {
	b.Helper()
	lis, err := net.Listen("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	return lis
}

func dial(b *testing.B, path string) *grpc.ClientConn {
	b.Helper()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close() })
	return conn
}

// serveEcho gives a client of a bare gRPC server on a unix socket.
func serveEcho(b *testing.B, dir string) gpreemptv1.OnlineServiceClient {
	b.Helper()
	path := filepath.Join(dir, "echo.sock")
	server := grpc.NewServer()
	gpreemptv1.RegisterOnlineServiceServer(server, echo{})
	lis := listen(b, path)
	go func() { _ = server.Serve(lis) }()
	b.Cleanup(server.Stop)
	return gpreemptv1.NewOnlineServiceClient(dial(b, path))
}

// serveDaemon gives a client of a whole daemon on simulated GPUs whose mechanism
// costs nothing, with the given number of offline targets spread over them.
func serveDaemon(b *testing.B, dir string, gpus, targets int) gpreemptv1.OnlineServiceClient {
	b.Helper()
	config := filepath.Join(dir, "gpreemptd.yaml")
	if err := os.WriteFile(config, []byte(configYAML), 0o600); err != nil {
		b.Fatal(err)
	}
	spec, err := gpusim.PresetByName("mi300x")
	if err != nil {
		b.Fatal(err)
	}
	spec = gpusim.ZeroCost(spec)
	socket := filepath.Join(dir, "gpreemptd.sock")
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- daemon.Run(ctx, daemon.Options{
			ConfigPath: config, ConfigGiven: true, Socket: socket, Sim: &spec, SimGPUs: gpus, SimSeed: 1,
			Log: zap.NewNop(), Ready: func() { close(ready) },
		})
	}()
	select {
	case <-ready:
	case err := <-ended:
		b.Fatal(err)
	}
	conn := dial(b, socket)
	b.Cleanup(func() {
		_ = conn.Close()
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	})
	admin := gpreemptv1.NewAdminServiceClient(conn)
	list, err := admin.ListGpus(b.Context(), &gpreemptv1.ListGpusRequest{})
	if err != nil {
		b.Fatal(err)
	}
	sim := simv1.NewSimServiceClient(conn)
	for i := range targets {
		if _, err := sim.StartJob(b.Context(), &simv1.StartJobRequest{
			Comm: "train", Queues: 1, GpuIds: []uint32{list.GetGpus()[i%gpus].GetGpuId()},
			Kernel: &simv1.Kernel{Duration: durationpb.New(30 * time.Second), Occupancy: 0.1},
		}); err != nil {
			b.Fatal(err)
		}
	}
	awaitTargets(b, admin, targets)
	return gpreemptv1.NewOnlineServiceClient(conn)
}

// awaitTargets waits until every target can be suspended. A mechanism that attaches
// is no event of its own, so that the list is asked until it has it.
func awaitTargets(b *testing.B, admin gpreemptv1.AdminServiceClient, want int) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), 20*time.Second)
	defer cancel()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		list, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Class: gpreemptv1.Class_CLASS_OFFLINE})
		if err != nil {
			b.Fatal(err)
		}
		ready := 0
		for _, t := range list.GetTargets() {
			if t.GetMechanism() != "" {
				ready++
			}
		}
		if ready == want {
			return
		}
		<-again.C
	}
}

func percentile(samples []time.Duration, p float64) float64 {
	slices.Sort(samples)
	return float64(samples[int(p*float64(len(samples)-1))])
}

// BenchmarkNotifyOnline reports how much longer an announcement takes than a bare
// echo of the same messages, while one offline target is suspended for it each
// time by a mechanism that costs nothing.
func BenchmarkNotifyOnline(b *testing.B) {
	for _, tc := range []struct {
		name          string
		gpus, targets int
	}{{"1target", 1, 1}, {"8targets8gpus", 8, 8}, {"64targets8gpus", 8, 64}} {
		b.Run(tc.name, func(b *testing.B) {
			dir := testutil.TempSocketDir(b)
			bare, online := serveEcho(b, dir), serveDaemon(b, dir, tc.gpus, tc.targets)
			request := &gpreemptv1.NotifyOnlineRequest{Label: "bench"}
			var echoes, announces, completes []time.Duration
			timed := func(call func()) time.Duration {
				begin := time.Now()
				call()
				return time.Since(begin)
			}
			for b.Loop() {
				echoes = append(echoes, timed(func() {
					if _, err := bare.NotifyOnline(b.Context(), request); err != nil {
						b.Fatal(err)
					}
				}))
				var answer *gpreemptv1.NotifyOnlineResponse
				announces = append(announces, timed(func() {
					var err error
					if answer, err = online.NotifyOnline(b.Context(), request); err != nil {
						b.Fatal(err)
					}
				}))
				if !answer.GetQuiesced() || int(answer.GetSuspendedTargets()) != tc.targets {
					b.Fatalf("not quiet: %v", answer)
				}
				completes = append(completes, timed(func() {
					if _, err := online.Complete(b.Context(), &gpreemptv1.CompleteRequest{LeaseId: answer.GetLeaseId()}); err != nil {
						b.Fatal(err)
					}
				}))
			}
			b.ReportMetric(percentile(echoes, 0.5)/1e3, "echo-p50-µs")
			b.ReportMetric(percentile(announces, 0.5)/1e3, "notify-p50-µs")
			b.ReportMetric(percentile(announces, 0.5)/percentile(echoes, 0.5), "notify/echo-p50")
			b.ReportMetric(percentile(announces, 0.99)/percentile(echoes, 0.99), "notify/echo-p99")
			b.ReportMetric(percentile(completes, 0.5)/percentile(echoes, 0.5), "complete/echo-p50")
		})
	}
}

// gpreempt-llmd is a snapshot agent for llm-d's time slicing of reinforcement learning
// (llm-d-incubation/llm-d-rl-time-slicing) on nodes with AMD GPUs. llm-d's orchestrator asks it
// to take a job off the GPUs and to put it on again; it has gpreempt's daemon suspend and
// resume the processes of the job's pods.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/deploy/kubernetes/llmd/gen/snapshotpb"
	"github.com/gpreempt/gpreempt/pkg/client"
)

func main() {
	var l listening
	flag.StringVar(&l.address, "listen", "unix:///run/gpreempt/llmd.sock", "address of the agent: a unix socket for its user alone, or HOST:PORT, where clients need a certificate")
	flag.StringVar(&l.certificate, "certificate", "", "file with the certificate of the agent, for HOST:PORT")
	flag.StringVar(&l.key, "key", "", "file with its private key")
	flag.StringVar(&l.clientCA, "client-ca", "", "file with the authority that issues certificates to clients of the agent, and to nobody else")
	flag.BoolVar(&l.insecure, "insecure", false, "serve HOST:PORT without certificates: every program that reaches it can suspend the jobs")
	namespace := flag.String("namespace", "", "namespace of the jobs: pods of others are in none of them")
	socket := flag.String("socket", "unix:///run/gpreempt/gpreemptd.sock", "address of gpreemptd, of which this program must be an admin")
	renew := flag.Duration("renew", time.Second, "how often a saved job is suspended again; less than max_suspend")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, l, *socket, *namespace, *renew)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpreempt-llmd:", err)
		os.Exit(1)
	}
}

// run serves until ctx ends. What is suspended then runs again when its time has passed.
func run(ctx context.Context, l listening, socket, namespace string, renew time.Duration) error {
	if renew <= 0 {
		return errors.New("--renew must be more than 0")
	}
	if namespace == "" {
		return errors.New("--namespace is missing: every user of the cluster can label a pod with any job, so name the namespace of the jobs")
	}
	c, err := client.Dial(socket)
	if err != nil {
		return err
	}
	defer c.Close()
	listener, secure, err := l.listen(ctx)
	if err != nil {
		return err
	}
	a := newAgent(c.Admin(), namespace)
	ticker := time.NewTicker(renew)
	defer ticker.Stop()
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		a.keep(ctx, ticker.C, func(job string, err error) { slog.Error("a saved job may run", "job", job, "err", err) })
	}()
	server := newServer(a, secure)
	stopped := context.AfterFunc(ctx, server.Stop)
	defer stopped()
	slog.Info("serving", "address", listener.Addr().String())
	err = server.Serve(listener)
	<-kept
	a.background.Wait()
	return err
}

// newServer returns a gRPC server of an agent, with the health service that llm-d's agent has.
func newServer(a *agent, secure credentials.TransportCredentials) *grpc.Server {
	server := grpc.NewServer(grpc.Creds(secure))
	snapshotpb.RegisterSnapshotAgentServiceServer(server, a)
	grpc_health_v1.RegisterHealthServer(server, health{admin: a.admin})
	return server
}

// health reports whether the daemon answers.
type health struct {
	grpc_health_v1.UnimplementedHealthServer
	admin gpreemptv1.AdminServiceClient
}

// Check implements grpc_health_v1.HealthServer. llm-d's names of services are those of
// its ways to take a job off, of which this agent has none.
func (h health) Check(ctx context.Context, r *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	if r.GetService() != "" {
		return nil, status.Errorf(codes.NotFound, "service %q is not known", r.GetService())
	}
	answer := &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}
	if _, err := h.admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{}); err != nil {
		answer.Status = grpc_health_v1.HealthCheckResponse_NOT_SERVING
	}
	return answer, nil
}

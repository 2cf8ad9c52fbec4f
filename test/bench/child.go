package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	simv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/sim/v1"
	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/daemon"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// config is the default one but for who is offline, for a policy in which nothing but
// leases decides, and for limits that none of this reaches.
const config = `
policy: {preset: strict, linger: none}
rules:
  - {name: training, match: {comm: train}, class: offline}
limits:
  leases_per_client: 10000
  leases_per_user: 10000
  leases_total: 10000
  requests_per_second: 1000000
  burst: 1000000
  requests_per_user: 1000000
  connections_per_user: 10000
  connections_total: 10000
`

// child is a program that runs until its standard input ends or, if it does not read
// that, until it is told to.
type child struct {
	cmd   *exec.Cmd
	in    io.Closer
	out   *bufio.Reader
	log   string
	ended bool
}

// launch runs a program with its standard error in a file of dir.
func launch(ctx context.Context, dir, name string, env []string, program string, args ...string) (*child, error) {
	c := &child{cmd: exec.CommandContext(ctx, program, args...), log: filepath.Join(dir, name+".log")}
	c.cmd.Env = append(os.Environ(), env...)
	log, err := os.Create(c.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	c.cmd.Stderr = log
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(out)
	return c, c.cmd.Start()
}

// hear returns the next line it says.
func (c *child) hear() (string, error) {
	says, err := c.out.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("%v said nothing: %w", c.cmd.Args, errors.Join(err, c.stop()))
	}
	return says, nil
}

// start runs this program as a server, and waits until it serves.
func (b *bench) start(ctx context.Context, name string, args ...string) (*child, error) {
	c, err := launch(ctx, b.dir, name, nil, b.self, args...)
	if err == nil {
		_, err = c.hear()
	}
	return c, err
}

// stop ends it, and reports what it logged if that went wrong. Once is enough.
func (c *child) stop() error {
	if c.ended {
		return nil
	}
	_, _ = c.in.Close(), c.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	err := c.cmd.Wait()
	if err != nil {
		log, _ := os.ReadFile(c.log)
		err = fmt.Errorf("%v: %w; its log:\n%s", c.cmd.Args, err, log)
	}
	c.ended = true
	return err
}

// serveDaemon is a whole daemon on simulated GPUs whose scheduling firmware takes cost
// for each suspend and each resume.
func serveDaemon(ctx context.Context, socket, config, gpus, cost string, ready func()) error {
	n, err := strconv.Atoi(gpus)
	if err != nil {
		return err
	}
	each, err := time.ParseDuration(cost)
	if err != nil {
		return err
	}
	spec, err := gpumodel.PresetByName("mi300x")
	if err != nil {
		return err
	}
	spec = gpumodel.ZeroCost(spec)
	spec.Costs.Unmap = each // by one timer, whose lateness is part of what is measured
	var free mechanism.Mechanism
	if each == 0 {
		free = effortless{}
	}
	return daemon.Run(ctx, daemon.Options{
		SimMechanism: free,
		ConfigPath:   config, ConfigGiven: true, Socket: socket, Sim: &spec, SimGPUs: n, SimSeed: 1, Ready: ready,
	})
}

// effortless is a mechanism that takes no time. The simulated one takes some microseconds
// for each target, since it simulates what becomes of the other queues of its GPU.
type effortless struct{}

func (effortless) Name() string { return "effortless" }
func (effortless) Probe(context.Context, gpreempt.ProcessKey) mechanism.Capability {
	return mechanism.Capability{Evidence: []mechanism.Evidence{{Check: "benchmark", Found: "nothing to do", OK: true}}}
}

func (effortless) Attach(context.Context, gpreempt.ProcessKey) (mechanism.Session, error) {
	return effortless{}, nil
}
func (effortless) Suspend(context.Context) error { return nil }
func (effortless) Resume(context.Context) error  { return nil }
func (effortless) Close() error                  { return nil }

// host is a daemon with the jobs it can suspend.
type host struct {
	*child
	socket  string
	conn    *grpc.ClientConn
	targets int
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// startHost starts a daemon on so many GPUs, with jobs of one queue spread over them.
func (b *bench) startHost(ctx context.Context, targets, gpus int, cost time.Duration) (*host, error) {
	name := fmt.Sprintf("%d-%d-%v", targets, gpus, cost)
	h := &host{socket: filepath.Join(b.dir, name+".sock"), targets: targets}
	config, err := b.writeConfig(config)
	if err != nil {
		return nil, err
	}
	if h.child, err = b.start(ctx, name, serveDaemonCommand, h.socket, config, strconv.Itoa(gpus), cost.String()); err != nil {
		return nil, err
	}
	if h.conn, err = dial(h.socket); err != nil {
		return nil, errors.Join(err, h.stop())
	}
	if err := startJobs(ctx, h.conn, targets, 1); err != nil {
		return nil, errors.Join(err, h.close())
	}
	return h, nil
}

func (h *host) close() error { return errors.Join(h.conn.Close(), h.stop()) }

// startJobs starts simulated jobs of so many queues each, spread over the GPUs, and
// waits until each can be suspended.
func startJobs(ctx context.Context, conn *grpc.ClientConn, jobs, queues int) error {
	admin, sim := gpreemptv1.NewAdminServiceClient(conn), simv1.NewSimServiceClient(conn)
	list, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	for i := range jobs {
		if _, err := sim.StartJob(ctx, &simv1.StartJobRequest{
			Comm: "train", Queues: uint32(queues), GpuIds: []uint32{list.GetGpus()[i%len(list.GetGpus())].GetGpuId()},
			Kernel: &simv1.Kernel{Duration: durationpb.New(30 * time.Second), Occupancy: 0.01},
		}); err != nil {
			return err
		}
	}
	return awaitTargets(ctx, admin, jobs)
}

// awaitTargets waits until every target can be suspended. A mechanism that attaches
// is no event of its own, so that the list is asked until it has it.
func awaitTargets(ctx context.Context, admin gpreemptv1.AdminServiceClient, want int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, fmt.Errorf("the daemon did not attach to %d jobs within 30 s", want))
	defer cancel()
	for {
		list, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Class: gpreemptv1.Class_CLASS_OFFLINE}, grpc.WaitForReady(true))
		if err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		ready := 0
		for _, t := range list.GetTargets() {
			if t.GetMechanism() != "" {
				ready++
			}
		}
		if ready == want {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
}

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/daemon"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// configText is the default config except for a rule that makes the jobs offline, a policy in
// which only leases decide.
const configText = `
policy: {preset: strict, linger: 0s, attach_after: 0s}
limits: {leases_per_user: 10000, requests_per_user: 1000000}
rules:
  - {name: training, match: {comm: train}, class: offline}
`

// child is a program that runs until its standard input ends or, if it does not read it,
// until SIGTERM.
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

// hostSpec describes a daemon on modelled GPUs, with jobs of one queue spread over them,
// whose mechanism takes Cost for each suspend and each resume.
type hostSpec struct {
	Socket, Config string
	Targets, GPUs  int
	Cost           time.Duration
}

func serveDaemon(ctx context.Context, s hostSpec) error {
	spec, err := gpumodel.PresetByName("mi300x")
	if err != nil {
		return err
	}
	m := gpumodel.New(spec, s.GPUs, 0) // its time stands still
	mech := &modelledMechanism{cost: s.Cost, gpus: map[gpreempt.ProcessKey]*sync.Mutex{}}
	locks := make([]sync.Mutex, s.GPUs)
	for i := range s.Targets {
		key, err := m.StartProcess(gpumodel.ProcSpec{Comm: "train"})
		queue := gpumodel.QueueSpec{GPU: m.GPUs()[i%s.GPUs].ID, Type: gpreempt.QueueCompute, RingBytes: 4096, Ring: 0x10000}
		if err = errors.Join(err, m.AttachQueue(key, queue)); err != nil {
			return err
		}
		mech.gpus[key] = &locks[i%s.GPUs]
	}
	return daemon.Run(ctx, daemon.Options{
		ConfigPath: s.Config, ConfigGiven: true, Socket: s.Socket,
		Host: daemon.Host{Simulated: spec.Name, Dir: "/", Files: m.FS(), Mechanisms: []mechanism.Mechanism{mech}},
		Tune: noLimits,
	})
}

// noLimits sets limits that no section reaches.
func noLimits(c *config.Config) {
	l := &c.Limits
	l.Leases = scheduler.Limits{LeasesPerClient: 10_000, LeasesPerUser: 10_000, LeasesTotal: 10_000}
	l.Clients.RequestsPerSecond, l.Clients.Burst, l.Clients.RequestsPerUser = 1_000_000, 1_000_000, 1_000_000
	l.Clients.ConnectionsPerUser, l.Clients.ConnectionsTotal = 10_000, 10_000
}

// modelledMechanism is a mechanism that does nothing but take cost, for one target of a
// GPU after the other: the driver changes the runlist of a GPU one change at a time.
type modelledMechanism struct {
	cost time.Duration
	gpus map[gpreempt.ProcessKey]*sync.Mutex
}

func (*modelledMechanism) Name() string { return "modelled" }

func (*modelledMechanism) Probe(context.Context, gpreempt.ProcessKey) mechanism.Capability {
	return mechanism.Capability{Evidence: []mechanism.Evidence{{Check: "benchmark", Found: "nothing to do", OK: true}}}
}

func (m *modelledMechanism) Attach(_ context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	s := &modelledSession{cost: m.cost, gpu: m.gpus[target]}
	if m.cost == 0 {
		return s, nil
	}
	var err error
	s.timer, err = hrtimer.New()
	return s, err
}

type modelledSession struct {
	mechanism.Notifier // nil: it has no events
	cost               time.Duration
	gpu                *sync.Mutex
	timer              *hrtimer.Timer // nil without cost
}

// take takes the cost, by a timer whose lateness is part of what is measured.
func (s *modelledSession) take() error {
	if s.timer == nil {
		return nil
	}
	s.gpu.Lock()
	defer s.gpu.Unlock()
	if err := s.timer.Set(s.cost); err != nil {
		return err
	}
	return s.timer.Wait()
}

func (s *modelledSession) Suspend(_ context.Context, done func()) error {
	err := s.take()
	if err == nil {
		done()
	}
	return err
}

func (s *modelledSession) Resume(context.Context) error { return s.take() }

func (*modelledSession) Handle(context.Context) (r mechanism.Report, err error) { return r, nil }

func (s *modelledSession) Close() error {
	if s.timer == nil {
		return nil
	}
	return s.timer.Close()
}

// host is a daemon with the jobs it can suspend.
type host struct {
	*child
	socket  string
	conn    *grpc.ClientConn
	targets int
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{ // the server starts at the same time
			Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond},
			MinConnectTimeout: 20 * time.Second,
		}))
}

// startHost starts a daemon on so many GPUs, with jobs of one queue spread over them.
func (b *bench) startHost(ctx context.Context, targets, gpus int, cost time.Duration) (*host, error) {
	b.hosts++
	name := fmt.Sprintf("%d-%d-%v-%d", targets, gpus, cost, b.hosts)
	h := &host{socket: filepath.Join(b.dir, name+".sock"), targets: targets}
	config, err := b.writeConfig(configText)
	if err != nil {
		return nil, err
	}
	spec, err := json.Marshal(hostSpec{h.socket, config, targets, gpus, cost})
	if err != nil {
		return nil, err
	}
	if h.child, err = launch(ctx, b.dir, name, nil, b.self, serveDaemonCommand, string(spec)); err != nil {
		return nil, err
	}
	if h.conn, err = dial(h.socket); err != nil {
		return nil, errors.Join(err, h.stop())
	}
	if err := awaitTargets(ctx, gpreemptv1.NewAdminServiceClient(h.conn), targets); err != nil {
		return nil, errors.Join(err, h.close())
	}
	return h, nil
}

func (h *host) close() error { return errors.Join(h.conn.Close(), h.stop()) }

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

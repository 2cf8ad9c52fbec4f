package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/daemon"
)

// simulated is a machine in this process. The job is a process of it, and the inference
// server is this one.
type simulated struct {
	*Machine
	server *Process
	queue  uint32
	job    *Process
}

func simulate(o demoOptions) (m *simulated, err error) {
	m = &simulated{}
	if m.Machine, err = New(Config{Spec: o.Spec, Seed: o.Seed}); err != nil {
		return nil, err
	}
	if m.server, err = m.Join("server"); err == nil {
		m.queue, err = m.server.CreateQueue(m.GPUs()[0].ID)
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

func (m *simulated) startJob(context.Context) (int32, error) {
	job, err := m.StartJob(Job{
		Comm: jobComm, Queues: jobQueues, Kernel: gpumodel.Packet{Duration: jobKernel, Occupancy: trainOccupancy, Jitter: jobJitter},
	})
	if err != nil {
		return 0, err
	}
	m.job = job
	return job.Key().PID, nil
}

// jobJitter spreads the durations of the job's kernels.
const jobJitter = 0.05

func (m *simulated) stopJob(context.Context) (packets, error) {
	c, err := m.job.End()
	return packets{executed: c.Executed, lost: c.Lost, repeated: c.Repeated}, err
}

func (m *simulated) work(context.Context) ([]progress, error) {
	now, processes, _ := m.Counters()
	for _, p := range processes {
		if p.Process == m.job.Key() {
			return []progress{{at: now, work: p.Work}}, nil
		}
	}
	return nil, fmt.Errorf("the simulated machine has no process %v any more", m.job.Key())
}

func (m *simulated) now() (time.Duration, error) {
	now, _, _ := m.Counters()
	return now, nil
}

func (m *simulated) request(ctx context.Context) error {
	kernels := make([]gpumodel.Packet, requestKernels)
	for i := range kernels {
		kernels[i] = gpumodel.Packet{Duration: kernelTime, Occupancy: onlineOccupancy}
	}
	return m.server.Run(ctx, m.queue, kernels...)
}

func (m *simulated) close() error { return m.Close() }

// localDaemon is a daemon in this process.
type localDaemon struct {
	stop  context.CancelFunc
	ended chan struct{}
	err   error // how it ended
}

// startLocalDaemon runs the daemon on a simulated machine.
func startLocalDaemon(o demoOptions, host daemon.Host, dir, socket string) (*localDaemon, error) {
	config := filepath.Join(dir, configFile)
	if err := os.WriteFile(config, []byte(configYAML), 0o600); err != nil {
		return nil, err
	}
	log := zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(o.Progress), zapcore.WarnLevel))
	ctx, stop := context.WithCancel(context.Background())
	d := &localDaemon{stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(d.ended)
		d.err = daemon.Run(ctx, daemon.Options{ConfigPath: config, ConfigGiven: true, Socket: socket, Host: host, Log: log})
	}()
	return d, nil
}

func (d *localDaemon) hasEnded() bool {
	select {
	case <-d.ended:
		return true
	default:
		return false
	}
}

func (d *localDaemon) interrupt() error {
	d.stop()
	select {
	case <-d.ended:
		return d.err
	case <-time.After(maxWait):
		return fmt.Errorf("the daemon did not stop within %v", maxWait)
	}
}

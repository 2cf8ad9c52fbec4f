package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/emu/workload"
)

// emulated is the emulated machine that this process runs on. The job and the inference
// server are programs that call its driver.
type emulated struct {
	log io.Writer
	// train is the program with the name of a job.
	train string
	// clock is opened when it is first needed: a live demo has no use for it.
	clock  clock
	job    *process
	server *process
	// asking serializes the requests: the server answers them in turn.
	asking sync.Mutex
}

// clock is the clock of the GPU: a workload.Clock.
type clock interface {
	Now() (time.Duration, error)
	Close() error
}

func emulate(ctx context.Context, emulator, dir string, log io.Writer) (*emulated, error) {
	m := &emulated{log: log, train: filepath.Join(dir, jobComm)}
	if err := os.Symlink(emulator, m.train); err != nil {
		return nil, err
	}
	var err error
	m.server, err = startSample(ctx, log, detached(emulator, "answer"))
	if err != nil {
		return nil, err
	}
	return m, nil
}

// kernel returns the flags for one.
func kernel(takes time.Duration, occupancy float64) []string {
	return []string{"--duration", fmt.Sprint(takes.Microseconds()), "--occupancy", fmt.Sprint(int(occupancy * 1e6))}
}

func (m *emulated) startJob(ctx context.Context) (int32, error) {
	job, err := startSample(ctx, m.log, detached(m.train, "work", "--train", "--steps=false"))
	if err != nil {
		return 0, err
	}
	m.job = job
	return int32(job.pid()), nil
}

// stopJob has the job run its queues empty, and prove what each queue did.
func (m *emulated) stopJob(ctx context.Context) (packets, error) {
	job := m.job
	done, err := job.ask(ctx, "stop", "done")
	if done.Tally == nil {
		return packets{}, fmt.Errorf("the job does not end, so a packet may be lost: %w", err)
	}
	<-job.ended
	m.job = nil
	p := packets{executed: done.Count, lost: done.Packets - min(done.Packets, done.Count+done.Abandoned), repeated: done.Count - min(done.Count, done.Packets)}
	if p.lost == 0 && p.repeated == 0 && (err != nil || !done.OK || job.err != nil) {
		return p, fmt.Errorf("the job cannot prove that each packet ran once and in order: %w", errors.Join(err, job.err))
	}
	return p, nil
}

// work waits for the next kernel of each queue to end: only kernels that have ended can be
// counted, so each queue is read when one ends.
func (m *emulated) work(ctx context.Context) ([]progress, error) {
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	parts, before := make([]progress, jobQueues), make([]uint64, jobQueues)
	for look, waiting := 0, jobQueues; ; look++ {
		report, err := m.job.ask(ctx, "report", "report")
		if err == nil && len(report.Queues) != jobQueues {
			err = fmt.Errorf("the job has %d queues, and was started with %d", len(report.Queues), jobQueues)
		}
		if err != nil {
			return nil, err
		}
		now, err := m.now()
		if err != nil {
			return nil, err
		}
		for i, q := range report.Queues {
			if parts[i].at == 0 && look > 0 && q.Count != before[i] {
				parts[i] = progress{at: now, work: time.Duration(q.Count) * jobWork}
				waiting--
			}
			before[i] = q.Count
		}
		if waiting == 0 {
			return parts, nil
		}
		if err := sleep(ctx, time.Millisecond); err != nil {
			return nil, fmt.Errorf("%d of %d queues of the job do nothing: %w", waiting, jobQueues, err)
		}
	}
}

func (m *emulated) now() (time.Duration, error) {
	if m.clock == nil {
		clock, err := workload.OpenClock(workload.Kernel())
		if err != nil {
			return 0, err
		}
		m.clock = clock
	}
	return m.clock.Now()
}

func (m *emulated) request(ctx context.Context) error {
	m.asking.Lock()
	defer m.asking.Unlock()
	_, err := m.server.ask(ctx, "", "answer")
	return err
}

// close kills the job, and has the server prove what it did.
func (m *emulated) close() error {
	var errs []error
	if m.job != nil {
		errs = append(errs, m.job.kill())
	}
	if m.clock != nil {
		errs = append(errs, m.clock.Close())
	}
	return errors.Join(append(errs, m.server.finish())...)
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// demoOptions says what the demo does.
type demoOptions struct {
	// Emulator is the path of the kfdemu binary, and Daemon that of gpreemptd, when this
	// process runs on an emulated machine, with one GPU; "" simulates one in this process.
	Emulator, Daemon string
	// Machine is the kind of GPU, and Backend the name that the daemon reports:
	// "emulated" or "simulated" with the machine.
	Machine string
	Backend string
	Seed    uint64
	// Repeats is how often each arm runs, and Duration how long each time.
	Repeats  int
	Duration time.Duration
	// Progress gets a line for each step, and warnings of the daemon.
	Progress io.Writer
	// Spec is the model of Machine.
	Spec gpumodel.Spec
}

// The workload. The job alone keeps the GPU full; sharing it, a request takes
// about as much longer as two processes did on a real GPU (docs/lab/simulator.md).
const (
	requestsPerSecond = 20
	requestKernels    = 30
	kernelTime        = 200 * time.Microsecond
	onlineOccupancy   = 0.9
	jobQueues         = 10
	jobKernel         = 25 * time.Millisecond
	trainOccupancy    = 0.3
	jobWork           = time.Duration(trainOccupancy * float64(jobKernel)) // GPU time of a kernel
	jobDepth          = 2
	jobComm           = "train"
	demoLabel         = "demo"
	warmUp            = 300 * time.Millisecond
	lateAfter         = requestKernels * kernelTime / 2 // a request that begins so late says more about the host
)

const configYAML = `access: {online_groups: [], admin_groups: []} # root and the user of the demo have all rights
rules:
  - name: training
    match: {comm: ` + jobComm + `}
    class: offline
    priority: 0
policy: {attach_after: 0s} # the job has just started
log: {level: warn}
`

// configFile is the daemon's config file in the directory of the demo.
const configFile = "gpreemptd.yaml"

// emulatedYAML is added on an emulated machine: no hardware can hang there.
const emulatedYAML = `safety:
  hazards:
    - {id: emulated, gfx: ["gfx*"], action: allow, why: It is emulated.}
`

// machine is what the demo runs on. One goroutine calls it, except for request, and now after
// its first call.
type machine interface {
	// startJob starts the training job and returns its pid; stopJob ends it and reports what
	// became of its packets.
	startJob(ctx context.Context) (pid int32, err error)
	stopJob(ctx context.Context) (packets, error)
	// work returns how much work each part of the job has done by now.
	work(ctx context.Context) ([]progress, error)
	// now is the time of the GPU.
	now() (time.Duration, error)
	// request has the inference server execute one request, and waits for it.
	request(ctx context.Context) error
	close() error
}

// packets counts the packets of a job by their result.
type packets struct{ executed, lost, repeated uint64 }

// progress is the GPU time of work done by a time of the machine's clock.
type progress struct{ at, work time.Duration }

// rate returns the GPU time of work done in a second, between two readings of all parts of
// a job.
func rate(begin, end []progress) (sum float64) {
	for i := range begin {
		sum += (end[i].work - begin[i].work).Seconds() / (end[i].at - begin[i].at).Seconds()
	}
	return sum
}

// playDemo measures all arms. It touches nothing but temporary directories of its own.
func playDemo(ctx context.Context, o demoOptions) (result *Result, err error) {
	// An announcement waits as long as the API permits: one that is not answered then is an error
	// on any machine.
	s, err := open(ctx, o, client.Request{GPUs: client.AllGPUs(), Label: demoLabel, MaxWait: 10 * time.Second}, client.FailClosed())
	if err != nil {
		return nil, err
	}
	defer func() { err = andThen(err, s.close()) }()

	result = &Result{
		Simulated: o.Emulator == "", Emulated: o.Emulator != "", Backend: o.Backend, Machine: o.Machine, Version: api.VersionString(), Seed: o.Seed,
		RequestsPerSecond: requestsPerSecond, RequestMS: milliseconds(requestKernels * kernelTime), OfflineQueues: jobQueues,
		OfflineKernelMS: milliseconds(jobKernel), ModelledSuspendMS: milliseconds(o.Spec.SuspendTime(1, jobQueues, 1)),
	}
	arms := []Arm{OfflineAlone, OnlineAlone, Shared, Protected}
	for repeat := range o.Repeats {
		for i, arm := range arms {
			fmt.Fprintf(o.Progress, "%s run %2d of %d: %s\n", result.kind(), repeat*len(arms)+i+1, o.Repeats*len(arms), arm)
			run, err := s.play(ctx, arm, o.Duration)
			if err != nil {
				return nil, fmt.Errorf("demo: %s: %w", arm, err)
			}
			run.Repeat = repeat + 1
			result.Runs = append(result.Runs, *run)
		}
	}
	if err := s.finish(ctx, result); err != nil {
		return nil, err
	}
	result.summarize()
	return result, nil
}

// open starts a daemon in a directory of its own and the machine it serves, and connects
// to it. unavailable says what the requests do without the daemon.
func open(ctx context.Context, o demoOptions, announcement client.Request, unavailable client.Option) (s *stage, err error) {
	dir, err := os.MkdirTemp("", "gpreempt-demo-")
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	s = &stage{socket: filepath.Join(dir, "gpreemptd.sock"), announcement: announcement}
	s.undo = append(s.undo, func() error { return os.RemoveAll(dir) })
	defer func() {
		if err != nil {
			err = andThen(fmt.Errorf("demo: %w", err), s.close())
			s = nil
		}
	}()
	var daemon program
	if o.Emulator == "" {
		simulated, err := simulate(o)
		if err != nil {
			return s, err
		}
		s.machine = simulated
		s.undo = append(s.undo, simulated.close)
		if daemon, err = startLocalDaemon(o, simulated.Host(), dir, s.socket); err != nil {
			return s, err
		}
	} else if daemon, err = startDaemon(o.Daemon, configYAML, dir, s.socket, o.Progress); err != nil {
		return s, err
	}
	s.daemon = daemon
	s.undo = append(s.undo, daemon.interrupt)
	if s.client, err = client.Dial("unix://"+s.socket, unavailable); err != nil {
		return s, err
	}
	s.undo = append(s.undo, s.client.Close)
	if err := s.awaitDaemon(ctx, daemon, o.Backend); err != nil {
		return s, err
	}
	if o.Emulator != "" {
		if s.machine, err = emulate(ctx, o.Emulator, dir, o.Progress); err != nil {
			return s, err
		}
		s.undo = append(s.undo, s.machine.close)
	}
	return s, nil
}

// program is a running daemon.
type program interface {
	hasEnded() bool
	// interrupt ends it in order, and returns how it ended.
	interrupt() error
}

// startDaemon runs gpreemptd, the binary daemon, on the emulated machine, with files in dir.
func startDaemon(daemon, yaml, dir, socket string, log io.Writer) (*process, error) {
	config := filepath.Join(dir, configFile)
	if err := os.WriteFile(config, []byte(yaml+emulatedYAML), 0o600); err != nil {
		return nil, err
	}
	cmd := detached(daemon, "serve", "--config", config, "--socket", socket)
	cmd.Env = append(os.Environ(), "RUNTIME_DIRECTORY="+dir) // it must not use the host's journal
	return startProcess(log, cmd)
}

// stage is the daemon, the machine it serves and the connection to it.
type stage struct {
	machine machine
	socket  string
	client  *client.Client
	// announcement is that of each request.
	announcement client.Request
	daemon       program
	pid          int32 // of the last job
	// learned is what the daemon learned of the last protected job.
	learnedSuspend, learnedResume time.Duration
	// undo ends the parts, in reverse order.
	undo []func() error
}

// awaitDaemon returns when the daemon serves the right machine: figures that are called
// emulated or simulated must not be those of hardware. Without a name of the machine any will do.
func (s *stage) awaitDaemon(ctx context.Context, daemon program, backend string) error {
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	for {
		status, err := s.client.Admin().GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
		switch {
		case err == nil && backend != "" && status.GetBackend() != backend:
			return fmt.Errorf("the daemon serves %q and not %q", status.GetBackend(), backend)
		case err == nil:
			return nil
		case daemon.hasEnded():
			return errors.New("the daemon ended at once")
		}
		if sleep(ctx, 20*time.Millisecond) != nil {
			return fmt.Errorf("the daemon did not come up: %w", err)
		}
	}
}

// andThen returns an error and the one after it, in a line.
func andThen(err, later error) error {
	if err == nil || later == nil {
		return errors.Join(err, later)
	}
	return fmt.Errorf("%w; and then: %w", err, later)
}

func (s *stage) close() error {
	var errs []error
	for _, undo := range slices.Backward(s.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// play runs one arm once.
func (s *stage) play(ctx context.Context, arm Arm, duration time.Duration) (*Run, error) {
	run := &Run{Arm: arm}
	var begin []progress
	var err error
	if arm != OnlineAlone {
		if err := s.startJob(ctx, arm); err != nil {
			return nil, err
		}
		if begin, err = s.machine.work(ctx); err != nil {
			return nil, err
		}
	}
	started := time.Now()
	onGPU, err := s.machine.now()
	if err != nil {
		return nil, err
	}
	if arm == OfflineAlone {
		err = sleep(ctx, duration/2)
	} else {
		err = s.serve(ctx, run, arm == Protected, duration)
	}
	run.Seconds = time.Since(started).Seconds()
	if end, clockErr := s.machine.now(); clockErr == nil {
		run.Serving /= (end - onGPU).Seconds()
	} else {
		err = errors.Join(err, clockErr)
	}
	if err != nil || arm == OnlineAlone {
		return run, err
	}
	end, err := s.machine.work(ctx)
	if err != nil {
		return nil, err
	}
	run.OfflineWork = rate(begin, end)
	if arm == Protected {
		if err := s.awaitTarget(ctx); err != nil { // the last resume counts, too
			return nil, err
		}
		if err := s.noteLearned(ctx); err != nil {
			return nil, err
		}
	}
	done, err := s.machine.stopJob(ctx)
	if err != nil {
		return nil, err
	}
	run.Executed, run.Lost, run.Repeated = done.executed, done.lost, done.repeated
	return run, nil
}

// startJob starts the training job and, for the protected arm, waits until the
// daemon has found it and may suspend it.
func (s *stage) startJob(ctx context.Context, arm Arm) (err error) {
	if s.pid, err = s.machine.startJob(ctx); err != nil {
		return err
	}
	if arm == Protected {
		if err := s.awaitTarget(ctx); err != nil {
			return err
		}
	}
	return sleep(ctx, warmUp)
}

// awaitTarget returns when the daemon lists the job as a target that runs and that it can
// suspend.
func (s *stage) awaitTarget(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	why := "the daemon did not find the job"
	for {
		list, err := s.client.Admin().ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Class: gpreemptv1.Class_CLASS_OFFLINE})
		if err != nil {
			return err
		}
		for _, target := range list.GetTargets() {
			switch {
			case target.GetPid() != s.pid:
			case target.GetMechanism() != "" && target.GetQueueCount() == jobQueues && target.GetState() == gpreemptv1.TargetState_TARGET_STATE_RUNNING:
				return nil
			default:
				why = fmt.Sprintf("the daemon cannot suspend the job with its %d queues: %s %s", target.GetQueueCount(), target.GetMechanismWhy(), target.GetAttachError())
			}
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("%s: %w", why, err)
		}
	}
}

// serve is the inference server: requests are due at fixed times whether or
// not the last one is done, and latency counts from when a request was due.
func (s *stage) serve(ctx context.Context, run *Run, announce bool, duration time.Duration) error {
	n := int(duration * requestsPerSecond / time.Second)
	run.LatencyMS = make([]float64, n)
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex // guards errs and the counters of run
		errs []error
	)
	begin := time.Now()
	for i := range n {
		due := begin.Add(time.Duration(i) * time.Second / requestsPerSecond)
		if err := sleep(ctx, time.Until(due)); err != nil {
			mu.Lock()
			errs = append(errs, err)
			mu.Unlock()
			break
		}
		if time.Since(due) > lateAfter {
			run.Late++
		}
		wg.Go(func() {
			r, err := s.request(ctx, due, announce)
			run.LatencyMS[i] = milliseconds(r.took)
			mu.Lock()
			defer mu.Unlock()
			run.Serving += r.held.Seconds()
			if err != nil {
				errs = append(errs, err)
			} else {
				run.served++
			}
			if announce && !r.quiet {
				run.NotQuiesced++
			}
			if r.unprotected {
				run.unprotected++
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// served is what one request saw: its latency, and for how long it had a lease, in the time of
// the GPU.
type served struct {
	took, held time.Duration
	quiet      bool
	// unprotected: the daemon granted no lease.
	unprotected bool
}

// request is one inference: announce, run on the GPU, release. Its latency ends with the
// result; the user does not wait for the release.
func (s *stage) request(ctx context.Context, due time.Time, announce bool) (r served, err error) {
	if announce {
		var lease *client.Lease
		if lease, err = s.client.Acquire(ctx, s.announcement); err != nil {
			return r, err
		}
		r.quiet, r.unprotected = lease.Quiet(), lease.Cause() != nil
		granted, clockErr := s.machine.now()
		defer func() {
			// A release that is not answered in time ends the lease by its time to live.
			if release := lease.Release(ctx); gpreempt.ReasonOf(release) != gpreempt.ReasonDaemonUnavailable {
				err = errors.Join(err, release)
			}
			released, releasedErr := s.machine.now()
			r.held = released - granted
			err = errors.Join(err, clockErr, releasedErr)
		}()
	}
	err = s.machine.request(ctx)
	r.took = time.Since(due)
	return r, err
}

// finish reads what the daemon counted and learned.
func (s *stage) finish(ctx context.Context, result *Result) error {
	stats, err := s.client.Admin().GetStatistics(ctx, &gpreemptv1.GetStatisticsRequest{})
	if err != nil {
		return err
	}
	st := stats.GetStatistics()
	result.Suspends, result.Resumes = st.GetSuspends(), st.GetResumes()
	result.LearnedSuspendMS, result.LearnedResumeMS = milliseconds(s.learnedSuspend), milliseconds(s.learnedResume)
	return nil
}

// noteLearned reads what the scheduler learned of the job, before the job ends.
func (s *stage) noteLearned(ctx context.Context) error {
	explained, err := s.client.Admin().ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: fmt.Sprint(s.pid)})
	if err != nil {
		return err
	}
	s.learnedSuspend = explained.GetTarget().GetLearnedSuspend().AsDuration()
	s.learnedResume = explained.GetTarget().GetLearnedResume().AsDuration()
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// sleep waits, unless ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

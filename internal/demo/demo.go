// Package demo plays the product's main job on a simulated GPU: it starts a real
// daemon, an inference client and a training job, and measures what each sees.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	simv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/sim/v1"
	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/gpusim"
	"github.com/gpreempt/gpreempt/internal/version"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// Options is what the demo plays.
type Options struct {
	// Daemon is the path of the gpreemptd binary.
	Daemon string
	// Machine is the simulated machine, one GPU of it.
	Machine string
	Seed    uint64
	// Repeats of each arm, and how long one lasts.
	Repeats  int
	Duration time.Duration
	// Progress hears what is going on, a line at a time.
	Progress io.Writer
	// Spec is the model of Machine.
	Spec gpusim.Spec
}

// The workload. The job alone keeps the GPU full; sharing it, a request takes
// about as much longer as two processes on a real GPU were seen to (docs/simulation.md).
const (
	requestsPerSecond = 20
	requestKernels    = 30
	kernelTime        = 200 * time.Microsecond
	onlineOccupancy   = 0.9
	jobQueues         = 10
	jobKernel         = 25 * time.Millisecond
	jobOccupancy      = 0.3
	jobComm           = "train"
	warmUp            = 300 * time.Millisecond
)

const configYAML = `access: {online_groups: [], admin_groups: []} # whoever runs the demo has all rights
rules:
  - name: training
    match: {comm: ` + jobComm + `}
    class: offline
    priority: 0
log: {level: warn}
`

// Play runs the demo. It needs no rights and touches nothing but a temporary
// directory of its own.
func Play(ctx context.Context, o Options) (result *Result, err error) {
	s, err := open(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()

	result = &Result{
		Simulated: true, Machine: o.Machine, Version: version.String(), Seed: o.Seed,
		RequestsPerSecond: requestsPerSecond, RequestMS: milliseconds(requestKernels * kernelTime), OfflineQueues: jobQueues,
		OfflineKernelMS: milliseconds(jobKernel), ModelledSuspendMS: milliseconds(o.Spec.SuspendTime(1, jobQueues, 1)),
	}
	arms := []Arm{OfflineAlone, OnlineAlone, Shared, Protected}
	for repeat := range o.Repeats {
		for i, arm := range arms {
			fmt.Fprintf(o.Progress, "simulated run %2d of %d: %s\n", repeat*len(arms)+i+1, o.Repeats*len(arms), arm)
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
	result.summarise()
	return result, nil
}

// Live starts the daemon, the job and the inference client, tells started the
// socket, and lets them run until ctx ends: something to look at with gpctl.
func Live(ctx context.Context, o Options, started func(socket string)) (err error) {
	s, err := open(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.startJob(ctx, Protected); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	started(s.socket)
	for ctx.Err() == nil {
		if err := s.serve(ctx, &Run{}, true, o.Duration); err != nil && ctx.Err() == nil {
			return fmt.Errorf("demo: %w", err)
		}
	}
	return nil
}

// open sets the stage: a daemon in a directory of its own, and connections to it.
func open(ctx context.Context, o Options) (*stage, error) {
	dir, err := os.MkdirTemp("", "gpreempt-demo-")
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	s := &stage{socket: filepath.Join(dir, "gpreemptd.sock")}
	s.undo = append(s.undo, func() error { return os.RemoveAll(dir) })
	pid, stop, err := startDaemon(ctx, o, dir, s.socket)
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	s.daemon = pid
	s.undo = append(s.undo, stop)
	if err := s.connect(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// startDaemon runs gpreemptd on a simulated machine and returns once it serves.
func startDaemon(ctx context.Context, o Options, dir, socket string) (pid int, stop func() error, err error) {
	config := filepath.Join(dir, "gpreemptd.yaml")
	if err := os.WriteFile(config, []byte(configYAML), 0o600); err != nil {
		return 0, nil, fmt.Errorf("demo: %w", err)
	}
	cmd := exec.CommandContext(ctx, o.Daemon, //nolint:gosec // G204: the daemon is the one whoever runs the demo named
		"serve", "--config", config, "--socket", socket, "--sim", o.Machine,
		"--sim-seed", fmt.Sprint(o.Seed))
	cmd.Stderr = o.Progress
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		return 0, nil, fmt.Errorf("demo: start %s: %w", o.Daemon, err)
	}
	return cmd.Process.Pid, func() error {
		if err := cmd.Process.Signal(os.Interrupt); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("demo: stop the daemon: %w", err)
		}
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("demo: the daemon ended with: %w", err)
		}
		return nil
	}, nil
}

// stage is the daemon and the actors' connections to it.
type stage struct {
	socket  string
	client  *client.Client
	offline *grpc.ClientConn
	online  *grpc.ClientConn
	queue   uint32
	daemon  int   // its pid
	pid     int32 // of the last job
	// learned is what the daemon learned of the last protected job.
	learnedSuspend, learnedResume time.Duration
	// undo takes the stage down, last first.
	undo []func() error
}

func (s *stage) connect(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if s.client, err = client.Dial("unix://"+s.socket, client.FailClosed()); err != nil {
		return err
	}
	s.undo = append(s.undo, s.client.Close)
	for _, conn := range []**grpc.ClientConn{&s.offline, &s.online} {
		if *conn, err = grpc.NewClient("unix://"+s.socket, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			return fmt.Errorf("demo: %w", err)
		}
		s.undo = append(s.undo, (*conn).Close)
	}
	queue, err := simv1.NewSimServiceClient(s.online).CreateQueue(ctx, &simv1.CreateQueueRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("demo: the daemon did not come up: %w", err)
	}
	s.queue = queue.GetQueueId()
	return nil
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
	if arm != OnlineAlone {
		if err := s.startJob(ctx, arm); err != nil {
			return nil, err
		}
	}
	if arm == OfflineAlone {
		duration /= 2
	}
	begin, work, err := s.offlineWork(ctx)
	if err != nil {
		return nil, err
	}
	yard, err := layYardstick(os.Getpid(), s.daemon)
	if err != nil {
		return nil, err
	}
	started := time.Now()
	if arm == OfflineAlone {
		err = sleep(ctx, duration)
	} else {
		err = s.serve(ctx, run, arm == Protected, duration)
	}
	run.Seconds = time.Since(started).Seconds()
	late, own, lateErr := yard.take()
	if err := errors.Join(err, lateErr); err != nil {
		return nil, err
	}
	run.LateMS, run.OwnCPU = late, own
	if arm == OnlineAlone {
		return run, nil
	}
	end, done, err := s.offlineWork(ctx)
	if err != nil {
		return nil, err
	}
	run.OfflineWork = (done - work).Seconds() / (end - begin).Seconds()
	if arm == Protected {
		if err := s.noteLearned(ctx); err != nil {
			return nil, err
		}
	}
	stopped, err := simv1.NewSimServiceClient(s.offline).StopJob(ctx, &simv1.StopJobRequest{Pid: s.pid})
	if err != nil {
		return nil, err
	}
	c := stopped.GetCounters()
	run.Executed, run.Lost, run.Repeated = c.GetExecuted(), c.GetLost(), c.GetRepeated()
	return run, nil
}

// startJob starts the training job and, for the protected arm, waits until the
// daemon has found it and may suspend it.
func (s *stage) startJob(ctx context.Context, arm Arm) error {
	job, err := simv1.NewSimServiceClient(s.offline).StartJob(ctx, &simv1.StartJobRequest{
		Comm: jobComm, Queues: jobQueues, Kernel: &simv1.Kernel{Duration: durationpb.New(jobKernel), Occupancy: jobOccupancy},
	})
	if err != nil {
		return err
	}
	s.pid = job.GetPid()
	if arm == Protected {
		if err := s.awaitTarget(ctx); err != nil {
			return err
		}
	}
	return sleep(ctx, warmUp)
}

// awaitTarget returns when the daemon lists the job as a target it can suspend.
func (s *stage) awaitTarget(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		list, err := s.client.Admin().ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Class: gpreemptv1.Class_CLASS_OFFLINE})
		if err != nil {
			return err
		}
		for _, target := range list.GetTargets() {
			if target.GetPid() == s.pid && target.GetMechanism() != "" && target.GetQueueCount() == jobQueues {
				return nil
			}
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("the daemon did not find the job: %w", err)
		}
	}
}

// serve plays the inference server: requests are due at fixed times whether or
// not the last one is done, and latency counts from when a request was due.
func (s *stage) serve(ctx context.Context, run *Run, announce bool, duration time.Duration) error {
	n := int(duration * requestsPerSecond / time.Second)
	run.LatencyMS = make([]float64, n)
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex // guards errs and run.NotQuiesced
		errs []error
	)
	begin := time.Now()
	for i := range n {
		due := begin.Add(time.Duration(i) * time.Second / requestsPerSecond)
		if err := sleep(ctx, time.Until(due)); err != nil {
			errs = append(errs, err)
			break
		}
		wg.Go(func() {
			quiesced, took, err := s.request(ctx, due, announce)
			run.LatencyMS[i] = milliseconds(took)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
			}
			if announce && !quiesced {
				run.NotQuiesced++
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// request is one inference: announce, run on the GPU, say it is done. Its latency
// ends with the result; giving the GPU back is not the user's wait.
func (s *stage) request(ctx context.Context, due time.Time, announce bool) (quiesced bool, took time.Duration, err error) {
	if announce {
		lease, err := s.client.Acquire(ctx, client.Request{Label: "demo"})
		if err != nil {
			return false, 0, err
		}
		quiesced = lease.Quiesced()
		defer func() { err = errors.Join(err, lease.Release(ctx)) }()
	}
	kernels := make([]*simv1.Kernel, requestKernels)
	for i := range kernels {
		kernels[i] = &simv1.Kernel{Duration: durationpb.New(kernelTime), Occupancy: onlineOccupancy}
	}
	_, err = simv1.NewSimServiceClient(s.online).Submit(ctx, &simv1.SubmitRequest{QueueId: s.queue, Kernels: kernels})
	return quiesced, time.Since(due), err
}

// offlineWork gives the simulated time and the work the job has done by then.
func (s *stage) offlineWork(ctx context.Context) (now, work time.Duration, err error) {
	counters, err := simv1.NewSimServiceClient(s.online).GetCounters(ctx, &simv1.GetCountersRequest{})
	if err != nil {
		return 0, 0, err
	}
	for _, p := range counters.GetProcesses() {
		if p.GetPid() == s.pid {
			work = p.GetWork().AsDuration()
		}
	}
	return counters.GetNow().AsDuration(), work, nil
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

// noteLearned reads what the scheduler learned of the job, which goes with it.
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

package demo

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	simv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/sim/v1"
)

// simulated is the machine of a daemon that simulates one, by its service for that. A
// connection stands for a process there: the job is one, the inference server another.
type simulated struct {
	offline, online *grpc.ClientConn
	queue           uint32
	job             int32
}

func simulate(ctx context.Context, socket string) (_ *simulated, err error) {
	m := &simulated{}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	for _, conn := range []**grpc.ClientConn{&m.offline, &m.online} {
		if *conn, err = grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			return nil, err
		}
	}
	queue, err := m.inference().CreateQueue(ctx, &simv1.CreateQueueRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, fmt.Errorf("make a simulated queue: %w", err)
	}
	m.queue = queue.GetQueueId()
	return m, nil
}

func (m *simulated) training() simv1.SimServiceClient { return simv1.NewSimServiceClient(m.offline) }

func (m *simulated) inference() simv1.SimServiceClient { return simv1.NewSimServiceClient(m.online) }

func (m *simulated) startJob(ctx context.Context) (int32, error) {
	job, err := m.training().StartJob(ctx, &simv1.StartJobRequest{
		Comm: jobComm, Queues: jobQueues, Depth: jobDepth, Kernel: &simv1.Kernel{Duration: durationpb.New(jobKernel), Occupancy: jobOccupancy},
	})
	m.job = job.GetPid()
	return m.job, err
}

func (m *simulated) stopJob(ctx context.Context) (packets, error) {
	stopped, err := m.training().StopJob(ctx, &simv1.StopJobRequest{Pid: m.job})
	c := stopped.GetCounters()
	return packets{executed: c.GetExecuted(), lost: c.GetLost(), repeated: c.GetRepeated()}, err
}

func (m *simulated) work(ctx context.Context) ([]progress, error) {
	counters, err := m.inference().GetCounters(ctx, &simv1.GetCountersRequest{})
	if err != nil {
		return nil, err
	}
	for _, p := range counters.GetProcesses() {
		if p.GetPid() == m.job {
			return []progress{{at: counters.GetNow().AsDuration(), work: p.GetWork().AsDuration()}}, nil
		}
	}
	return nil, fmt.Errorf("the simulator has no process %d any more", m.job)
}

func (m *simulated) request(ctx context.Context) error {
	kernels := make([]*simv1.Kernel, requestKernels)
	for i := range kernels {
		kernels[i] = &simv1.Kernel{Duration: durationpb.New(kernelTime), Occupancy: onlineOccupancy}
	}
	_, err := m.inference().Submit(ctx, &simv1.SubmitRequest{QueueId: m.queue, Kernels: kernels})
	return err
}

// processes: all are in the daemon.
func (m *simulated) processes() []int { return nil }

func (m *simulated) close() error {
	var errs []error
	for _, conn := range []*grpc.ClientConn{m.offline, m.online} {
		if conn != nil {
			errs = append(errs, conn.Close())
		}
	}
	return errors.Join(errs...)
}

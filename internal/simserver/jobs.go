package simserver

import (
	"context"
	"fmt"
	"time"
	"unicode"

	"google.golang.org/protobuf/types/known/durationpb"

	simv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/sim/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// job is a checked StartJobRequest.
type job struct {
	comm   string
	uid    uint32
	gpus   []gpreempt.GPUID
	queues int
	depth  int
	kernel gpumodel.Packet
}

func (s *Server) job(req *simv1.StartJobRequest) (job, error) {
	j := job{comm: req.GetComm(), queues: int(req.GetQueues()), depth: int(req.GetDepth())}
	if j.depth == 0 {
		j.depth = defaultDepth
	}
	if j.comm == "" || len(j.comm) > maxComm {
		return job{}, rejected(fmt.Sprintf("use 1 to %d bytes", maxComm), "a process cannot be called %q", j.comm)
	}
	for _, r := range j.comm {
		if !unicode.IsPrint(r) {
			return job{}, rejected("use printable characters", "a process cannot be called %q", j.comm)
		}
	}
	if j.queues < 1 || j.queues > maxQueues {
		return job{}, rejected(fmt.Sprintf("use 1 to %d", maxQueues), "a job cannot have %d queues on a GPU", req.GetQueues())
	}
	if j.depth > maxDepth {
		return job{}, rejected(fmt.Sprintf("use 1 to %d", maxDepth), "a job cannot keep %d packets in each ring", req.GetDepth())
	}
	var err error
	if j.gpus, err = s.gpus(req.GetGpuIds()); err != nil {
		return job{}, err
	}
	j.kernel, err = packet(req.GetKernel())
	j.kernel.Jitter = jobJitter
	return j, err
}

// start starts the process and fills its rings: each packet that ends puts the
// next one on its ring.
func (j job) start(m *gpumodel.Machine) (gpreempt.ProcessKey, error) {
	key, err := m.StartProcess(gpumodel.ProcSpec{Comm: j.comm, Cmdline: []string{j.comm}, UID: j.uid})
	if err != nil {
		return gpreempt.ProcessKey{}, err
	}
	for _, gpu := range j.gpus {
		for range j.queues {
			id, err := m.CreateQueue(key, gpu, gpreempt.QueueCompute, maxDepth)
			if err != nil {
				_ = m.EndProcess(key) // It lives: it was started above.
				return gpreempt.ProcessKey{}, err
			}
			kernel := j.kernel
			kernel.Done = func(_, _ time.Duration) {
				// Fails only when the process is being ended at this moment.
				_ = m.Submit(key, id, kernel)
			}
			for range j.depth {
				if err := m.Submit(key, id, kernel); err != nil {
					_ = m.EndProcess(key)
					return gpreempt.ProcessKey{}, err
				}
			}
		}
	}
	return key, nil
}

// StartJob implements simv1.SimServiceServer.
func (s *Server) StartJob(ctx context.Context, req *simv1.StartJobRequest) (*simv1.StartJobResponse, error) {
	j, err := s.job(req)
	if err != nil {
		return nil, err
	}
	c, _, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if c.running == maxJobs || len(c.jobs) == maxStarted {
		return nil, rejected("stop some, or connect again",
			"the caller has %d jobs and has started %d, and can have %d and start %d", c.running, len(c.jobs), maxJobs, maxStarted)
	}
	j.uid = c.uid
	var key gpreempt.ProcessKey
	s.rt.Do(func(m *gpumodel.Machine) { key, err = j.start(m) })
	if err != nil {
		return nil, rejected("use fewer queues", "job %q cannot start: %v", j.comm, err)
	}
	c.jobs[key.PID] = key
	c.running++
	return &simv1.StartJobResponse{Pid: key.PID}, nil
}

// StopJob implements simv1.SimServiceServer.
func (s *Server) StopJob(ctx context.Context, req *simv1.StopJobRequest) (*simv1.StopJobResponse, error) {
	c, _, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	key, ok := c.jobs[req.GetPid()]
	if !ok {
		return nil, rejected("stop what StartJob started on this connection", "the caller has no job with pid %d", req.GetPid())
	}
	if s.rt.EndProcess(key) == nil {
		c.running--
	}
	counters, ok := s.rt.ProcessCounters(key)
	if !ok {
		return nil, rejected("read the counters sooner", "job %v ended so long ago that its counters are forgotten", key)
	}
	return &simv1.StopJobResponse{Counters: processCounters(counters)}, nil
}

// GetCounters implements simv1.SimServiceServer.
func (s *Server) GetCounters(context.Context, *simv1.GetCountersRequest) (*simv1.GetCountersResponse, error) {
	resp := &simv1.GetCountersResponse{}
	// One look at the machine, so that the numbers belong together.
	s.rt.Do(func(m *gpumodel.Machine) {
		resp.Now = durationpb.New(m.Now())
		for _, c := range m.Counters() {
			resp.Processes = append(resp.Processes, processCounters(c))
		}
		for _, c := range m.GPUCounters() {
			resp.Gpus = append(resp.Gpus, &simv1.GpuCounters{
				GpuId: uint32(c.GPU), SchedulerCycles: c.SchedulerCycles, Busy: durationpb.New(c.Busy),
			})
		}
	})
	return resp, nil
}

// processCounters counts what a process left behind on its rings as pending.
func processCounters(c gpumodel.ProcessCounters) *simv1.ProcessCounters {
	return &simv1.ProcessCounters{
		Pid:              c.Process.PID,
		Submitted:        c.Submitted,
		Executed:         c.Executed,
		Lost:             c.Lost,
		Repeated:         c.Repeated,
		Pending:          c.Pending + c.Abandoned,
		Work:             durationpb.New(c.Work),
		CollateralCycles: c.CollateralCycles,
	}
}

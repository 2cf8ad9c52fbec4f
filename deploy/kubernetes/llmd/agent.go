package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/deploy/kubernetes/llmd/gen/snapshotpb"
)

// jobLabel is the label of a pod with the id of its job (llm-d's).
const jobLabel = "timeslice.io/job-id"

const (
	// suspendTime is how long a Snapshot tries until all processes of the job are suspended.
	suspendTime = 10 * time.Second
	// again is the pause before a process that is not suspended yet is asked for again.
	again = 20 * time.Millisecond
	// operationsKept is how many ended operations are remembered.
	operationsKept = 1000
	// running is the operation of a Restore of a job that runs, as with llm-d's agent.
	running = "already-running"
)

// agent takes jobs off the GPUs of a node by gpreempt's daemon, which suspends them. It
// frees time, and no memory.
//
// The daemon lets a suspended process run for a moment after each max_suspend. A saved job
// is therefore suspended again and again, by keep, until it is restored; and when this
// program or the daemon dies, it runs.
type agent struct {
	snapshotpb.UnimplementedSnapshotAgentServiceServer

	admin gpreemptv1.AdminServiceClient
	// namespace is that of the pods of its jobs.
	namespace string
	// background are the operations in progress.
	background sync.WaitGroup

	mu         sync.Mutex // guards what follows
	jobs       map[string]*job
	operations map[string]*operation
	order      []string // of the operations, oldest first
}

// job is a job that was snapshotted.
type job struct {
	state snapshotpb.JobState
	// turn is held by the one that makes calls about the job.
	turn sync.Mutex
}

type operation struct {
	begun, ended time.Time
	err          error
}

func newAgent(admin gpreemptv1.AdminServiceClient, namespace string) *agent {
	return &agent{admin: admin, namespace: namespace, jobs: map[string]*job{}, operations: map[string]*operation{}}
}

// targets returns the processes with queues on the node, by job.
func (a *agent) targets(ctx context.Context) (map[string][]*gpreemptv1.Target, error) {
	list, err := a.admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask gpreemptd for the processes of the node: %w", err)
	}
	jobs := map[string][]*gpreemptv1.Target{}
	for _, t := range list.GetTargets() {
		pod := t.GetContainer()
		if id := pod.GetPodLabels()[jobLabel]; id != "" && pod.GetNamespace() == a.namespace && t.GetState() != gpreemptv1.TargetState_TARGET_STATE_GONE {
			jobs[id] = append(jobs[id], t)
		}
	}
	return jobs, nil
}

// Status implements snapshotpb.SnapshotAgentServiceServer.
func (a *agent) Status(ctx context.Context, _ *snapshotpb.StatusRequest) (*snapshotpb.StatusResponse, error) {
	found, err := a.targets(ctx)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	// A job whose processes have all ended is forgotten: the next one with its id is new.
	maps.DeleteFunc(a.jobs, func(id string, j *job) bool {
		return len(found[id]) == 0 && j.state != snapshotpb.JobState_JOB_STATE_TRANSITIONING
	})
	states := map[string]snapshotpb.JobState{}
	for id := range found {
		states[id] = snapshotpb.JobState_JOB_STATE_RUNNING
	}
	for id, j := range a.jobs {
		states[id] = j.state
	}
	answer := &snapshotpb.StatusResponse{}
	for _, id := range slices.Sorted(maps.Keys(states)) {
		answer.JobStatuses = append(answer.JobStatuses, &snapshotpb.JobStatus{JobId: id, State: states[id]})
	}
	return answer, nil
}

// Snapshot implements snapshotpb.SnapshotAgentServiceServer.
func (a *agent) Snapshot(ctx context.Context, r *snapshotpb.SnapshotRequest) (*snapshotpb.SnapshotResponse, error) {
	if r.GetBackendConfig() != nil {
		return nil, errBackend
	}
	found, err := a.targets(ctx)
	if err != nil {
		return nil, err
	}
	id, err := a.begin(ctx, r.GetJobId(), func(state snapshotpb.JobState, known bool) error {
		if known && state != snapshotpb.JobState_JOB_STATE_RUNNING || len(found[r.GetJobId()]) == 0 {
			return status.Errorf(codes.FailedPrecondition, "job %q cannot be taken off: it is %v, with %d processes on GPUs of this node", r.GetJobId(), state, len(found[r.GetJobId()]))
		}
		return nil
	}, a.suspend, snapshotpb.JobState_JOB_STATE_SAVED)
	return &snapshotpb.SnapshotResponse{OperationId: id}, err
}

// Restore implements snapshotpb.SnapshotAgentServiceServer. A job whose Snapshot failed can
// be restored too: it runs then.
func (a *agent) Restore(ctx context.Context, r *snapshotpb.RestoreRequest) (*snapshotpb.RestoreResponse, error) {
	if r.GetBackendConfig() != nil {
		return nil, errBackend
	}
	found, err := a.targets(ctx)
	if err != nil {
		return nil, err
	}
	id, err := a.begin(ctx, r.GetJobId(), func(state snapshotpb.JobState, known bool) error {
		switch {
		case known && state == snapshotpb.JobState_JOB_STATE_RUNNING, !known && len(found[r.GetJobId()]) > 0:
			return errRunning
		case !known:
			return status.Errorf(codes.FailedPrecondition, "job %q was not taken off", r.GetJobId())
		}
		return nil
	}, a.resume, snapshotpb.JobState_JOB_STATE_RUNNING)
	if errors.Is(err, errRunning) {
		id, err = running, nil
	}
	return &snapshotpb.RestoreResponse{OperationId: id}, err
}

var (
	errBackend = status.Error(codes.InvalidArgument, "backend_config: this agent has one way to take a job off, suspending it by gpreempt; leave the field out")
	errRunning = errors.New("the job runs")
)

// begin starts an operation on a job if its state permits, and returns its id.
func (a *agent) begin(ctx context.Context, id string, permit func(state snapshotpb.JobState, known bool) error,
	do func(context.Context, string) error, after snapshotpb.JobState,
) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	j, known := a.jobs[id]
	if !known {
		j = &job{state: snapshotpb.JobState_JOB_STATE_RUNNING}
	}
	if j.state == snapshotpb.JobState_JOB_STATE_TRANSITIONING {
		return "", status.Errorf(codes.Aborted, "an operation on job %q is in progress", id)
	}
	if err := permit(j.state, known); err != nil {
		return "", err
	}
	a.jobs[id] = j
	j.state = snapshotpb.JobState_JOB_STATE_TRANSITIONING
	name, op := rand.Text(), &operation{begun: time.Now()}
	a.operations[name], a.order = op, append(a.order, name)
	for len(a.order) > operationsKept {
		delete(a.operations, a.order[0])
		a.order = a.order[1:]
	}
	ctx = context.WithoutCancel(ctx) // the operation outlives the call
	a.background.Go(func() {
		j.turn.Lock()
		err := do(ctx, id)
		a.mu.Lock()
		op.ended, op.err = time.Now(), err
		if j.state = after; err != nil {
			j.state = snapshotpb.JobState_JOB_STATE_FAULTED
		}
		a.mu.Unlock()
		j.turn.Unlock()
	})
	return name, nil
}

// suspend suspends all processes of a job, or none.
func (a *agent) suspend(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, suspendTime)
	defer cancel()
	err := a.suspendAll(ctx, id)
	for err != nil && ctx.Err() == nil && errors.Is(err, errNotYet) {
		select {
		case <-time.After(again):
		case <-ctx.Done():
		}
		if next := a.suspendAll(ctx, id); ctx.Err() == nil {
			err = next // else the last answer says more
		}
	}
	if err == nil {
		return nil
	}
	return errors.Join(err, a.resume(context.WithoutCancel(ctx), id))
}

var errNotYet = errors.New("not all processes of the job are suspended")

// suspendAll asks for the suspension of each process of a job, for as long as the policy
// permits.
func (a *agent) suspendAll(ctx context.Context, id string) error {
	policy, err := a.admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		return fmt.Errorf("ask gpreemptd for its policy: %w", err)
	}
	found, err := a.targets(ctx)
	if err != nil {
		return err
	}
	var failed error
	for _, t := range found[id] {
		answer, err := a.admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: t.GetTargetId(), Ttl: policy.GetPolicy().GetMaxSuspend()})
		switch {
		case status.Code(err) == codes.NotFound: // it has exited
		case err != nil:
			failed = errors.Join(failed, fmt.Errorf("suspend process %d: %w", t.GetPid(), err))
		case !answer.GetQuiesced():
			failed = errors.Join(failed, fmt.Errorf("%w: process %d: %v", errNotYet, t.GetPid(), answer.GetReason()))
		}
	}
	return failed
}

// resume resumes all processes of a job.
func (a *agent) resume(ctx context.Context, id string) error {
	found, err := a.targets(ctx)
	if err != nil {
		return err
	}
	var failed error
	for _, t := range found[id] {
		if _, err := a.admin.ResumeTarget(ctx, &gpreemptv1.ResumeTargetRequest{TargetId: t.GetTargetId(), Hold: durationpb.New(0)}); err != nil && status.Code(err) != codes.NotFound {
			failed = errors.Join(failed, fmt.Errorf("resume process %d: %w", t.GetPid(), err))
		}
	}
	return failed
}

// GetOperation implements snapshotpb.SnapshotAgentServiceServer.
func (a *agent) GetOperation(_ context.Context, r *snapshotpb.GetOperationRequest) (*snapshotpb.GetOperationResponse, error) {
	if r.GetOperationId() == running {
		return &snapshotpb.GetOperationResponse{Status: snapshotpb.OperationStatus_OPERATION_STATUS_COMPLETE}, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	op := a.operations[r.GetOperationId()]
	switch {
	case op == nil:
		return nil, status.Errorf(codes.NotFound, "operation %q is not known", r.GetOperationId())
	case op.ended.IsZero():
		return &snapshotpb.GetOperationResponse{Status: snapshotpb.OperationStatus_OPERATION_STATUS_PENDING, ElapsedMs: time.Since(op.begun).Milliseconds()}, nil
	}
	answer := &snapshotpb.GetOperationResponse{ElapsedMs: op.ended.Sub(op.begun).Milliseconds()}
	if op.err != nil {
		text := op.err.Error()
		answer.Status, answer.Error = snapshotpb.OperationStatus_OPERATION_STATUS_FAILED, &text
		return answer, nil
	}
	answer.Status = snapshotpb.OperationStatus_OPERATION_STATUS_COMPLETE
	answer.StorageBytes, answer.SnapshotDeviceBytes = new(int64), new(int64)
	return answer, nil
}

// keep suspends saved jobs again, once for each value of ticks, until ctx ends. report is
// called with errors.
func (a *agent) keep(ctx context.Context, ticks <-chan time.Time, report func(job string, err error)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks:
		}
		a.mu.Lock()
		known := maps.Clone(a.jobs)
		a.mu.Unlock()
		for id, j := range known {
			if !j.turn.TryLock() { // an operation is in progress
				continue
			}
			a.mu.Lock()
			saved := j.state == snapshotpb.JobState_JOB_STATE_SAVED
			a.mu.Unlock()
			if saved {
				if err := a.suspendAll(ctx, id); err != nil && !errors.Is(err, errNotYet) && ctx.Err() == nil {
					report(id, err)
				}
			}
			j.turn.Unlock()
		}
	}
}

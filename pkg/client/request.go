package client

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// NoWait as MaxWait makes Acquire return at once, while targets are being suspended.
const NoWait time.Duration = -1

const (
	// daemonTime is how long the daemon itself may take, in addition to max_wait.
	daemonTime = 100 * time.Millisecond
	// unstatedMaxWait is assumed as max_wait when a request has none; the policy's
	// default is 20 ms.
	unstatedMaxWait = 200 * time.Millisecond
)

// Request is work to announce. The zero value means the daemon's defaults.
type Request struct {
	// GPUs are the GPUs that the work will use. Empty: those on which this process has
	// queues, or all when it has none yet.
	GPUs []GPU
	// RequestID, at most 64 bytes, makes a retry safe: the same ID returns the same
	// lease. Empty: every call is a new announcement.
	RequestID string
	// Priority is the priority of the work, at most gpreempt.MaxPriority; offline
	// targets of lower priority are suspended. 0 means the default,
	// gpreempt.PriorityHigh.
	Priority gpreempt.Priority
	// TTL is the time to live of the lease. 0: the policy's.
	TTL time.Duration
	// NoRenew is whether the lease ends when its TTL has passed.
	NoRenew bool
	// MaxWait is the longest time to wait for quiet GPUs, at most 10 s, or NoWait. 0:
	// the policy's. The client then waits for 200 ms before it considers the daemon
	// unavailable, so a longer max_wait must be set here.
	MaxWait time.Duration
	// ETA is the time until the first packet will be submitted, at most 1 min.
	ETA time.Duration
	// CompleteOnIdle ends the lease when the queues of this process had work and
	// then none.
	CompleteOnIdle bool
	// Label is a name of the work for a person to read, at most 128 bytes.
	Label string
}

// GPU selects a GPU by one of its names.
type GPU struct{ selector *gpreemptv1.GpuSelector }

// GPUByID selects a GPU by its KFD gpu_id.
func GPUByID(id gpreempt.GPUID) GPU {
	return GPU{&gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_GpuId{GpuId: uint32(id)}}}
}

// GPUByNode selects a GPU by its KFD topology node number.
func GPUByNode(node uint32) GPU {
	return GPU{&gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_Node{Node: node}}}
}

// GPUByBDF selects a GPU by its PCI address, "0000:c1:00.0" or "c1:00.0", as
// hipDeviceGetPCIBusId returns it.
func GPUByBDF(bdf string) GPU {
	return GPU{&gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_Bdf{Bdf: bdf}}}
}

// GPUByRenderMinor selects a GPU by N of /dev/dri/renderDN.
func GPUByRenderMinor(minor uint32) GPU {
	return GPU{&gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_RenderMinor{RenderMinor: minor}}}
}

// callTime returns the longest duration of the call.
func (r *Request) callTime() time.Duration {
	switch {
	case r.MaxWait == 0:
		return unstatedMaxWait + daemonTime
	case r.MaxWait < 0:
		return daemonTime
	}
	return r.MaxWait + daemonTime
}

// announcement returns the request of the API. The daemon checks the ranges.
func (r *Request) announcement() *gpreemptv1.NotifyOnlineRequest {
	a := &gpreemptv1.NotifyOnlineRequest{
		RequestId: r.RequestID,
		Ttl:       durationOrNil(r.TTL),
		MaxWait:   durationOrNil(r.MaxWait),
		Eta:       durationOrNil(r.ETA),

		CompleteOnIdle: r.CompleteOnIdle,
		Label:          r.Label,
	}
	if r.MaxWait < 0 {
		a.MaxWait = &durationpb.Duration{}
	}
	if r.Priority != 0 {
		a.Priority = new(uint32(r.Priority))
	}
	for _, gpu := range r.GPUs {
		a.Gpus = append(a.Gpus, gpu.selector)
	}
	return a
}

func durationOrNil(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

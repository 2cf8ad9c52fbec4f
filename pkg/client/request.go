package client

import (
	"time"

	"google.golang.org/protobuf/proto"
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

// Request is work to announce. Zero values mean the daemon's defaults; only GPUs has none.
type Request struct {
	// GPUs are the GPUs that the work will use: see AllGPUs and OwnGPUs.
	GPUs []GPU
	// RequestID, at most 64 bytes, makes a retry safe: the same ID returns the same
	// lease.
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
	// Label is a name of the kind of work for a person to read, at most 128 bytes.
	Label string
}

// GPU selects a GPU by one of its names.
type GPU struct{ selector *gpreemptv1.GpuSelector }

// AllGPUs selects all GPUs of the host.
func AllGPUs() []GPU {
	return []GPU{{&gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_All{All: true}}}}
}

// OwnGPUs selects those on which this process has queues when it announces, all of the host
// while it has none, and all of another host.
func OwnGPUs() []GPU { return []GPU{{}} }

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
		if gpu.selector != nil { // an announcement without selectors is of the own GPUs
			a.Gpus = append(a.Gpus, gpu.selector)
		}
	}
	return a
}

// key returns what is equal in equal announcements that may share a lease; "" for one that
// has its own: by its ID, as a time slice, or because its end depends on its beginning.
func (r *Request) key(a *gpreemptv1.NotifyOnlineRequest) string {
	if r.RequestID != "" || r.NoRenew || r.ETA != 0 || r.CompleteOnIdle {
		return ""
	}
	key, err := proto.MarshalOptions{Deterministic: true}.Marshal(a)
	if err != nil { // the label is not UTF-8, as the daemon will say
		return ""
	}
	return string(key)
}

func durationOrNil(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

package client

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// NoWait as a MaxWait has Acquire return at once, with suspending begun.
const NoWait time.Duration = -1

const (
	// grace is the time the daemon itself may take beyond max_wait.
	grace = 100 * time.Millisecond
	// unstatedMaxWait is what the daemon's policy is given when a request names no
	// max_wait; its default is 20 ms.
	unstatedMaxWait = 200 * time.Millisecond
)

// Request is work to announce. The zero value asks for the daemon's defaults.
type Request struct {
	// GPUs the work will use. Empty: those on which this process has queues, or all
	// when it has none yet.
	GPUs []GPU
	// RequestID, at most 64 bytes, makes a repeated announcement harmless: the same
	// id returns the same lease. Empty: every call is a new announcement.
	RequestID string
	// Priority is the rank of the work, at most gpreempt.MaxPriority; offline work
	// of lower priority is suspended. 0 stands for the default, gpreempt.PriorityHigh.
	Priority gpreempt.Priority
	// TTL is the time to live of the lease. 0: the policy's.
	TTL time.Duration
	// NoRenew lets the lease end when its TTL is over, released or not.
	NoRenew bool
	// MaxWait is the longest time to wait for quiet GPUs, at most 10 s, or NoWait.
	// 0: the policy's, which the client gives 200 ms at most before it takes the
	// daemon for absent: state a longer one here.
	MaxWait time.Duration
	// ETA is the time until the first packet will be submitted, at most 1 min.
	ETA time.Duration
	// SLO is the time by which the work should be done, at most 10 min.
	SLO time.Duration
	// Expected is the time the work takes on quiet GPUs, if known, at most 10 min.
	Expected time.Duration
	// CompleteOnIdle ends the lease when the queues of this process had work and
	// then none.
	CompleteOnIdle bool
	// Label names the work for people, at most 128 bytes.
	Label string
}

// GPU names a GPU by whichever name the program knows.
type GPU struct{ selector *gpreemptv1.GpuSelector }

// GPUByID names a GPU by its KFD gpu_id.
func GPUByID(id gpreempt.GPUID) GPU {
	return GPU{&gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_GpuId{GpuId: uint32(id)}}}
}

// GPUByNode names a GPU by its KFD topology node number.
func GPUByNode(node uint32) GPU {
	return GPU{&gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_Node{Node: node}}}
}

// GPUByBDF names a GPU by its PCI address, "0000:c1:00.0" or "c1:00.0". HIP gives
// it as hipDeviceGetPCIBusId.
func GPUByBDF(bdf string) GPU {
	return GPU{&gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_Bdf{Bdf: bdf}}}
}

// GPUByRenderMinor names a GPU by N of /dev/dri/renderDN.
func GPUByRenderMinor(minor uint32) GPU {
	return GPU{&gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_RenderMinor{RenderMinor: minor}}}
}

// patience is the longest time the call may take.
func (r *Request) patience() time.Duration {
	switch {
	case r.MaxWait == 0:
		return unstatedMaxWait + grace
	case r.MaxWait < 0:
		return grace
	}
	return r.MaxWait + grace
}

// announcement is the request in the API's words. Ranges are the daemon's to check.
func (r *Request) announcement() *gpreemptv1.NotifyOnlineRequest {
	a := &gpreemptv1.NotifyOnlineRequest{
		RequestId: r.RequestID,
		Ttl:       stated(r.TTL),
		MaxWait:   stated(r.MaxWait),
		Eta:       stated(r.ETA),
		Slo:       stated(r.SLO),
		Expected:  stated(r.Expected),

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

func stated(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

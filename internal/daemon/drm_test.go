package daemon

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// A job that creates a user queue of DRM is released, and leases on its GPU are not quiet.
func TestProcessWithUserQueuesOfDRMIsNeverCalledQuiet(t *testing.T) {
	h := newFakeHost(t, "7.2", trainersAreOffline)
	h.put("sys/module/amdgpu/parameters/user_queue", "1\n")
	h.put("sys/kernel/debug/dri/client-5/proc_info", "pid: 1\ncomm: Xorg\n")
	job := h.start("trainer")
	c, _ := h.serve()
	h.target(c, job, "a mechanism is attached", held)
	client := fmt.Sprintf("sys/kernel/debug/dri/client-%d/", 31)
	h.put(client+"proc_info", fmt.Sprintf("pid: %d\ncomm: trainer\n", job.PID()))
	h.put(client+"queue-1/mqd_info", "queue_type: 1\n")
	h.target(c, job, "it is rejected", func(target *gpreemptv1.Target) bool {
		return strings.Contains(target.GetAttachError(), "dbgtrap: drm-queues: DRM queues: it has user queues of DRM on GPU [63420]")
	})
	h.await("it is detached", func() bool { state, _ := job.KFD(); return !state.Enabled })
	answer, err := c.Online().NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), MaxWait: durationpb.New(10 * time.Second)})
	if err != nil || answer.GetQuiesced() || answer.GetReason() != gpreemptv1.QuiesceReason_QUIESCE_REASON_DRM_QUEUES {
		t.Errorf("announcement: %v, error %v", answer, err)
	}
	why, err := c.Admin().ExplainTarget(t.Context(), &gpreemptv1.ExplainTargetRequest{TargetId: job.Key().String()})
	if want := "Running: it has user queues of DRM, which no enabled mechanism can suspend (drm-queues)."; err != nil || why.GetVerdict() != want {
		t.Errorf("explained as %q, error %v, want %q", why.GetVerdict(), err, want)
	}
}

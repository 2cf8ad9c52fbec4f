package server

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// warningCodes returns the codes of warnings.
func warningCodes(warnings []gpreempt.Warning) (all []string) {
	for _, w := range warnings {
		all = append(all, w.Code)
	}
	return all
}

func TestProcessWithoutQueuesThatTakesAllGPUsIsAWarning(t *testing.T) {
	h := startHost(t)
	announce := func(gpus ...*gpreemptv1.GpuSelector) {
		t.Helper()
		if _, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Gpus: gpus}); err != nil {
			t.Fatal(err)
		}
	}
	announce(byID(gpuA))
	announce(byID(gpuA), byID(gpuB))
	if _, err := h.admin(t).CreateLease(t.Context(), &gpreemptv1.CreateLeaseRequest{Announce: &gpreemptv1.NotifyOnlineRequest{}}); err != nil {
		t.Fatal(err)
	}
	own := h.anyConnection().peer.Key()
	h.setProcs(discovery.Proc{Process: gpreempt.Process{Key: own}, Queues: []gpreempt.Queue{{Process: own, GPU: gpuB}}})
	announce()
	if diff := cmp.Diff([]string(nil), warningCodes(h.server.Warnings())); diff != "" {
		t.Errorf("warnings about named GPUs, an admin's lease and a process with queues (-want +got):\n%s", diff)
	}

	h.setProcs()
	announce()
	got := h.server.Warnings()
	want := []gpreempt.Warning{gpreempt.WarnAllGPUsTaken.Warn(fmt.Sprintf(
		"process %d has no GPU queues and named no GPUs in an announcement, so its lease covers all 2", os.Getpid()))}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("warning (-want +got):\n%s", diff)
	}
}

func TestWarningAboutAllGPUsEndsAMinuteAfterTheLastAnnouncement(t *testing.T) {
	taken := &allTaken{7, 2, time.Hour}
	for at, want := range map[time.Duration]int{time.Hour: 1, time.Hour + time.Minute - 1: 1, time.Hour + time.Minute: 0} {
		if got := taken.warnings(at); len(got) != want {
			t.Errorf("at %v: %v, want %d", at, got, want)
		}
	}
}

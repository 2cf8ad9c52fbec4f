package server

import (
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// lockings records every call of the server that takes the scheduler's lock.
type lockings struct {
	Scheduler
	mu    sync.Mutex
	calls []string
}

func (l *lockings) note(call string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, call)
}

func (l *lockings) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	calls := l.calls
	l.calls = nil
	return calls
}

func (l *lockings) Announce(req scheduler.LeaseRequested, reply scheduler.Reply) (scheduler.LeaseID, time.Duration, error) {
	l.note("Announce")
	return l.Scheduler.Announce(req, reply)
}

func (l *lockings) Complete(client scheduler.ClientID, id scheduler.LeaseID, end scheduler.LeaseEnd) (scheduler.LeaseEnd, time.Duration, error) {
	l.note("Complete")
	return l.Scheduler.Complete(client, id, end)
}

func (l *lockings) Renew(client scheduler.ClientID, id scheduler.LeaseID, ttl time.Duration) (time.Duration, error) {
	l.note("Renew")
	return l.Scheduler.Renew(client, id, ttl)
}

func (l *lockings) Post(ev scheduler.Event) {
	l.note("Post")
	l.Scheduler.Post(ev)
}

func (l *lockings) View(fn func(*scheduler.Core)) {
	l.note("View")
	l.Scheduler.View(fn)
}

// An announcement that suspends a target takes the scheduler's lock twice: once for the
// call, and once for the mechanism's result.
func TestAnAnnouncementTakesTheSchedulersLockTwice(t *testing.T) {
	l := &lockings{}
	h := startHost(t, func(c *Config, _ *scheduler.Limits) { c.Scheduler = l })
	l.Scheduler = h.runner
	post := h.machine.post
	h.machine.post = func(ev scheduler.Event) {
		l.note("result")
		post(ev)
	}
	resp, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(gpuA)}})
	if err != nil || !resp.GetQuiesced() || resp.GetSuspendedTargets() != 1 {
		t.Fatalf("announced %v, %v; want one suspended target", resp, err)
	}
	if diff := cmp.Diff([]string{"Announce", "result"}, l.take()); diff != "" {
		t.Errorf("lock takings of an announcement (-want +got):\n%s", diff)
	}
}

package scheduler

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// machine is a mechanism that takes its time, and the log of what happened. It
// lives in a synctest bubble.
type machine struct {
	*Runner
	start           time.Time
	suspend, resume time.Duration // 0: it never answers
	result          Cause

	mu  sync.Mutex
	log []string
}

func (m *machine) Now() Time { return time.Since(m.start) }

func (m *machine) note(format string, args ...any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.log = append(m.log, fmt.Sprintf("%v ", m.Now())+fmt.Sprintf(format, args...))
}

func (m *machine) Suspend(t gpreempt.ProcessKey, seq uint64) {
	m.note("suspend %v", t)
	if m.suspend > 0 {
		time.AfterFunc(m.suspend, func() { m.Post(Suspended{Target: t, Seq: seq, Result: m.result, Took: m.suspend}) })
	}
}

func (m *machine) Resume(t gpreempt.ProcessKey, seq uint64) {
	m.note("resume %v", t)
	if m.resume > 0 {
		time.AfterFunc(m.resume, func() { m.Post(Resumed{Target: t, Seq: seq, Took: m.resume}) })
	}
}

// Attach and Detach are not noted: most tests are about what follows them.
func (m *machine) Attach(t gpreempt.ProcessKey) { go m.Post(Attached{Target: t}) }
func (m *machine) Detach(t gpreempt.ProcessKey) { go m.Post(Detached{Target: t}) }

// Inspect knows nothing.
func (m *machine) Inspect(t gpreempt.ProcessKey, seq uint64) {
	go m.Post(Inspected{Target: t, Seq: seq})
}

func (m *machine) Kill(t gpreempt.ProcessKey) { m.note("kill %v", t) }

func (m *machine) Flush() {}

// see makes an offline target known that has a queue on GPU 1.
func (m *machine) see(t gpreempt.ProcessKey) {
	m.Post(TargetSeen{Target: t, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{1}, Queues: 1})
	synctest.Wait()
}

func (m *machine) takeLog() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	log := m.log
	m.log = nil
	return log
}

var (
	alpha = gpreempt.ProcessKey{PID: 100, Start: 1}
	beta  = gpreempt.ProcessKey{PID: 101, Start: 1}
)

// newMachine has one offline target on GPU 1, which is suspended in 400us and
// resumed in 350us, and a policy without surprises.
func newMachine() *machine {
	m := &machine{start: time.Now(), suspend: 400 * time.Microsecond, resume: 350 * time.Microsecond}
	p, _ := PresetByName("strict")
	p.Linger, p.AttachAfter = 0, 0
	m.Runner = NewRunner(New(p, Limits{LeasesPerClient: 4, LeasesPerUser: 100, LeasesTotal: 100}), m, testutil.NewTimer(), m, func(r Record) { m.note("%v", r) })
	m.Post(GPUAdded{GPU: 1})
	m.see(alpha)
	m.takeLog()
	return m
}

// running starts Run and stops it at the end of the test.
func (m *machine) running(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx, time.Second, func() {}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
}

func request() LeaseRequested {
	return LeaseRequested{Client: ClientID{PID: 1}, GPUs: []gpreempt.GPUID{1}, Priority: 11, TTL: 100 * time.Millisecond, MaxWait: 20 * time.Millisecond}
}

// answered is what one announcement got, and when.
type answered struct {
	At     Time
	Lease  LeaseID
	Answer Answer
}

// announce announces and returns a channel with the answers.
func (m *machine) announce(t *testing.T, req LeaseRequested) (LeaseID, chan answered) {
	t.Helper()
	answers := make(chan answered, 10)
	id, _, err := m.Announce(req, func(id LeaseID, a Answer) { answers <- answered{m.Now(), id, a} })
	if err != nil {
		t.Fatal(err)
	}
	return id, answers
}

func expect(t *testing.T, answers chan answered, want ...answered) {
	t.Helper()
	synctest.Wait()
	var got []answered
	for len(answers) > 0 {
		got = append(got, <-answers)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("answers (-want +got):\n%s", diff)
	}
}

func reason(t *testing.T, err error, want gpreempt.Reason) {
	t.Helper()
	if got := gpreempt.ReasonOf(err); got != want {
		t.Errorf("error %v has reason %q, want %q", err, got, want)
	}
}

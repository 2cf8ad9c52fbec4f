package trial

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// What keeps a job from being suspended is one sentence that says what to do.
func TestJobThatIsNotSuspendedHasAReason(t *testing.T) {
	const offline = gpreemptv1.Class_CLASS_OFFLINE
	serving := &gpreemptv1.GetStatusResponse{Policy: "balanced", Mechanisms: []string{"dbgtrap"}}
	for want, tc := range map[string]struct {
		status *gpreemptv1.GetStatusResponse
		target *gpreemptv1.Target
	}{
		"the daemon is drained and suspends nothing: gpctl drain off": {
			&gpreemptv1.GetStatusResponse{Draining: true}, &gpreemptv1.Target{},
		},
		"the policy shadow suspends nothing: gpctl policy set balanced, or name another with --policy": {
			&gpreemptv1.GetStatusResponse{Policy: "shadow"}, &gpreemptv1.Target{Class: offline},
		},
		"train (7) is not suspended, because it is not offline (decided by rule chat): gpctl target classify 7 offline, or give it a rule in the daemon's config": {
			serving, &gpreemptv1.Target{Class: gpreemptv1.Class_CLASS_ONLINE, DecidedBy: "rule chat"},
		},
		"the daemon has no mechanism to suspend train (7): gpctl doctor says what is missing": {
			&gpreemptv1.GetStatusResponse{}, &gpreemptv1.Target{Class: offline},
		},
		"train (7) cannot be suspended: it called no RUNTIME_ENABLE: gpctl target explain 7 says what to do": {
			serving, &gpreemptv1.Target{Class: offline, AttachError: "it called no RUNTIME_ENABLE"},
		},
		"train (7) was not suspended within 15s while a lease was held: gpctl target explain 7 says more": {
			serving, &gpreemptv1.Target{Class: offline, Mechanism: "dbgtrap"},
		},
	} {
		tc.target.Comm, tc.target.Pid = "train", 7
		known, err := notSuspended(tc.status, tc.target)
		if diff := cmp.Diff(want, err.Error()); diff != "" || known == strings.Contains(want, "within 15s") {
			t.Errorf("known is %v (-want +got):\n%s", known, diff)
		}
	}
}

// After the requests of the plan, as many more are made at the same rate as more asks for.
func TestRequestsGoOnUntilThereAreEnough(t *testing.T) {
	for enough, want := range map[int]int{0: 4, 4: 4, 6: 6} {
		synctest.Test(t, func(t *testing.T) {
			s := &server{plan: &Plan{Online: Online{Hold: time.Millisecond}}}
			began := time.Now()
			var r evidence.Repeat
			var done atomic.Int64
			err := s.play(t.Context(), began, []time.Duration{0, 100 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond}, nil, &r,
				func() { done.Add(1) }, func(r *evidence.Repeat) bool { return len(r.Requests) < enough })
			var at []float64
			for _, q := range r.Requests {
				at = append(at, q.At)
			}
			if err != nil || int(done.Load()) != want || !slices.Equal(at, []float64{0, 100, 200, 300, 400, 500}[:want]) {
				t.Errorf("enough is %d: %v, %d done, at %v", enough, err, done.Load(), at)
			}
		})
	}
}

// The reason for the first request without a lease is kept.
func TestFirstRequestWithoutALeaseSaysWhy(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "none")
	c, err := client.Dial(socket, client.OnUnprotected(func(error) {}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s := &server{plan: &Plan{Online: Online{Hold: time.Millisecond}}}
	var r evidence.Repeat
	err = s.play(t.Context(), time.Now(), []time.Duration{0, 0}, announcer(c, []uint32{7}, 0), &r, func() {}, func(*evidence.Repeat) bool { return false })
	if err != nil || r.Unprotected != 2 || r.UnprotectedWhy == "" {
		t.Errorf("%v, %+v", err, r)
	}
}

// A line that nobody asked for is not the answer to the next request.
func TestStrayLineIsNoAnswer(t *testing.T) {
	s, err := startServer(&Plan{Online: Online{Command: `echo hello; read -r line; echo "answer 1"`, Request: RequestByLine}}, filepath.Join(t.TempDir(), "log"), os.Environ())
	if err != nil {
		t.Fatal(err)
	}
	defer s.stop(time.Second)
	s.answers <- <-s.answers // hello has come
	if line, err := s.askByLine(t.Context()); line != "answer 1" || err != nil {
		t.Errorf("%q, %v", line, err)
	}
}

func TestDaemonIsTheOneThatListens(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "socket")
	if pid := daemonPID(t.Context(), socket, readStats()); pid != 0 {
		t.Errorf("nobody listens, and the daemon is %d", pid)
	}
	listener, err := new(net.ListenConfig).Listen(context.Background(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if pid := daemonPID(t.Context(), socket, readStats()); pid != int32(syscall.Getpid()) {
		t.Errorf("the daemon is %d and not this process", pid)
	}
}

func TestSilentJobSaysWhatItWroteInstead(t *testing.T) {
	p := &progress{pattern: regexp.MustCompile(DefaultProgress)}
	if got := p.last("x"); p.seen() || got != "it wrote nothing, and x is looked for" {
		t.Errorf("%q", got)
	}
	p.line(time.Now(), "epoch 3, loss 0.1")
	if got := p.last("x"); p.seen() || got != `its last line is "epoch 3, loss 0.1", and x is looked for` {
		t.Errorf("%q", got)
	}
	p.line(time.Now(), "step 4")
	if !p.seen() {
		t.Error("a step is no progress")
	}
}

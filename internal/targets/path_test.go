package targets

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// trail is the goroutines that one piece of work passes through.
type trail struct {
	mu    sync.Mutex // guards the rest
	steps []string   // "GOROUTINE what"
	// armed: the next action is the first of the work; acting: it has begun.
	armed, acting bool
}

// act is called when an action may begin.
func (p *trail) act() {
	p.mu.Lock()
	begins := p.armed
	p.armed, p.acting = false, p.acting || begins
	p.mu.Unlock()
	if begins {
		p.pass("action")
	}
}

// pass adds the calling goroutine.
func (p *trail) pass(what string) {
	buf := make([]byte, 64)
	id := strings.Fields(string(buf[:runtime.Stack(buf, false)]))[1]
	p.mu.Lock()
	defer p.mu.Unlock()
	p.steps = append(p.steps, id+" "+what)
}

// handovers returns what was done by one goroutine after another.
func (p *trail) handovers() [][]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all [][]string
	last := ""
	for _, step := range p.steps {
		id, what, _ := strings.Cut(step, " ")
		if id != last {
			all = append(all, nil)
		}
		last = id
		all[len(all)-1] = append(all[len(all)-1], what)
	}
	return all
}

// sys is the driver, with the calls of an action on the trail.
type sys struct {
	kfd.Sys
	trail *trail
}

func (s sys) Ioctl(fd int, req kfd.Request, arg kfd.Pointer) (uintptr, error) {
	s.trail.mu.Lock()
	acting := s.trail.acting
	s.trail.mu.Unlock()
	if acting { // else the session looks at the events that follow Attach
		s.trail.pass("ioctl")
	}
	return s.Sys.Ioctl(fd, req, arg)
}

// lockedRunner counts what takes the scheduler's lock.
type lockedRunner struct {
	*scheduler.Runner
	trail *trail
}

func (r *lockedRunner) Post(ev scheduler.Event) {
	r.trail.pass(fmt.Sprintf("lock: %T", ev))
	r.Runner.Post(ev)
}

func (r *lockedRunner) Announce(req scheduler.LeaseRequested, reply scheduler.Reply) error {
	r.trail.pass("lock: Announce")
	_, _, err := r.Runner.Announce(req, reply)
	return err
}

// The path of docs/architecture.md, "From NotifyOnline to SUSPEND_QUEUES". Each line
// after the first is a hand-over.
func TestAnnouncementPassesTwoHandOversAndThreeWithATracer(t *testing.T) {
	for profile, want := range map[string][][]string{
		"7.2": {
			{"lock: Announce"},
			{"action", "ioctl", "ioctl", "lock: scheduler.Suspended", "reply"},
			{"answered"},
		},
		"6.12": {
			{"lock: Announce"},
			{"action"},
			{"ioctl", "ioctl", "lock: scheduler.Suspended", "reply"},
			{"answered"},
		},
	} {
		t.Run(profile, func(t *testing.T) {
			if diff := cmp.Diff(want, announcementPath(t, profile)); diff != "" {
				t.Errorf("path (-want +got):\n%s", diff)
			}
		})
	}
}

func announcementPath(t *testing.T, profile string) [][]string {
	t.Helper()
	const gpu gpreempt.GPUID = 1000
	path := &trail{}
	machine := kfdtest.New(kfdtest.Config{Profile: profile, Nodes: []driver.Node{{ID: gpu, GFX: 90402}}})
	device, err := kfd.OpenWith(sys{machine.Self().Main(), path}, kfd.DevicePath)
	if err != nil {
		t.Fatal(err)
	}
	p := machine.Spawn()
	key := gpreempt.ProcessKey{PID: p.PID(), Start: p.Start()}
	fd, err := p.Main().StartRuntime()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Main().CreateQueue(fd, gpu, kfd.QueueTypeComputeAQL); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	proc := filepath.Join(root, "proc", fmt.Sprint(p.PID()))
	if err := os.MkdirAll(proc, 0o755); err != nil {
		t.Fatal(err)
	}
	stat := fmt.Sprintf("%d (job) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0 0\n", p.PID(), p.Start())
	if err := os.WriteFile(filepath.Join(proc, "stat"), []byte(stat), 0o644); err != nil {
		t.Fatal(err)
	}
	runner := &lockedRunner{trail: path}
	attached := make(chan scheduler.Attached, 1)
	start := time.Now()
	sessions := NewSessions(Config{
		Mechanisms: []mechanism.Mechanism{dbgtrap.New(dbgtrap.Config{
			Device: device, Root: root,
			Attach: func(_ context.Context, pid int32, _ uint64) (dbgtrap.Thread, error) {
				thread, err := machine.Trace(pid)
				if err != nil {
					return nil, err
				}
				return thread, nil
			},
		})},
		Post: func(ev scheduler.Event) {
			runner.Post(ev)
			if ev, ok := ev.(scheduler.Attached); ok {
				attached <- ev
			}
		},
		Assess:     permitAll,
		Bystanders: func(gpreempt.ProcessKey) ([]gpreempt.GPUID, bool) { return nil, false },
		Look:       func(gpreempt.ProcessKey) {},
		Now: func() time.Duration {
			path.act()
			return time.Since(start)
		},
		Log: zap.NewNop(),
	})
	policy, err := scheduler.PresetByName("strict")
	policy.AttachAfter = 0
	if err != nil {
		t.Fatal(err)
	}
	core := scheduler.New(policy, scheduler.Limits{LeasesPerClient: 1, LeasesPerUser: 1, LeasesTotal: 1})
	runner.Runner = scheduler.NewRunner(core, clock{start}, testutil.NewTimer(), sessions, func(scheduler.Record) {})
	runner.Post(scheduler.GPUAdded{GPU: gpu})
	runner.Post(scheduler.TargetSeen{Target: key, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{gpu}, Queues: 1})
	if ev := testutil.Receive(t, attached, "a mechanism is attached"); ev.Result != "" {
		t.Fatalf("attach: %v", ev.Result)
	}
	path.mu.Lock()
	path.steps, path.armed = nil, true
	path.mu.Unlock()

	answers := make(chan scheduler.Answer, 1)
	err = runner.Announce(scheduler.LeaseRequested{
		Client: scheduler.ClientID{PID: 1}, GPUs: []gpreempt.GPUID{gpu}, Priority: gpreempt.PriorityHigh, TTL: time.Minute, MaxWait: 10 * time.Second,
	}, func(_ scheduler.LeaseID, a scheduler.Answer) {
		path.pass("reply")
		path.mu.Lock()
		path.acting = false
		path.mu.Unlock()
		answers <- a
	})
	if err != nil {
		t.Fatal(err)
	}
	if a := testutil.Receive(t, answers, "the answer"); !a.Quiesced {
		t.Fatalf("answer %+v", a)
	}
	path.pass("answered")
	steps := path.handovers()

	runner.Stop()
	if err := sessions.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := device.Close(); err != nil {
		t.Error(err)
	}
	return steps
}

type clock struct{ start time.Time }

func (c clock) Now() scheduler.Time { return time.Since(c.start) }

package events

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

var update = flag.Bool("update", false, "write the golden scrape and docs/reference/{metrics,warnings}.md")

// world is a scheduler and an event log, driven by hand in invented time.
type world struct {
	t    *testing.T
	core *scheduler.Core
	log  *Log
	now  scheduler.Time
	took time.Duration // what suspends and resumes take
	fail bool
}

func newWorld(t *testing.T) *world {
	t.Helper()
	p, err := scheduler.PresetByName("strict")
	if err != nil {
		t.Fatal(err)
	}
	p.Linger, p.ShareFloor, p.ShareWindow = 0, 0.5, 10*time.Second
	w := &world{t: t, core: scheduler.New(p, scheduler.Limits{LeasesPerClient: 10, LeasesPerUser: 10, LeasesTotal: 10}), log: NewLog(8)}
	for id := range gpreempt.GPUID(2) {
		w.step(scheduler.GPUAdded{GPU: id + 1})
	}
	return w
}

// step does what the runner, the daemon's record and an executor do.
func (w *world) step(ev scheduler.Event) {
	todo := slices.Clone(w.core.Step(w.now, ev))
	for len(todo) > 0 {
		a := todo[0]
		todo = todo[1:]
		var result scheduler.Event
		switch a.Kind {
		case scheduler.ActRecord:
			w.log.Append(time.Time{}, a.Record, "dbgtrap")
			continue
		case scheduler.ActAnswer:
			w.log.Answered(a.Answer, Stages{Decide: 15 * time.Microsecond, Reply: 30 * time.Microsecond})
			continue
		case scheduler.ActAttach:
			result = scheduler.Attached{Target: a.Target}
			todo = append(todo, w.core.Step(w.now, result)...)
			continue
		case scheduler.ActDetach:
			result = scheduler.Detached{Target: a.Target, Took: w.took}
		case scheduler.ActSuspend:
			outcome := scheduler.Cause("")
			if w.fail {
				outcome = scheduler.CauseFailed
			}
			result = scheduler.Suspended{Target: a.Target, Seq: a.Seq, Result: outcome, Took: w.took}
		case scheduler.ActResume:
			result = scheduler.Resumed{Target: a.Target, Seq: a.Seq, Took: w.took}
		}
		w.now += w.took
		todo = append(todo, w.core.Step(w.now, result)...)
	}
}

func (w *world) after(d time.Duration, ev scheduler.Event) {
	w.now += d
	w.step(ev)
}

func (w *world) snapshot() MetricsSnapshot {
	s := MetricsSnapshot{
		Version: "v1.2.3", Backend: "simulated mi300x", Mechanisms: []string{"dbgtrap", "criu"}, Log: w.log, Now: w.now,
		GPUs:   []gpreempt.GPU{{ID: 1, Name: "gfx942", BDF: "0000:05:00.0"}, {ID: 2, Name: "gfx942", BDF: "0000:06:00.0"}},
		States: w.core.GPUs(), Leases: w.core.Leases(), Floor: w.core.Policy().ShareFloor, Cap: w.core.Policy().ShareCap, FloorUse: w.core.FloorUse(), Jobs: w.core.Jobs(), Draining: w.core.Draining(),
		Sources:     []inventory.Source{{Name: "sysfs", Available: true, Readings: 7, Spent: 3500 * time.Microsecond}, {Name: "mqds"}},
		DriverCalls: 12, DriverTime: 4800 * time.Microsecond,
		Processes: 3, Queues: map[gpreempt.GPUID]int{1: 4}, Used: map[gpreempt.GPUID]inventory.Occupancy{1: {Slots: 24, Mapped: 3, Offline: 2}},
		Warnings: []gpreempt.Warning{gpreempt.WarnDebugfsDenied.Warn("here"), gpreempt.WarnContainerRuntime.Warn("a"), gpreempt.WarnContainerRuntime.Warn("b")},
	}
	for _, t := range w.core.Targets() {
		mechanism := "dbgtrap"
		if !t.Ready {
			mechanism = ""
		}
		s.Targets = append(s.Targets, Target{t.Class, t.State, mechanism})
	}
	return s
}

func job(pid int32) gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: pid, Start: 1} }

// history is what the golden scrape is of: two leases that suspend, one that expires,
// a suspend that fails, an alarm, a refusal.
func history(t *testing.T) *world {
	w := newWorld(t)
	w.took = 1500 * time.Microsecond
	for pid, gpu := range []gpreempt.GPUID{1, 2} {
		w.step(scheduler.TargetSeen{Target: job(int32(pid + 1)), Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{gpu}, Queues: 1, Job: []string{"torch-1", ""}[pid]})
	}
	w.step(scheduler.TargetSeen{Target: job(9), Class: gpreempt.Online, Priority: 11, GPUs: []gpreempt.GPUID{1}, Queues: 1})
	lease := func(id scheduler.LeaseID, gpus ...gpreempt.GPUID) scheduler.LeaseRequested {
		return scheduler.LeaseRequested{Lease: id, Client: scheduler.ClientID{PID: 1}, GPUs: gpus, Priority: 11, TTL: time.Second, MaxWait: 100 * time.Millisecond}
	}
	w.after(time.Second, lease(1, 1))
	w.after(40*time.Millisecond, scheduler.LeaseFinished{Lease: 1, End: scheduler.EndCompleted})
	w.after(time.Second, lease(2, 1, 2))
	w.after(time.Second, scheduler.Tick{})
	w.after(time.Second, scheduler.Alarm{GPU: 2})
	w.fail = true
	w.after(time.Second, lease(3, 1))
	w.fail = false
	w.log.Refused(gpreempt.ReasonRateLimited)
	w.after(100*time.Millisecond, scheduler.TargetGone{Target: job(2)})
	return w
}

func scrape(t *testing.T, s MetricsSnapshot) string {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(NewCollector(func() MetricsSnapshot { return s })); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
			t.Fatal(err)
		}
	}
	return text.String()
}

func compareWithFile(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got); go test ./internal/events -update writes it:\n%s", path, diff)
	}
}

func TestScrapeOfAScriptedHistory(t *testing.T) {
	got := scrape(t, history(t).snapshot())
	compareWithFile(t, "testdata/scrape.txt", goVersion.ReplaceAllString(got, `goversion="go"`))
	problems, err := promlint.New(bytes.NewReader([]byte(got))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("promlint: %s: %s", p.Metric, p.Text)
	}
}

func TestEveryMetricOfTheTableIsServed(t *testing.T) {
	got := scrape(t, history(t).snapshot())
	for _, m := range table {
		if !strings.Contains(got, "\n# TYPE "+m.name+" ") {
			t.Errorf("%s is in the table and not in the scrape", m.name)
		}
		if m.help == "" || uses[m.name] == "" || !strings.HasSuffix(m.help, ".") || !strings.HasSuffix(uses[m.name], ".") {
			t.Errorf("%s has no help, or no use, that is a sentence", m.name)
		}
	}
}

// series returns their names and labels, as Prometheus stores them.
func series(scrape string) (all []string) {
	for line := range strings.Lines(scrape) {
		if !strings.HasPrefix(line, "#") {
			all = append(all, line[:strings.LastIndexByte(line, ' ')])
		}
	}
	return all
}

func TestNeitherClientsNorJobsNorTimeMakeSeries(t *testing.T) {
	w := history(t)
	s := w.snapshot()
	few := scrape(t, s)
	for i := range 1000 {
		s.Leases = append(s.Leases, scheduler.LeaseInfo{ID: scheduler.LeaseID(100 + i), Client: scheduler.ClientID{PID: int32(i)}, State: scheduler.LeaseHeld})
		s.Targets = append(s.Targets, s.Targets...)[:min(2*len(s.Targets), 5000)]
		s.Warnings = append(s.Warnings, gpreempt.WarnOrphanedPause.Warn(fmt.Sprintf("process %d", i)))
		s.Processes++
	}
	for i := range int32(1000) {
		w.step(scheduler.TargetSeen{Target: job(1000 + i), Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{1}, Queues: 1})
		w.after(time.Second, scheduler.TargetGone{Target: job(1000 + i)})
	}
	s.Now = w.now
	if diff := cmp.Diff(series(few), series(scrape(t, s))); diff != "" {
		t.Errorf("series, and those with a thousand clients, jobs and warnings more (-few +many):\n%s", diff)
	}
}

func TestSeriesOfAHostAreBounded(t *testing.T) {
	s := history(t).snapshot()
	s.GPUs, s.States, s.Targets = nil, nil, nil
	t.Log("without GPUs:", len(series(scrape(t, s))))
	for id := range gpreempt.GPUID(8) {
		s.GPUs = append(s.GPUs, gpreempt.GPU{ID: id + 1, Name: "gfx942", BDF: "0000:05:00.0"})
		s.States = append(s.States, scheduler.GPUInfo{ID: id + 1})
	}
	for class := gpreempt.Unmanaged; class <= gpreempt.Offline; class++ {
		for state := scheduler.TargetRunning; state < scheduler.TargetLeft; state++ {
			for _, mechanism := range []string{"", "dbgtrap", "criu", "freezer"} {
				s.Targets = append(s.Targets, Target{class, state, mechanism})
			}
		}
	}
	causes := []scheduler.Cause{
		scheduler.CauseLeaseEnded, scheduler.CauseLingerOver, scheduler.CauseShareFloor, scheduler.CauseMaxSuspend, scheduler.CauseClass,
		scheduler.CauseHold, scheduler.CausePolicy, scheduler.CauseDrain, scheduler.CauseBreaker, scheduler.CausePinOver, scheduler.CauseFailed,
		scheduler.CauseHardware, scheduler.CauseNotReady, scheduler.CauseNoLease, scheduler.CauseQuarantine,
		scheduler.CauseHQDBusy, scheduler.CauseHQDRoom, scheduler.CauseShareCapOver,
	}
	for _, c := range causes {
		s.Log.counters.resumes.of(string(c))
	}
	const most = 500
	if n := len(series(scrape(t, s))); n > most {
		t.Errorf("a host with 8 GPUs and targets in every state has %d series, want at most %d", n, most)
	} else {
		t.Log("with 8 GPUs and targets in every state:", n)
	}
}

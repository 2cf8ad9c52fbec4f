package accept

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/accept/workload"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// model is a process with work and a debugger of it, in fake time.
type model struct {
	pid       int32
	mu        sync.Mutex // guards what the methods change
	held      bool
	began     time.Time
	stood     time.Duration // while it was suspended
	suspended time.Time
	paused    time.Duration // the longest time that it was suspended since the last reply
	wrong     uint64
	corrupt   uint64

	// What is broken.
	dead         bool   // it makes no progress
	ignores      bool   // SUSPEND and RESUME have no effect
	keeps        bool   // RESUME has no effect
	keepsOne     bool   // or on one of two queues only
	gapless      bool   // its gaps are not measured
	loses        uint64 // SUSPEND damages as many values
	blind        bool   // checksums notice nothing
	suspendError error
	otherFault   bool      // a held process has another fault
	noFault      bool      // and none has one
	allFaults    bool      // mapped memory is a fault, too
	trapsAlways  bool      // llvm.debugtrap runs a handler without one
	trapsNever   bool      // or none with one
	trapsOn      bool      // a released process is still debugged
	drags        *[]*model // SUSPEND suspends all of these
	stops        *[]*model // or stops them for twice mostLatency
}

// mortal is a session in another process: the kernel resumes the job at its death.
type mortal struct{ *model }

func (m mortal) Kill() error { return m.Resume(context.Background()) }

const beat = 10 * time.Microsecond

func (m *model) Key() gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: m.pid} }
func (m *model) Kill() error              { return nil }
func (m *model) End() error               { return nil }

func (m *model) Close() error {
	m.mu.Lock()
	m.held = m.trapsOn
	m.mu.Unlock()
	return m.Resume(context.Background())
}

func (m *model) beats() uint64 {
	now := time.Now()
	if !m.suspended.IsZero() {
		now = m.suspended
	}
	if m.dead {
		now = m.began.Add(m.stood)
	}
	return uint64((now.Sub(m.began) - m.stood) / beat)
}

func (m *model) Ask(_ context.Context, command string) (workload.Reply, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	beats := m.beats()
	r := workload.Reply{Beats: 2 * beats, Each: []uint64{beats, beats}, Pending: 1, Gap: beat, Wrong: m.wrong}
	if m.keepsOne && m.stood > 0 {
		r.Each[0] = 1
		r.Beats = beats + 1
	}
	if !m.gapless {
		r.Gap = max(beat, m.paused)
	}
	m.paused = 0
	switch {
	case command == "touch unmapped" && !m.noFault || command == "touch mapped" && m.allFaults:
		r.Fault = "not present"
		if m.otherFault && m.held {
			r.Fault = "imprecise"
		}
	case strings.HasPrefix(command, "debugtrap"):
		r.Trapped = 4
		if command == "debugtrap own" && !m.trapsNever || m.trapsAlways {
			r.Trapped |= 1
			if m.held {
				r.Trapped |= 2
			}
		}
	case command == "corrupt":
		m.corrupt++
	case m.corrupt > 0 && strings.HasPrefix(command, "verify") || command == "beats":
		if !m.blind {
			m.wrong += m.corrupt
			r.Wrong = m.wrong
		}
		m.corrupt = 0
	}
	return r, nil
}

func (*model) Events() <-chan struct{} { return nil }

func (*model) Handle(context.Context) (r mechanism.Report, err error) { return r, nil }

func (m *model) Suspend(context.Context, func()) error {
	if m.stops != nil {
		time.Sleep(2 * mostLatency)
		for _, other := range *m.stops {
			if other != m && other.suspended.IsZero() {
				other.stood += 2 * mostLatency
				other.paused = 2 * mostLatency
			}
		}
	}
	if m.drags != nil {
		for _, other := range *m.drags {
			if other != m && other.suspended.IsZero() {
				other.suspended = time.Now()
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wrong += m.loses
	if m.suspendError != nil {
		return m.suspendError
	}
	if !m.ignores && m.suspended.IsZero() {
		m.suspended = time.Now()
	}
	return nil
}

func (m *model) Resume(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.keeps && !m.suspended.IsZero() {
		m.stood += time.Since(m.suspended)
		m.paused = max(m.paused, time.Since(m.suspended))
		m.suspended = time.Time{}
	}
	return nil
}

// newModel returns a bench of models on a machine, whose report is in a new directory.
func newModel(t *testing.T, machine string, broken func(*model)) *bench {
	t.Helper()
	b := &bench{cfg: Config{Quick: true, Log: &bytes.Buffer{}, Root: fstest.MapFS{}}, gpu: gpreempt.GPU{ID: 7, GFX: 90402, CUs: 1}, dmesg: func() []byte { return nil }}
	b.gpu.BDF = "0000:0a:00.0"
	b.gpus = []gpreempt.GPU{b.gpu, {ID: 8, BDF: "0000:0a:00.1"}, {ID: 9, BDF: "0000:0b:00.0"}}
	b.out = writer{path: filepath.Join(t.TempDir(), "report.tgz"), files: map[string][]byte{}, report: Report{Machine: machine, GPU: 7, Quick: true}}
	jobs := map[gpreempt.ProcessKey]*model{}
	b.start = func(context.Context, workload.Config) (job, error) {
		m := &model{began: time.Now(), pid: int32(len(jobs) + 1)}
		if broken != nil {
			broken(m)
		}
		jobs[m.Key()] = m
		return m, nil
	}
	b.attach = func(_ context.Context, key gpreempt.ProcessKey) (mechanism.Session, error) {
		m := jobs[key]
		m.mu.Lock()
		defer m.mu.Unlock()
		m.held = true
		return m, nil
	}
	b.attachWith = func(uint32) attach { return b.attach }
	b.attachElsewhere = func(_ context.Context, key gpreempt.ProcessKey) (elsewhere, error) { return mortal{jobs[key]}, nil }
	return b
}

// report reads the report back.
func (b *bench) read(t *testing.T) Report {
	t.Helper()
	f, err := os.Open(b.out.path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := Verify(f)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// silent is a kernel log without an alarm.
func silent(ctx context.Context, _ func(safety.Alarm)) error {
	<-ctx.Done()
	return nil
}

// named returns the stages with names.
func named(names ...string) []stage {
	return slices.DeleteFunc(stages(), func(s stage) bool { return !slices.Contains(names, s.name) })
}

func TestStagesPassOnlyWhenEveryCheckAndEveryControlHolds(t *testing.T) {
	for _, c := range []struct {
		name, stage string
		broken      func(*model)
		why         string // "" passes
	}{
		{"sound", "heartbeat", nil, ""},
		{"SUSPEND has no effect", "heartbeat", func(m *model) { m.ignores = true }, "went on after SUSPEND"},
		{"RESUME has no effect", "heartbeat", func(m *model) { m.keeps = true }, "no progress within"},
		{"RESUME has no effect on one of two queues", "heartbeat", func(m *model) { m.keepsOne = true }, "after RESUME: no progress within"},
		{"SUSPEND fails", "heartbeat", func(m *model) { m.suspendError = errors.New("EIO") }, "SUSPEND: EIO"},
		{"no heartbeat to lose", "heartbeat", func(m *model) { m.dead = true }, "the check cannot fail"},
		{"sound", "endless-kernel", nil, ""},
		{"sound", "attach", nil, ""},
		{"no progress after DISABLE", "attach", func(m *model) { m.dead = true }, "no progress within"},
		{"sound", "copies", nil, ""},
		{"SUSPEND damages copies", "copies", func(m *model) { m.loses = 1 }, "wrong checksum"},
		{"checksums notice nothing", "copies", func(m *model) { m.blind = true }, "the check cannot fail"},
		{"sound", "waves-vgpr", nil, ""},
		{"checksums notice nothing", "waves-lds", func(m *model) { m.blind = true }, "the check cannot fail"},
		{"sound", "latency", nil, ""},
		{"SUSPEND fails", "latency", func(m *model) { m.suspendError = errors.New("EIO") }, "1 queue: SUSPEND: EIO"},
		{"sound", "online-gap", nil, ""},
		{"gaps are not measured", "online-gap", func(m *model) { m.gapless = true }, "the check cannot fail: the process was suspended for 50ms"},
		{"each cycle stops the other process for long", "online-gap", func() func(*model) {
			var all []*model
			return func(m *model) { all, m.stops = append(all, m), &all }
		}(), "99th percentile"},
		{"sound", "birth", nil, ""},
		{"the new queue runs", "birth", func(m *model) { m.ignores = true }, "went on after SUSPEND"},
		{"sound", "destroy", nil, ""},
		{"sound", "register", nil, ""},
		{"the others stop", "register", func(m *model) { m.keeps = true }, "no progress within"},
		{"sound", "grace", nil, ""},
		{"SUSPEND fails", "grace", func(m *model) { m.suspendError = errors.New("EIO") }, "EIO"},
		{"sound", "holder-killed", nil, ""},
		{"the job stays suspended", "holder-killed", func(m *model) { m.keeps = true }, "after the death: no progress within"},
		{"SUSPEND has no effect", "holder-killed", func(m *model) { m.ignores = true }, "went on after SUSPEND"},
		{"its holder cannot suspend", "holder-killed", func(m *model) { m.suspendError = errors.New("EIO") }, "SUSPEND: EIO"},
		{"sound", "scratch", nil, ""},
		{"a cycle damages it", "scratch", func(m *model) { m.loses = 1 }, "lanes are wrong"},
		{"checksums notice nothing", "scratch", func(m *model) { m.blind = true }, "the check cannot fail"},
		{"sound", "cooperative", nil, ""},
		{"SUSPEND fails", "cooperative", func(m *model) { m.suspendError = errors.New("EIO") }, "EIO"},
		{"checksums notice nothing", "cooperative", func(m *model) { m.blind = true }, "the check cannot fail"},
		{"sound", "debugtrap", nil, ""},
		{"a handler runs without one", "debugtrap", func(m *model) { m.trapsAlways = true }, "the check cannot fail: without a trap handler"},
		{"it stays debugged", "debugtrap", func(m *model) { m.trapsOn = true }, "does not do after the release"},
		{"sound", "faults", nil, ""},
		{"held processes have other faults", "faults", func(m *model) { m.otherFault = true }, `held: the fault is "imprecise"`},
		{"no faults", "faults", func(m *model) { m.noFault = true }, "not held: the driver reports no fault"},
		{"everything is a fault", "faults", func(m *model) { m.allFaults = true }, "the check cannot fail: a read of mapped memory"},
		{"SUSPEND fails after a fault", "faults", func(m *model) { m.suspendError = errors.New("EIO") }, "held: EIO"},
		{"sound", "cpx", nil, ""},
		{"the neighbour stops, too", "cpx", func() func(*model) {
			var all []*model
			return func(m *model) { all, m.drags = append(all, m), &all }
		}(), "the neighbour: no progress within"},
		{"SUSPEND has no effect", "cpx", func(m *model) { m.ignores = true }, "the check cannot fail: the neighbour went on"},
	} {
		t.Run(c.stage+", "+c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newModel(t, hardware, c.broken)
				verdict, err := b.run(t.Context(), named(c.stage), silent)
				if err != nil {
					t.Fatal(err)
				}
				row := b.read(t).Rows[0]
				if c.why == "" && (verdict != Pass || row.Verdict != Pass) {
					t.Errorf("%s: %+v", verdict, row)
				}
				if c.why != "" && (verdict != Fail || !strings.Contains(row.Why, c.why)) {
					t.Errorf("%s: %+v, want a failure with %q", verdict, row, c.why)
				}
			})
		})
	}
}

func TestStagesThatTheHostCannotRunSayWhy(t *testing.T) {
	for _, c := range []struct {
		name, stage string
		change      func(*bench)
		why         string
	}{
		{"no trap handler", "debugtrap", func(b *bench) {
			start := b.start
			b.start = func(ctx context.Context, cfg workload.Config) (job, error) {
				j, err := start(ctx, cfg)
				j.(*model).trapsNever = true
				return j, err
			}
		}, "runs no trap handler"},
		{"no partitions", "cpx", func(b *bench) { b.gpus = b.gpus[2:] }, "offers no partitions"},
		{"one partition", "cpx", func(b *bench) {
			b.gpus = b.gpus[2:]
			b.cfg.Root = fstest.MapFS{"sys/class/drm/renderD0/device/current_compute_partition": &fstest.MapFile{Data: []byte("SPX\n")}}
		}, "in mode SPX: write CPX"},
		{"an emulated GPU", "scratch", func(b *bench) { b.out.report.Machine = "emulated mi300x" }, "this is emulated mi300x"},
		{"another GPU", "faults", func(b *bench) { b.gpu.GFX = 110000 }, "no code object for gfx1100"},
		{"no profiler", "profiler", func(*bench) { t.Setenv("PATH", t.TempDir()) }, "no rocprofv3 on PATH"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newModel(t, hardware, nil)
			c.change(b)
			if _, err := b.run(t.Context(), named(c.stage), silent); err != nil {
				t.Fatal(err)
			}
			if row := b.read(t).Rows[0]; row.Verdict != NotRun || !strings.Contains(row.Why, c.why) {
				t.Errorf("%+v, want %s with %q", row, NotRun, c.why)
			}
		})
	}
}

func TestLatencyAboveTheCriteriaFailsOnHardwareOnly(t *testing.T) {
	slow := measure("SUSPEND", "", [][]float64{slices.Repeat([]float64{float64(mostLatency.Microseconds()) + 1}, 10)})
	on := func(machine string) error {
		b := newModel(t, machine, nil)
		return (&result{b: b}).judge(slow)
	}
	if on(hardware) == nil || on("emulated mi300x") != nil {
		t.Errorf("hardware: %v, emulated: %v; want an error for the first only", on(hardware), on("emulated mi300x"))
	}
}

func TestNothingPassesWithoutHardware(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newModel(t, "emulated mi300x", nil)
		verdict, err := b.run(t.Context(), named("heartbeat", "waves-vgpr", "copies", "pytorch"), silent)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]Verdict{"all": verdict}
		for _, row := range b.read(t).Rows {
			got[row.Stage] = row.Verdict
			if row.Verdict == NotRun && row.Why == "" {
				t.Errorf("%s did not run for no reason", row.Stage)
			}
		}
		want := map[string]Verdict{"all": Emulated, "heartbeat": Emulated, "waves-vgpr": NotRun, "copies": Emulated, "pytorch": NotRun}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("verdicts (-want +got):\n%s", diff)
		}
		if text := b.out.report.text(); strings.Contains(text, string(Pass)) || !strings.Contains(text, "No hardware was involved") {
			t.Errorf("the report says:\n%s", text)
		}
	})
}

// An alarm that is doubted does not.
func TestAlarmStopsTheAcceptance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newModel(t, hardware, nil)
		verdict, err := b.run(t.Context(), named("heartbeat", "copies"), func(ctx context.Context, alarm func(safety.Alarm)) error {
			alarm(safety.Alarm{GPU: 7, Pattern: "ras-uncorrectable", Line: "uncorrectable hardware errors", Doubt: "owner/name#1"})
			select {
			case <-time.After(50 * time.Millisecond):
				alarm(safety.Alarm{GPU: 7, Pattern: "ring-timeout", Line: "ring gfx timeout"})
			case <-ctx.Done():
			}
			<-ctx.Done()
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		rows := b.read(t).Rows
		if verdict != Fail || rows[0].Verdict != Fail || !strings.Contains(rows[0].Why, "ring gfx timeout") {
			t.Errorf("%s: %+v", verdict, rows[0])
		}
		if rows[1].Verdict != NotRun || !strings.Contains(rows[1].Why, "ring gfx timeout") {
			t.Errorf("after the alarm: %+v", rows[1])
		}
	})
}

func TestHardwareNeedsAKernelLogToStopBy(t *testing.T) {
	for machine, want := range map[string]Verdict{hardware: NotRun, "emulated mi300x": Emulated} {
		synctest.Test(t, func(t *testing.T) {
			b := newModel(t, machine, nil)
			stages := append(named("heartbeat"), stage{name: "waits", limit: time.Second, run: func(context.Context, *result) error {
				synctest.Wait()
				return nil
			}})
			_, err := b.run(t.Context(), append(stages, named("copies")...), func(context.Context, func(safety.Alarm)) error {
				return errors.New("watch the kernel log: no CAP_SYSLOG")
			})
			if err != nil {
				t.Fatal(err)
			}
			row := b.read(t).Rows[2]
			if row.Verdict != want || want == NotRun && !strings.Contains(row.Why, "no CAP_SYSLOG") {
				t.Errorf("%s: %+v, want %s", machine, row, want)
			}
		})
	}
}

func TestReportIsCompleteWheneverAStageEndsTheProgram(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newModel(t, hardware, nil)
		var during Report
		stages := append(named("heartbeat"), stage{name: "harsh", limit: time.Second, run: func(context.Context, *result) error {
			during = b.read(t) // what a reset here would leave
			return nil
		}}, stage{name: "last", limit: time.Second, run: func(context.Context, *result) error { return nil }})
		if _, err := b.run(t.Context(), stages, silent); err != nil {
			t.Fatal(err)
		}
		var got []Verdict
		for _, row := range during.Rows {
			got = append(got, row.Verdict)
		}
		if diff := cmp.Diff([]Verdict{Pass, Interrupted, NotRun}, got); diff != "" || during.Verdict != Interrupted {
			t.Errorf("during the stage: %s (-want +got):\n%s", during.Verdict, diff)
		}
	})
}

func TestStageThatHangsIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newModel(t, hardware, nil)
		forever := make(chan struct{})
		hanging := stage{name: "hanging", limit: time.Second, run: func(context.Context, *result) error { <-forever; return nil }}
		verdict, err := b.run(t.Context(), append([]stage{hanging}, named("heartbeat")...), silent)
		close(forever)
		if err != nil {
			t.Fatal(err)
		}
		rows := b.read(t).Rows
		if verdict != Fail || !strings.Contains(rows[0].Why, "hangs") || rows[1].Verdict != NotRun {
			t.Errorf("%s: %+v", verdict, rows)
		}
	})
}

func TestChangedReportIsNoticed(t *testing.T) {
	files := map[string][]byte{"report.json": []byte("{}"), "a": []byte("the samples")}
	whole, err := pack(files, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Verify(bytes.NewReader(whole)); err != nil {
		t.Error("unchanged: ", err)
	}
	if _, err := Verify(bytes.NewReader(whole[:len(whole)/2])); err == nil {
		t.Error("half a report is accepted")
	}
	var text bytes.Buffer
	zip, err := gzip.NewReader(bytes.NewReader(whole))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := text.ReadFrom(zip); err != nil {
		t.Fatal(err)
	}
	var changed bytes.Buffer
	out := gzip.NewWriter(&changed)
	if _, err := out.Write(bytes.Replace(text.Bytes(), []byte("the samples"), []byte("new samples"), 1)); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Verify(&changed); err == nil || !strings.Contains(err.Error(), "MANIFEST") {
		t.Errorf("a report with other samples: %v", err)
	}
}

func TestMeasureHasTheSpreadOfRepeats(t *testing.T) {
	got := measure("x", "f", [][]float64{{1, 2, 3}, {4, 5, 6}, {}})
	want := Measure{Name: "x", File: "f", N: 6, Repeats: 2, Min: 1, P50: 4, P99: 6, Max: 6, Spread: 3}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

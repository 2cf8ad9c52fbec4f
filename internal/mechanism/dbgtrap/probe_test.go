package dbgtrap

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// write puts a file under the root.
func (f *fixture) write(path, text string) {
	f.t.Helper()
	path = filepath.Join(f.root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		f.t.Fatal(err)
	}
}

// healthy makes a host on which nothing prevents the use of dbgtrap.
func healthy(t *testing.T) (*fixture, *job) {
	t.Helper()
	f := newFixture(t, "6.12", schedulers["HWS"])
	j := f.start()
	f.write("proc/"+strconv.Itoa(int(j.PID()))+"/status", status("job", 1, 0))
	f.cfg.GPUs = func(gpreempt.ProcessKey) []gpreempt.GPU {
		return []gpreempt.GPU{{ID: gpuA, Name: "gfx942", GFX: 90402, DebugFirmware: true}}
	}
	return f, j
}

func TestProbeTellsWhatSpeaksForIt(t *testing.T) {
	f, j := healthy(t)
	before := len(f.machine.Calls())
	got := f.Probe(t.Context(), j.key())
	want := mechanism.Capability{ReportsBirths: true, Evidence: []mechanism.Evidence{
		{Check: "process", Found: "it lives", OK: true},
		{Check: "debug firmware", Found: "on all its GPUs", OK: true},
		{Check: "tracer", Found: "none", OK: true},
	}}
	diff(t, "capability", want, got)
	if !got.Usable() {
		t.Error("it is not usable")
	}
	diff(t, "calls to the driver", before, len(f.machine.Calls()))
}

func TestProbeNamesWhatStandsInTheWay(t *testing.T) {
	gpus := func(gpus ...gpreempt.GPU) func(gpreempt.ProcessKey) []gpreempt.GPU {
		return func(gpreempt.ProcessKey) []gpreempt.GPU { return gpus }
	}
	for name, tc := range map[string]struct {
		change func(*fixture, *job)
		want   mechanism.Evidence
	}{
		"dead": {
			func(_ *fixture, j *job) { j.kill() },
			mechanism.Evidence{Check: "process", Found: "it has exited"},
		},
		"firmware": {
			func(f *fixture, _ *job) {
				f.cfg.GPUs = gpus(gpreempt.GPU{ID: gpuA, Name: "gfx1010", GFX: 100100}, gpreempt.GPU{ID: gpuB, DebugFirmware: true})
			},
			mechanism.Evidence{
				Check: "debug firmware", Found: "none on GPU 1000 (gfx1010)",
				Remedy: "update the GPU firmware (linux-firmware, or AMD's package), or let another mechanism hold the process",
			},
		},
		"tracer": {
			func(f *fixture, j *job) {
				f.write("proc/"+strconv.Itoa(int(j.PID()))+"/status", status("job", 1, 77))
				f.write("proc/77/status", status("rocgdb", 70, 0))
			},
			mechanism.Evidence{
				Check: "tracer", Found: "process 70 (rocgdb) traces it", Reason: gpreempt.ReasonResisted,
				Remedy: "end that debugger or tracer; a process has one at a time",
			},
		},
		"tracer without a name": {
			func(f *fixture, j *job) {
				f.write("proc/"+strconv.Itoa(int(j.PID()))+"/status", status("job", 1, 77))
			},
			mechanism.Evidence{
				Check: "tracer", Found: "process 77 (unknown) traces it", Reason: gpreempt.ReasonResisted,
				Remedy: "end that debugger or tracer; a process has one at a time",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, j := healthy(t)
			tc.change(f, j)
			got := f.Probe(t.Context(), j.key())
			if got.Usable() {
				t.Error("it is usable")
			}
			var blocking []mechanism.Evidence
			for _, e := range got.Evidence {
				if !e.OK {
					blocking = append(blocking, e)
				}
			}
			diff(t, "evidence", []mechanism.Evidence{tc.want}, blocking)
		})
	}
}

func TestProbeTakesWhatItCannotTellForNoObstacle(t *testing.T) {
	f := newFixture(t, "6.12", schedulers["HWS"])
	j := f.start()
	got := f.Probe(t.Context(), j.key())
	if !got.Usable() {
		t.Errorf("not usable: %s", got.Why())
	}
}

func TestProcessThisDaemonTracesIsNoObstacle(t *testing.T) {
	f, j := healthy(t)
	f.write("proc/"+strconv.Itoa(int(j.PID()))+"/status", status("job", 1, 77))
	f.write("proc/77/status", status("gpreemptd", os.Getpid(), 0))
	if got := f.Probe(t.Context(), j.key()); !got.Usable() {
		t.Errorf("not usable: %s", got.Why())
	}
}

// status is what /proc/PID/status has of a process that can do everything.
func status(name string, process int, tracer int32) string {
	return fmt.Sprintf("Name:\t%s\nTgid:\t%d\nTracerPid:\t%d\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n", name, process, tracer)
}

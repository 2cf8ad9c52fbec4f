package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// figuresFile has the figures of one run of the tests.
const figuresFile = "../../build/e2e.json"

// figures are the measurements of this run, by subject.
var figures struct {
	mu    sync.Mutex
	about map[string]figure
}

// figure is something that was measured on an emulated machine: it says nothing about a
// real GPU.
type figure struct {
	Emulated bool `json:"emulated"`
	// RaceDetector tells that gpreemptd was built with it, which makes it slow.
	RaceDetector bool      `json:"race_detector"`
	Taken        time.Time `json:"taken"`
	Figure       any       `json:"figure"`
}

// tellFigures writes figures down, with all of this run so far.
func tellFigures(t *testing.T, about string, race bool, what any) {
	t.Helper()
	figures.mu.Lock()
	defer figures.mu.Unlock()
	if figures.about == nil {
		figures.about = map[string]figure{}
	}
	figures.about[about] = figure{Emulated: true, RaceDetector: race, Taken: time.Now().UTC(), Figure: what}
	text, err := json.MarshalIndent(figures.about, "", "  ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(figuresFile), 0o755)
	}
	if err == nil {
		err = os.WriteFile(figuresFile, append(text, '\n'), 0o600)
	}
	if err != nil {
		t.Errorf("write %s: %v", figuresFile, err)
	}
}

// spread is how times are spread, in microseconds.
type spread struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`
	Max float64 `json:"max_us"`
}

func spreadOf(all []time.Duration) spread {
	if len(all) == 0 {
		return spread{}
	}
	sorted := slices.Sorted(slices.Values(all))
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
	return spread{len(sorted), us(stat.Quantile(sorted, 0.5)), us(stat.Quantile(sorted, 0.99)), us(sorted[len(sorted)-1])}
}

// measured is a machine in a process of its own.
type measured struct {
	t       *testing.T
	socket  string
	machine *exec.Cmd
	stop    func()
}

// measure starts one.
func measure(t *testing.T) *measured {
	t.Helper()
	if reason := cannotEmulate(); reason != "" {
		t.Skip(reason)
	}
	m := &measured{t: t}
	m.machine = exec.Command(kfdemuBinary, "run", "--", "sh", "-c", "echo $KFDEMU_SOCKET; exec cat")
	m.machine.Env, m.machine.Stderr = environment(), os.Stderr
	in, err := m.machine.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := m.machine.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.machine.Start(); err != nil {
		t.Fatal(err)
	}
	m.stop = sync.OnceFunc(func() {
		_ = in.Close() // that ends it
		if err := m.machine.Wait(); err != nil {
			t.Errorf("the emulated machine: %v", err)
		}
	})
	t.Cleanup(m.stop)
	if _, err := fmt.Fscanln(out, &m.socket); err != nil {
		t.Fatal(err)
	}
	return m
}

// withoutDetector returns the path of gpreemptd as users have it.
func withoutDetector(t *testing.T) string {
	t.Helper()
	program, err := builtWithout()
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// builtWithout builds it, once, beside the other programs.
var builtWithout = sync.OnceValues(func() (program string, err error) {
	if !racing() {
		return gpreemptd, nil
	}
	dir := filepath.Join(filepath.Dir(gpreemptd), "without")
	return filepath.Join(dir, "gpreemptd"), goBuild("../..", dir, nil, "./cmd/gpreemptd")
})

// command is a program on the machine.
func (m *measured) command(program string, args ...string) *exec.Cmd {
	return exec.Command(kfdemuBinary, append([]string{"exec", "--socket", m.socket, "--", program}, args...)...)
}

// read runs a command as the meter and decodes its output.
func (m *measured) read(cmd *exec.Cmd, measurement string, answer any) {
	m.t.Helper()
	var out, errs bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = environment(meterEnv+"="+measurement), &out, &errs
	err := cmd.Run()
	if err == nil {
		err = json.Unmarshal(out.Bytes(), answer)
	}
	if err != nil {
		m.t.Fatalf("%v: %v; it wrote:\n%s%s", cmd.Args, err, &out, &errs)
	}
}

func TestFiguresOfACallOfTheDriver(t *testing.T) {
	lasts(t)
	m := measure(t)
	for _, threads := range []int{1, 4} {
		var took calls
		const n = 5000
		m.read(m.command(os.Args[0]), fmt.Sprintf("ioctl %d %d", threads, n), &took)
		tellFigures(t, fmt.Sprintf("intercepted ioctl GET_VERSION, %d threads", threads), raceDetector, struct {
			spread
			Rate float64 `json:"calls_per_second"`
		}{spreadOf(took.Each), float64(threads*n) / took.All.Seconds()})
	}
}

func TestFiguresOfAProgramThatDoesNotUseTheDriver(t *testing.T) {
	lasts(t)
	m := measure(t)
	const rounds, work = 9, "80"
	var native, emulated struct{ wall, cpu []time.Duration }
	for range rounds { // in turns: the host may have something else to do
		var took effort
		m.read(exec.Command(os.Args[0]), "native "+work, &took)
		native.wall, native.cpu = append(native.wall, took.Wall), append(native.cpu, took.CPU)
		m.read(m.command(os.Args[0]), "native "+work, &took)
		emulated.wall, emulated.cpu = append(emulated.wall, took.Wall), append(emulated.cpu, took.CPU)
	}
	type figures struct {
		Without spread  `json:"without"`
		With    spread  `json:"with"`
		Ratio   float64 `json:"ratio_of_p50"`
	}
	compare := func(without, with []time.Duration) figures {
		a, b := spreadOf(without), spreadOf(with)
		return figures{a, b, b.P50 / a.P50}
	}
	tellFigures(t, "a program that computes and makes 64000 system calls, none of them to the driver, without and with kfdemu exec", raceDetector, struct {
		Wall figures `json:"wall"`
		CPU  figures `json:"cpu"`
	}{compare(native.wall, emulated.wall), compare(native.cpu, emulated.cpu)})
}

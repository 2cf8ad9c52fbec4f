package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// simulated returns options for a daemon on a fake host that is called simulated, with the
// config file and the socket in dir.
func simulated(t testing.TB, dir string) Options {
	t.Helper()
	return newSimulatedHost(t, dir).opts
}

func newSimulatedHost(t testing.TB, dir string) *fakeHost {
	t.Helper()
	h := newFakeHost(t, "6.12", "")
	h.opts.ConfigPath, h.opts.ConfigGiven, h.opts.Socket = filepath.Join(dir, "d.yaml"), false, filepath.Join(dir, "d.sock")
	h.opts.Host.Simulated, h.opts.Log = "mi300x", zap.NewNop()
	h.put("sys/kernel/debug/kfd/mqds", "")
	return h
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestMain checks for goroutines that remain.
func TestRunServesUntilItsContextEnds(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	opts := simulated(t, dir)
	ready := notifySocket(t)
	for range 2 { // the first must not block the second
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-ready
			cancel()
		}()
		if err := Run(ctx, opts); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(opts.Socket); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the socket still exists: %v", err)
		}
	}
}

func TestRunThatFailsToStartLeavesNothingRunning(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	taken := simulated(t, dir)
	taken.Socket = filepath.Join(dir, "directory")
	if err := os.Mkdir(taken.Socket, 0o755); err != nil {
		t.Fatal(err)
	}
	noFile := simulated(t, dir)
	noFile.ConfigGiven = true
	for name, tc := range map[string]struct {
		opts Options
		want string
	}{
		"no socket":     {taken, "is not a socket"},
		"no such file":  {noFile, "d.yaml"},
		"bad directory": {Options{ConfigPath: dir, ConfigGiven: true}, dir},
	} {
		if err := Run(t.Context(), tc.opts); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want an error about %q", name, err, tc.want)
		}
	}
}

// newDaemon builds a daemon that does not listen. Its scheduler runs.
func newDaemon(t *testing.T, text string) *daemon {
	t.Helper()
	d, _ := newDaemonOnHost(t, text)
	return d
}

func newDaemonOnHost(t *testing.T, text string) (*daemon, *fakeHost) {
	t.Helper()
	h := newSimulatedHost(t, t.TempDir())
	opts := h.opts
	write(t, opts.ConfigPath, text)
	cfg, err := opts.load()
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{opts: opts}
	d.openLog(cfg)
	d.backend = openBackend(t.Context(), opts.Host, cfg, d.gpusOf, d.crashesWithoutVM, d.countHelperExit, d.sinceBreakersClosed, d.log)
	if err := d.build(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.server.Shutdown(t.Context()) })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.runner.Run(ctx, time.Hour, func() {}) }()
	t.Cleanup(func() {
		cancel()
		d.runner.Stop()
		if err := errors.Join(<-ended, d.sessions.Close(context.Background()), d.backend.close()); err != nil {
			t.Error(err)
		}
	})
	if err := d.findGPUs(); err != nil {
		t.Fatal(err)
	}
	return d, h
}

func TestLineOfTheKernelLogOpensTheBreaker(t *testing.T) {
	d := newDaemon(t, "# defaults\n")
	gpu := d.inventory.GPUs()[0].ID
	open := func() (open bool) {
		d.runner.View(func(c *scheduler.Core) { open = c.GPUs()[0].BreakerOpen })
		return open
	}
	d.alarm(safety.Alarm{GPU: gpu + 1})
	if open() || d.sinceBreakersClosed() < 0 {
		t.Error("an alarm of another GPU opens it")
	}
	d.alarm(safety.Alarm{GPU: gpu, Pattern: "mes-no-response"})
	if !open() || d.sinceBreakersClosed() >= 0 {
		t.Error("its breaker is closed")
	}
}

// A driver that prints lines about GPUs that work does not hold breakers open, and what it
// prints about GPUs that do fail still opens them.
func TestDoubtedLinesOfTheKernelLogOpenTheBreakerOnce(t *testing.T) {
	d := newDaemon(t, "# defaults\n")
	gpu := d.inventory.GPUs()[0].ID
	closes := func() (at scheduler.Time) {
		d.runner.View(func(c *scheduler.Core) { at = c.GPUs()[0].BreakerCloses })
		return at
	}
	doubted := safety.Alarm{GPU: gpu, Pattern: "ras-uncorrectable", Doubt: "owner/name#1"}
	d.alarm(doubted)
	first := closes()
	if first == 0 {
		t.Error("the first does not open it")
	}
	d.alarm(doubted)
	if again := closes(); again != first {
		t.Errorf("the second has it close at %v instead of %v", again, first)
	}
	want := gpreempt.WarnFailureDoubted.Warn(fmt.Sprintf("alarms of GPU %s: pattern ras-uncorrectable (owner/name#1)", gpu))
	if got := d.warnings.list(); !slices.Contains(got, want) {
		t.Errorf("warnings %+v, want also %+v", got, want)
	}
	d.alarm(safety.Alarm{GPU: gpu, Pattern: "gpu-reset"})
	if again := closes(); again <= first {
		t.Errorf("a reset has it close at %v, as before", again)
	}
}

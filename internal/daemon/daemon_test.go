package daemon

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/hazard"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// simulated is how to run a simulated machine with a config file in dir.
func simulated(t *testing.T, dir string) Options {
	t.Helper()
	spec, err := gpumodel.PresetByName("mi300x")
	if err != nil {
		t.Fatal(err)
	}
	return Options{
		ConfigPath: filepath.Join(dir, "d.yaml"), Socket: filepath.Join(dir, "d.sock"),
		Sim: &spec, SimGPUs: 1, SimSeed: 1, Log: zap.NewNop(),
	}
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestMain sees to it that nothing of it is left.
func TestRunServesUntilItsContextEnds(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	opts := simulated(t, dir)
	for range 2 { // the second finds nothing in its way
		ctx, cancel := context.WithCancel(t.Context())
		opts.Ready = cancel
		if err := Run(ctx, opts); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(opts.Socket); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the socket is still there: %v", err)
		}
	}
}

func TestRunThatCannotStartLeavesNothingRunning(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	noMachine := simulated(t, dir)
	noMachine.SimGPUs = 0
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
		"no GPUs":       {noMachine, "0"},
		"no socket":     {taken, "is not a socket"},
		"no such file":  {noFile, "d.yaml"},
		"bad directory": {Options{ConfigPath: dir, ConfigGiven: true}, dir},
	} {
		if err := Run(t.Context(), tc.opts); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want an error about %q", name, err, tc.want)
		}
	}
}

// newDaemon builds a daemon that does not listen; its scheduler runs.
func newDaemon(t *testing.T, text string) *daemon {
	t.Helper()
	opts := simulated(t, t.TempDir())
	write(t, opts.ConfigPath, text)
	cfg, err := opts.load()
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{opts: opts}
	d.openLog(cfg)
	if d.backend, err = openSimulation(opts); err != nil {
		t.Fatal(err)
	}
	if err := d.build(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.server.Shutdown(t.Context()) })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.runner.Run(ctx, time.Hour, func() {}) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, d.executor.Close(context.Background()), d.backend.close()); err != nil {
			t.Error(err)
		}
	})
	if err := d.findGPUs(); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestLineOfTheKernelLogOpensTheBreaker(t *testing.T) {
	d := newDaemon(t, "")
	gpu := d.inventory.GPUs()[0].ID
	open := func() (open bool) {
		d.runner.View(func(c *scheduler.Core) { open = c.GPUs()[0].BreakerOpen })
		return open
	}
	d.alarm(hazard.Alarm{GPU: gpu + 1})
	if open() {
		t.Error("another GPU's trouble opens it")
	}
	d.alarm(hazard.Alarm{GPU: gpu, Pattern: "mes-no-response"})
	if !open() {
		t.Error("its breaker is closed")
	}
}

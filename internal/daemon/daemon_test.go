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

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/hazard"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
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

// reloadWith replaces the file and reloads; it returns the codes of the warnings.
func (d *daemon) reloadWith(t *testing.T, text string) (codes []string) {
	t.Helper()
	write(t, d.opts.ConfigPath, text)
	d.reload()
	for _, w := range d.warnings.list() {
		codes = append(codes, w.Code)
	}
	return codes
}

func (d *daemon) policy() (p scheduler.Policy) {
	d.runner.View(func(c *scheduler.Core) { p = c.Policy() })
	return p
}

// noGroups keeps the default groups, which the host may not have, out of it.
const noGroups = "access: {online_groups: [], admin_groups: []}\n"

func TestReloadTakesOverWhatDiffersAndNothingElse(t *testing.T) {
	d := newDaemon(t, noGroups)
	revision := d.events.Revision()
	if codes := d.reloadWith(t, noGroups+"# only a comment\n"); codes != nil {
		t.Errorf("warnings %v", codes)
	}
	if got := d.events.Revision(); got != revision {
		t.Errorf("%d events for a file that did not change", got-revision)
	}

	strict, err := scheduler.PresetByName("strict")
	if err != nil {
		t.Fatal(err)
	}
	codes := d.reloadWith(t, `
access: {online_groups: [], admin_groups: ["4242"]}
policy: {preset: strict}
limits: {leases_per_client: 1}
log: {level: error}
discovery: {interval: 1s}
rules: [{name: all, match: {comm: "*"}, class: offline}]
`)
	if codes != nil {
		t.Errorf("warnings %v", codes)
	}
	if got := d.events.Revision(); got != revision+1 {
		t.Errorf("%d events, want one for the policy", got-revision)
	}
	if diff := cmp.Diff(strict, d.policy()); diff != "" {
		t.Error(diff)
	}
	if got := d.authz.Load().AdminGIDs; len(got) != 1 || got[0] != 4242 {
		t.Errorf("admin groups %v, want 4242", got)
	}
	if got := d.logs.Level(); got != zapcore.ErrorLevel {
		t.Errorf("log level %v, want error", got)
	}
	if got := d.config.Load().Discovery.Interval; got != time.Second {
		t.Errorf("interval %v, want 1s", got)
	}
	request := scheduler.LeaseRequested{Client: 7, Priority: gpreempt.PriorityHigh, TTL: time.Second}
	for _, want := range []gpreempt.Reason{"", gpreempt.ReasonLeasesPerClient} {
		_, _, err := d.runner.Announce(request, func(scheduler.LeaseID, scheduler.Answer) {})
		if got := gpreempt.ReasonOf(err); got != want {
			t.Errorf("announced with %v, want %q", err, want)
		}
	}
	key, err := d.backend.machine.StartProcess(gpumodel.ProcSpec{Comm: "anything"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.backend.machine.CreateQueue(key, d.inventory.GPUs()[0].ID, gpreempt.QueueCompute, 64); err != nil {
		t.Fatal(err)
	}
	d.observer.Scan()
	if facts, _ := d.targets.Facts(key); facts.Decision.By != "rule all" {
		t.Errorf("a new process is decided by %q, want the new rule", facts.Decision.By)
	}
}

func TestReloadOfAWrongFileChangesNothingAndSaysWhere(t *testing.T) {
	d := newDaemon(t, noGroups+"policy: {preset: strict}\n")
	before, policy := *d.config.Load(), d.policy()
	for _, text := range []string{
		noGroups + "policy: {preset: share}\nlimits: {burst: 0}\n",
		noGroups + "policy: {preset: share}\nrules: [{name: \"\", match: {}, class: offline}]\n",
		noGroups + "policy: [\n",
	} {
		codes := d.reloadWith(t, text)
		if diff := cmp.Diff([]string{"CONFIG_REJECTED"}, codes); diff != "" {
			t.Errorf("warnings of %q: %s", text, diff)
			continue
		}
		w := d.warnings.list()[0]
		if !strings.Contains(w.Text, d.opts.ConfigPath+":") || strings.Contains(w.Text, "\n") || w.Remedy == "" {
			t.Errorf("the warning is %+v, want one line with file and line, and a remedy", w)
		}
	}
	if diff := cmp.Diff(before, *d.config.Load()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(policy, d.policy()); diff != "" {
		t.Error(diff)
	}
	if codes := d.reloadWith(t, noGroups+"policy: {preset: strict}\n"); codes != nil {
		t.Errorf("mended, it still warns of %v", codes)
	}
}

func TestConfigFileThatVanishesIsAMistakeAlsoAtTheDefaultPlace(t *testing.T) {
	d := newDaemon(t, noGroups+"policy: {preset: strict}\n")
	before := *d.config.Load()
	if err := os.Remove(d.opts.ConfigPath); err != nil {
		t.Fatal(err)
	}
	d.reload()
	var codes []string
	for _, w := range d.warnings.list() {
		codes = append(codes, w.Code)
	}
	if diff := cmp.Diff([]string{"CONFIG_REJECTED"}, codes); diff != "" {
		t.Errorf("warnings: %s", diff)
	}
	if diff := cmp.Diff(before, *d.config.Load()); diff != "" {
		t.Error(diff)
	}
	if codes := d.reloadWith(t, noGroups+"policy: {preset: strict}\n"); codes != nil {
		t.Errorf("it is back, and the daemon still warns of %v", codes)
	}
}

func TestReloadEndsThePolicyOfAnAdmin(t *testing.T) {
	d := newDaemon(t, noGroups)
	before, byHand := d.policy(), d.policy()
	byHand.Shadow = true
	d.runner.Post(scheduler.PolicyChanged{Policy: byHand.Normalize()})
	d.reloadWith(t, noGroups)
	if diff := cmp.Diff(before, d.policy()); diff != "" {
		t.Error(diff)
	}
}

func TestWhatNeedsARestartIsToldUntilItIsUndone(t *testing.T) {
	d := newDaemon(t, noGroups)
	d.opts.Socket = "" // as without --socket
	socket := d.config.Load().Socket
	changed := noGroups + "limits: {max_message_bytes: 8192}\nsocket: /run/elsewhere.sock\n"
	for range 2 {
		if diff := cmp.Diff([]string{"RESTART_NEEDED"}, d.reloadWith(t, changed)); diff != "" {
			t.Fatal(diff)
		}
		if text := d.warnings.list()[0].Text; !strings.Contains(text, "socket, limits.max_message_bytes") {
			t.Errorf("the warning says %q, want both keys", text)
		}
	}
	if got := d.config.Load(); got.Socket != socket || got.Limits.MaxMessageBytes != 64<<10 {
		t.Errorf("socket %q, max_message_bytes %d in force", got.Socket, got.Limits.MaxMessageBytes)
	}
	if codes := d.reloadWith(t, noGroups+"socket: "+socket+"\n"); codes != nil {
		t.Errorf("undone, it still warns of %v", codes)
	}
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

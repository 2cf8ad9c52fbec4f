package daemon

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

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

// noGroups removes the default groups, which the host may not have.
const noGroups = "access: {online_groups: [], admin_groups: []}\n"

func TestReloadAppliesTheChangesAndNothingElse(t *testing.T) {
	d, h := newDaemonOnHost(t, noGroups)
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
limits: {leases_per_user: 1}
log: {level: error}
discovery: {debugfs: false}
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
	if d.config.Load().Discovery.Debugfs {
		t.Error("debugfs is read")
	}
	request := scheduler.LeaseRequested{Client: scheduler.ClientID{PID: 7}, Priority: gpreempt.PriorityHigh, TTL: time.Second}
	for _, want := range []gpreempt.Reason{"", gpreempt.ReasonLeasesPerClient} {
		_, _, err := d.runner.Announce(request, func(scheduler.LeaseID, scheduler.Answer) {})
		if got := gpreempt.ReasonOf(err); got != want {
			t.Errorf("announced with %v, want %q", err, want)
		}
	}
	key := h.start("anything").Key()
	d.observer.Scan()
	if facts, _ := d.registry.Facts(key); facts.Decision.By != "rule all" {
		t.Errorf("a new process is classified by %q, want the new rule", facts.Decision.By)
	}
}

// state is everything that a reload can change.
type state struct {
	Config    config.Config
	Policy    scheduler.Policy
	Access    auth.Policy
	Level     zapcore.Level
	Decisions []string // of the processes
}

func (d *daemon) state() state {
	s := state{Config: *d.config.Load(), Policy: d.policy(), Access: *d.authz.Load(), Level: d.log.Level()}
	for _, p := range d.inventory.Processes() {
		facts, _ := d.registry.Facts(p.Key)
		s.Decisions = append(s.Decisions, facts.Decision.By)
	}
	return s
}

// A reload can fail when the file is parsed, when its values are checked, when its rules
// are compiled and when the certificates are read. In each case nothing changes, no change
// is logged, and the warning stays until a reload succeeds.
func TestReloadThatFailsChangesNothing(t *testing.T) {
	ca := testutil.NewAuthority(t, "clients")
	certificate, key := ca.Issue(testutil.ForServer)
	tcp := func(certificate string) string {
		return "tcp: {address: \"127.0.0.1:7443\", certificate: " + certificate + ", key: " + key + ", client_ca: " + ca.File + "}\n"
	}
	before := noGroups + "policy: {preset: strict}\n" + tcp(certificate)
	d, h := newDaemonOnHost(t, before)
	core, logs := observer.New(zapcore.DebugLevel)
	d.logs = log.Of(zap.New(core))
	certificates, err := auth.ReadCertificates(certificateFiles(d.config.Load().TCP))
	if err != nil {
		t.Fatal(err)
	}
	d.certificates = auth.NewCertificateStore(certificates)
	h.start("anything")
	d.observer.Scan()
	want := d.state()
	const changed = "access: {online_groups: [], admin_groups: [\"4242\"]}\npolicy: {preset: share}\nlog: {level: error}\n" +
		"rules: [{name: all, match: {comm: \"*\"}, class: offline}]\n"
	for _, tc := range []struct{ step, file, code, place string }{
		{"parse", changed + "limits: [\n", "CONFIG_REJECTED", d.opts.ConfigPath + ":"},
		{"check", changed + tcp(certificate) + "limits: {leases_per_user: 0}\n", "CONFIG_REJECTED", d.opts.ConfigPath + ":"},
		{"rules", strings.Replace(changed, `"*"`, `"["`, 1), "CONFIG_REJECTED", d.opts.ConfigPath + ":"},
		{"certificates", changed + tcp(certificate+".missing"), "CERTIFICATE_REJECTED", certificate + ".missing"},
	} {
		if diff := cmp.Diff([]string{tc.code}, d.reloadWith(t, tc.file)); diff != "" {
			t.Errorf("%s: warnings (-want +got):\n%s", tc.step, diff)
			continue
		}
		w := d.warnings.list()[0]
		if !strings.Contains(w.Text, tc.place) || strings.Contains(w.Text, "\n") || w.Remedy == "" {
			t.Errorf("%s: the warning is %+v, want one line with the place, and a remedy", tc.step, w)
		}
		if diff := cmp.Diff(want, d.state()); diff != "" {
			t.Errorf("%s: state (-before +after):\n%s", tc.step, diff)
		}
	}
	if n := logs.FilterMessage("config changed").Len(); n != 0 {
		t.Errorf("%d changes are logged", n)
	}
	if codes := d.reloadWith(t, before); codes != nil {
		t.Errorf("after a reload that succeeds: warnings %v", codes)
	}
	if codes := d.reloadWith(t, strings.Replace(before, "strict", "share", 1)); codes != nil {
		t.Errorf("warnings %v", codes)
	}
	var keys []any
	for _, e := range logs.FilterMessage("config changed").All() {
		keys = append(keys, e.ContextMap()["key"])
	}
	if len(keys) == 0 || keys[0] != "policy.preset" {
		t.Errorf("changes logged: %v, want policy.preset first", keys)
	}
}

// Whatever is in the place of the file, each reload is answered by a line and by the warning
// that holds, and the next one works.
func TestReloadOfWhatIsNoFileIsAnswered(t *testing.T) {
	d := newDaemon(t, noGroups)
	core, logs := observer.New(zapcore.InfoLevel)
	d.logs = log.Of(zap.New(core))
	path := d.opts.ConfigPath
	for _, step := range []struct {
		what string
		make func() error
		want string // of the warning, "" without
	}{
		{"a FIFO", func() error { return syscall.Mkfifo(path, 0o600) }, "it is not a regular file: a FIFO: name a regular file"},
		{"a FIFO, again", func() error { return syscall.Mkfifo(path, 0o600) }, "it is not a regular file: a FIFO: name a regular file"},
		{"a directory", func() error { return os.Mkdir(path, 0o700) }, "it is not a regular file: a directory"},
		{"an endless device", func() error { return os.Symlink("/dev/zero", path) }, "it is not a regular file: a device"},
		{"100 MB", func() error { return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 100<<20)) }, "it is too large"},
		{"a loop", func() error { return os.Symlink(path, path) }, "too many levels of symbolic links"},
		{"nothing", func() error { return nil }, "no such file"},
		{"an empty file", func() error { return os.WriteFile(path, nil, 0o600) }, "is empty"},
		{"the file", func() error { return os.WriteFile(path, []byte(noGroups+"log: {level: error}\n"), 0o600) }, ""},
		{"the file, unchanged", func() error { return os.WriteFile(path, []byte(noGroups+"log: {level: error}\n"), 0o600) }, ""},
	} {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		if err := step.make(); err != nil {
			t.Fatal(err)
		}
		d.reload()
		var got []string
		for _, w := range d.warnings.list() {
			got = append(got, w.Code+": "+w.Text)
		}
		message := "config reloaded"
		if step.want != "" {
			message = "reload failed; nothing changed"
		}
		if len(got) > 1 || (len(got) == 1) != (step.want != "") || len(got) == 1 && (!strings.HasPrefix(got[0], "CONFIG_REJECTED: ") || !strings.Contains(got[0], step.want)) {
			t.Errorf("%s: warnings %q, want one with %q", step.what, got, step.want)
		}
		if lines := logs.FilterMessage(message).Len(); lines != 1 {
			t.Errorf("%s: %d lines %q", step.what, lines, message)
		}
		logs.TakeAll()
	}
}

func TestEachStageOfAShutdownHasItsOwnTime(t *testing.T) {
	slow := errors.New("2 targets still being resumed")
	broken := errors.New("some targets are not released yet")
	for name, tc := range map[string]struct {
		resumes, detaches error // at the end of their times; nil is success at once
		late              error // of the second look
		want              []error
		took              time.Duration
	}{
		"quick":                        {nil, nil, nil, nil, callsTime},
		"late, and released":           {slow, nil, nil, nil, resumeAllTime + callsTime},
		"late, released and suspended": {slow, nil, slow, []error{slow}, resumeAllTime + callsTime},
		"late, and not released":       {slow, broken, nil, []error{slow, broken}, resumeAllTime + callsTime + detachTime},
		"not released":                 {nil, broken, nil, []error{broken}, callsTime + detachTime},
	} {
		synctest.Test(t, func(t *testing.T) {
			wait := func(ctx context.Context, failure error) error {
				if failure != nil {
					<-ctx.Done()
				}
				return failure
			}
			looks, start := 0, time.Now()
			err := inStages(t.Context(), func(ctx context.Context) error {
				if looks++; looks > 1 {
					return tc.late
				}
				return wait(ctx, tc.resumes)
			}, func(ctx context.Context) { <-ctx.Done() }, func(ctx context.Context) error { return wait(ctx, tc.detaches) })
			for _, want := range []error{slow, broken} {
				if errors.Is(err, want) != slices.Contains(tc.want, want) {
					t.Errorf("%s: %v, want %v", name, err, tc.want)
				}
			}
			if took := time.Since(start); took != tc.took {
				t.Errorf("%s: after %v, want %v", name, took, tc.took)
			}
		})
	}
}

func TestShutdownNamesThePartsThatHaveNotEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p parts
		release, ended := make(chan struct{}), func() {}
		p.Go("reading the kernel log", func() { <-release })
		p.Go("a reload of the config file", func() { <-release })
		p.Go("a reload of the config file", ended)
		p.Go("the metrics", ended)
		start := time.Now()
		got := p.Wait(endTime)
		if diff := cmp.Diff([]string{"a reload of the config file", "reading the kernel log"}, got); diff != "" || time.Since(start) != endTime {
			t.Errorf("after %v (-want +got):\n%s", time.Since(start), diff)
		}
		close(release)
		if got := p.Wait(endTime); got != nil {
			t.Errorf("%q have not ended", got)
		}
	})
}

func TestConfigFileThatWasRemovedIsAnErrorAlsoAtTheDefaultPath(t *testing.T) {
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
		t.Errorf("after the file is restored: warnings %v", codes)
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

func TestKeysThatNeedARestartAreAWarningUntilTheyAreReverted(t *testing.T) {
	d := newDaemon(t, noGroups)
	d.opts.Socket = "" // as without --socket
	socket := d.config.Load().Socket
	changed := noGroups + "metrics: {address: \"127.0.0.1:1\"}\nsocket: /run/elsewhere.sock\n"
	for range 2 {
		if diff := cmp.Diff([]string{"RESTART_NEEDED"}, d.reloadWith(t, changed)); diff != "" {
			t.Fatal(diff)
		}
		if text := d.warnings.list()[0].Text; !strings.Contains(text, "socket, metrics.address") {
			t.Errorf("the warning says %q, want both keys", text)
		}
	}
	if got := d.config.Load(); got.Socket != socket || got.Metrics.Address != "" {
		t.Errorf("socket %q, metrics.address %q in force", got.Socket, got.Metrics.Address)
	}
	if codes := d.reloadWith(t, noGroups+"socket: "+socket+"\n"); codes != nil {
		t.Errorf("after the keys are reverted: warnings %v", codes)
	}
}

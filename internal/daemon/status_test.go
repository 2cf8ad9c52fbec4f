package daemon

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// fakeSystemd receives the states that a service sends. next returns the next message with
// a line.
func fakeSystemd(t *testing.T) (next func(line string) string) {
	t.Helper()
	path := filepath.Join(testutil.TempSocketDir(t), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return func(line string) string {
		t.Helper()
		if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		for {
			b := make([]byte, 4096)
			n, err := conn.Read(b)
			if err != nil {
				t.Fatalf("no message with %s: %v", line, err)
			}
			if text := string(b[:n]); slices.Contains(strings.Split(text, "\n"), line) {
				return text
			}
		}
	}
}

func TestStatusAndWatchdogAreSentToSystemd(t *testing.T) {
	next := fakeSystemd(t)
	dir := testutil.TempSocketDir(t)
	opts := simulated(t, dir)
	write(t, opts.ConfigPath, noGroups)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- Run(ctx, opts) }()
	// The first status may precede the first look at the topology.
	status := regexp.MustCompile(`^[A-Z]+=1(\nSTATUS=simulated mi300x: GPUs [01], leases 0, suspended targets 0)?$`)
	for _, line := range []string{"READY=1", "WATCHDOG=1", "WATCHDOG=1"} {
		if got := next(line); !status.MatchString(got) {
			t.Errorf("systemd receives %q", got)
		}
	}
	cancel()
	next("STOPPING=1")
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The scheduler's loop, which feeds the watchdog, does not run here.
func TestChangedWarningsReachSystemdWithoutTheSchedulersLoop(t *testing.T) {
	next := fakeSystemd(t)
	d := newDaemon(t, noGroups)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { d.watchWarnings(ctx); close(ended) }()
	next("STATUS=" + d.status(d.listWarnings()))
	for _, now := range [][]gpreempt.Warning{{gpreempt.WarnNoKFD.Warn("no driver")}, nil} {
		d.warnings.set("a part", now...)
		next("STATUS=" + d.status(d.listWarnings()))
	}
	cancel()
	<-ended
}

func TestReloadIsReportedToSystemd(t *testing.T) {
	next := fakeSystemd(t)
	d := newDaemon(t, noGroups)
	hangups := make(chan os.Signal, 1)
	d.hangups = hangups
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { d.reloadOnHangup(ctx); close(ended) }()
	write(t, d.opts.ConfigPath, noGroups+"policy: {preset: strict}\n")
	hangups <- syscall.SIGHUP
	next("RELOADING=1")
	next("READY=1")
	if d.config.Load().Policy == config.Default().Policy {
		t.Error("ready before the file was applied")
	}
	cancel()
	<-ended
}

func TestStatusNamesTheWorstWarnings(t *testing.T) {
	for want, warnings := range map[string][]gpreempt.Warning{
		"kfd: GPUs 8, leases 2, suspended targets 1": nil,
		"kfd: GPUs 8, leases 2, suspended targets 1, warnings 3 (gpctl status): b c; d": {
			{Severity: "warning", Text: "a"}, {Severity: "error", Text: "b\nc"}, {Severity: "error", Text: "d"},
		},
		"kfd: GPUs 8, leases 2, suspended targets 1, warnings 1 (gpctl status): a": {{Severity: "warning", Text: "a"}},
	} {
		if diff := cmp.Diff(want, statusLine("kfd", 8, 2, 1, warnings)); diff != "" {
			t.Error(diff)
		}
	}
}

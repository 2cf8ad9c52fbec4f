package daemon

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/config"
)

// unit reads a unit file, comments left out.
func unit(t *testing.T, name string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", "systemd", name))
	if err != nil {
		t.Fatal(err)
	}
	settings := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(key, "#") {
			settings[key] = value
		}
	}
	return settings
}

func TestUnitsAgreeWithTheDaemon(t *testing.T) {
	service, socket, cfg := unit(t, "gpreemptd.service"), unit(t, "gpreemptd.socket"), config.Default()
	for _, tc := range []struct{ key, got, want string }{
		{"ListenStream", socket["ListenStream"], cfg.Socket},
		{"SocketGroup", socket["SocketGroup"], cfg.Access.OnlineGroups[0]},
		{"SocketMode", socket["SocketMode"], "0660"},
		{"RuntimeDirectory", "/run/" + service["RuntimeDirectory"], ThisHost().RunDir},
	} {
		if tc.got != tc.want {
			t.Errorf("%s is %q, the daemon has %q", tc.key, tc.got, tc.want)
		}
	}
	for key, least := range map[string]time.Duration{
		"TimeoutStopSec": max(resumeAllTime+callsTime+detachTime+endTime, cleanupTime),
		"WatchdogSec":    3 * beatEvery,
	} {
		if got, err := time.ParseDuration(service[key]); err != nil || got < least {
			t.Errorf("%s is %q, want at least %v: %v", key, service[key], least, err)
		}
	}
}

// A service that no remote client uses needs no network beyond this host.
func TestUnitPermitsLoopbackOnly(t *testing.T) {
	service := unit(t, "gpreemptd.service")
	want := map[string]string{"IPAddressDeny": "any", "IPAddressAllow": "localhost"}
	got := map[string]string{"IPAddressDeny": service["IPAddressDeny"], "IPAddressAllow": service["IPAddressAllow"]}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

func TestExposureOfTheUnitIsTheDocumentedOne(t *testing.T) {
	version, err := exec.Command("systemd-analyze", "--version").Output()
	if err != nil || !strings.HasPrefix(string(version), "systemd 252 ") {
		t.Skipf("needs systemd-analyze of systemd 252: %s%v", version, err)
	}
	file := filepath.Join("..", "..", "deploy", "systemd", "gpreemptd.service")
	out, err := exec.Command("systemd-analyze", "security", "--no-pager", "--offline=true", file).CombinedOutput()
	found := regexp.MustCompile(`exposure level for \S+ ([0-9.]+)`).FindSubmatch(out)
	if err != nil || found == nil {
		t.Fatalf("%v: %s", err, out)
	}
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "install.md"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "reports an exposure of " + string(found[1]) + ";"; !strings.Contains(string(text), want) {
		t.Errorf("docs/install.md has no %q", want)
	}
}

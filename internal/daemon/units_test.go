package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
		"TimeoutStopSec": max(shutdownTime+endTime, cleanupTime),
		"WatchdogSec":    3 * beatEvery,
	} {
		if got, err := time.ParseDuration(service[key]); err != nil || got < least {
			t.Errorf("%s is %q, want at least %v: %v", key, service[key], least, err)
		}
	}
}

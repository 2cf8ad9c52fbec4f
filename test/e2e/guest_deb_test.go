package e2e

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

const (
	deb     = "/packages/gpreempt.deb"
	options = "/etc/default/gpreemptd"
	edited  = "GPREEMPTD_OPTIONS=--config " + yaml + "\n"
	yaml    = "/etc/gpreempt/gpreemptd.yaml"
	scraped = "127.0.0.1:9477"
)

// metricsKey is where the config file says what is scraped.
var metricsKey = regexp.MustCompile(`(?s)(\nmetrics:\n.*?\n  address: )""`)

// TestGuestPackage takes the deb from the first installation on a clean Debian to its purge.
// Each step goes on from where the one before left the machine; the last leaves it installed for the
// tests of the other files, which follow.
func TestGuestPackage(t *testing.T) {
	inGuest(t)
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"InstallIsUpWithoutADriver", packageInstall},
		{"MetricsAreScrapedOnceTheConfigSaysWhere", packageScraped},
		{"OptionsOfTheDefaultFileAreUsed", packageOptions},
		{"UpgradeHandsOverAndKeepsWhatWasEdited", packageUpgrade},
		{"ChangeOfVersionLeavesADisabledServiceAlone", packageDisabled},
		{"RemoveStopsAndKeepsTheConfig", packageRemove},
		{"PurgeLeavesWhatIsNotOurs", packagePurge},
		{"InstallAfterThePurgeIsTheFirstAgain", packageInstall},
	} {
		if !t.Run(step.name, step.run) {
			return
		}
	}
}

func packageInstall(t *testing.T) {
	t.Log(must(t, "dpkg", "-i", deb))
	must(t, "systemctl", "start", "gpreemptd")
	if got := property(t, "StatusText"); !strings.Contains(got, "the amdgpu driver is not loaded") {
		t.Errorf("status %q", got)
	}
	steady(t)
	said := answers(t)
	t.Log(said)
	for _, want := range []string{"NO_KFD", "try: load amdgpu"} {
		if !strings.Contains(said, want) {
			t.Errorf("gpctl status does not say %s:\n%s", want, said)
		}
	}
	for _, unit := range []string{service, socket} {
		if got := strings.TrimSpace(must(t, "systemctl", "is-enabled", unit)); got != "enabled" {
			t.Errorf("%s is %s", unit, got)
		}
	}
	must(t, "gpreemptd", "config", "check")
	must(t, "gpaccept", "--version")
	must(t, "getent", "group", "gpreempt", "gpreempt-admin")
}

// get reads a page of the daemon's.
func get(t *testing.T, page string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+scraped+page, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// packageScraped sets the key in the commented config file, as with an editor.
func packageScraped(t *testing.T) {
	text, err := os.ReadFile(yaml)
	if err != nil {
		t.Fatal(err)
	}
	edited := metricsKey.ReplaceAllString(string(text), "${1}"+scraped)
	if edited == string(text) {
		t.Fatalf("%s has no metrics.address:\n%s", yaml, text)
	}
	write(t, yaml, edited)
	must(t, "gpreemptd", "config", "check")
	must(t, "systemctl", "restart", service)
	for _, page := range []string{"/healthz", "/readyz"} {
		if status, body := get(t, page); status != http.StatusOK {
			t.Errorf("%s answers %d: %s", page, status, body)
		}
	}
	status, body := get(t, "/metrics")
	for _, want := range []string{
		`gpreempt_build_info{backend="kfd",`, `gpreempt_warnings{code="NO_KFD",severity="error"} 1`, "gpreempt_announcements_total", "process_start_time_seconds",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("the scrape (%d) has no %s:\n%s", status, want, body)
		}
	}
	// The same check as promtool check metrics, which a guest need not have.
	problems, err := promlint.New(strings.NewReader(body)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("the scrape: %v, %v", problems, err)
	}
	t.Logf("%d lines of metrics", strings.Count(body, "\n"))
}

func packageOptions(t *testing.T) {
	write(t, options, edited)
	must(t, "systemctl", "restart", service)
	answers(t)
	line, err := os.ReadFile(filepath.Join("/proc", property(t, "MainPID"), "cmdline"))
	if err != nil || !strings.Contains(string(line), "\x00--config\x00"+yaml+"\x00") {
		t.Errorf("the daemon runs as %q, %v", line, err)
	}
}

// newer makes the package anew with a later version.
func newer(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tree")
	must(t, "dpkg-deb", "-R", deb, dir)
	control := filepath.Join(dir, "DEBIAN", "control")
	text, err := os.ReadFile(control)
	if err != nil {
		t.Fatal(err)
	}
	write(t, control, regexp.MustCompile(`(?m)^Version: .*`).ReplaceAllString(string(text), "${0}.1"))
	made := filepath.Join(filepath.Dir(dir), "gpreempt.deb")
	must(t, "dpkg-deb", "-Znone", "-b", dir, made)
	return made
}

func packageUpgrade(t *testing.T) {
	next := newer(t)
	before := property(t, "MainPID")
	upgraded := make(chan string, 1)
	go func() {
		defer close(upgraded)
		if status, out := command(t, "dpkg", "-i", next); status != 0 {
			upgraded <- out
		}
	}()
	calls := 0
	tick := time.NewTicker(time.Second) // leaves an emulated CPU to dpkg
	defer tick.Stop()
	for waiting := true; waiting; {
		select {
		case out, failed := <-upgraded:
			if waiting = false; failed {
				t.Fatal(out)
			}
		case <-tick.C:
			calls++
			answers(t)
		}
	}
	answers(t)
	t.Logf("%d calls during the upgrade, each answered", calls)
	if after := property(t, "MainPID"); after == before || property(t, "ActiveState") != "active" {
		t.Errorf("it was process %s and is %s", before, after)
	}
	if n := number(t, "NRestarts"); n != 0 {
		t.Errorf("it died %d times\n%s", n, lastWords(t))
	}
	if text, err := os.ReadFile(options); err != nil || string(text) != edited {
		t.Errorf("%s: %q, %v", options, text, err)
	}
	if _, body := get(t, "/metrics"); !strings.Contains(body, `backend="kfd"`) {
		t.Errorf("the scrape after the upgrade:\n%s", body)
	}
}

func packageDisabled(t *testing.T) {
	must(t, "systemctl", "disable", "--now", service, socket)
	// The way back is to dpkg's scripts what the way forward is.
	must(t, "dpkg", "-i", deb)
	if got := property(t, "ActiveState"); got != "inactive" {
		t.Errorf("it is %s", got)
	}
	if _, got := command(t, "systemctl", "is-enabled", service); strings.TrimSpace(got) != "disabled" {
		t.Errorf("it is %s", got)
	}
	must(t, "systemctl", "enable", "--now", service)
	answers(t)
}

func packageRemove(t *testing.T) {
	must(t, "dpkg", "-r", "gpreempt")
	for _, gone := range []string{"/usr/bin/gpreemptd", path, "/usr/lib/systemd/system/" + service} {
		if _, err := os.Lstat(gone); err == nil {
			t.Errorf("%s is still there", gone)
		}
	}
	for _, unit := range []string{service, socket} {
		if status, out := command(t, "systemctl", "is-active", unit); status == 0 {
			t.Errorf("%s is %s", unit, out)
		}
	}
	for _, stays := range []string{options, yaml} {
		if _, err := os.Stat(stays); err != nil {
			t.Error(err)
		}
	}
	write(t, "/etc/gpreempt/client-ca.pem", "the administrator's\n")
}

func packagePurge(t *testing.T) {
	must(t, "dpkg", "-P", "gpreempt")
	links, err := filepath.Glob("/etc/systemd/system/*/gpreemptd.*")
	if err != nil || len(links) > 0 {
		t.Errorf("left: %v, %v", links, err)
	}
	for _, gone := range []string{options, yaml, "/run/gpreempt", "/var/lib/systemd/deb-systemd-helper-enabled/gpreemptd.service.dsh-also"} {
		if _, err := os.Lstat(gone); err == nil {
			t.Errorf("%s is still there", gone)
		}
	}
	if _, err := os.Stat("/etc/gpreempt/client-ca.pem"); err != nil {
		t.Error(err)
	}
	must(t, "getent", "group", "gpreempt")
}

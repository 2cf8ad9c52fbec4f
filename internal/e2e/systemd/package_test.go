package systemd

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

const (
	deb     = "/packages/gpreempt.deb"
	options = "/etc/default/gpreemptd"
	sim     = "GPREEMPTD_OPTIONS=--sim mi300x\n"
)

// TestPackage takes the deb from the first installation on a clean Debian to its purge.
// Each step goes on from where the one before left the machine.
func TestPackage(t *testing.T) {
	if _, err := os.Stat(deb); err != nil {
		t.Skip("no " + deb + " here: make packages-test puts one into the guest")
	}
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"InstallIsUpWithoutADriver", packageInstall},
		{"SimulatedGPUIsCalledSo", packageSimulated},
		{"UpgradeHandsOverAndKeepsWhatWasEdited", packageUpgrade},
		{"ChangeOfVersionLeavesADisabledServiceAlone", packageDisabled},
		{"RemoveStopsAndKeepsTheConfig", packageRemove},
		{"PurgeLeavesWhatIsNotOurs", packagePurge},
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
	t.Log(answers(t))
	for _, unit := range []string{service, socket} {
		if got := strings.TrimSpace(must(t, "systemctl", "is-enabled", unit)); got != "enabled" {
			t.Errorf("%s is %s", unit, got)
		}
	}
	must(t, "gpreemptd", "config", "check")
	must(t, "getent", "group", "gpreempt", "gpreempt-admin")
}

func packageSimulated(t *testing.T) {
	write(t, options, sim)
	must(t, "systemctl", "restart", service)
	if got := answers(t); !strings.Contains(got, "simulated mi300x") {
		t.Errorf("gpctl status:\n%s", got)
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
	if text, err := os.ReadFile(options); err != nil || string(text) != sim {
		t.Errorf("%s: %q, %v", options, text, err)
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
	for _, stays := range []string{options, "/etc/gpreempt/gpreemptd.yaml"} {
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
	for _, gone := range []string{options, "/etc/gpreempt/gpreemptd.yaml", "/run/gpreempt", "/var/lib/systemd/deb-systemd-helper-enabled/gpreemptd.service.dsh-also"} {
		if _, err := os.Lstat(gone); err == nil {
			t.Errorf("%s is still there", gone)
		}
	}
	if _, err := os.Stat("/etc/gpreempt/client-ca.pem"); err != nil {
		t.Error(err)
	}
	must(t, "getent", "group", "gpreempt")
}

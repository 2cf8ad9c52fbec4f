package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestGuestUnitsAreCleanAndLeaveLittleOpen(t *testing.T) {
	inGuest(t)
	must(t, "systemd-sysusers")
	must(t, "systemd-tmpfiles", "--create")
	must(t, "systemctl", "daemon-reload")
	if out := must(t, "systemd-analyze", "verify", service, socket); out != "" {
		t.Errorf("systemd-analyze verify says:\n%s", out)
	}
	out := must(t, "systemd-analyze", "security", "--no-pager", "--offline=true", "/usr/lib/systemd/system/"+service)
	found := regexp.MustCompile(`exposure level for \S+ ([0-9.]+)`).FindStringSubmatch(out)
	if found == nil {
		t.Fatalf("no figure in\n%s", out)
	}
	exposure, err := strconv.ParseFloat(found[1], 64)
	if err != nil || exposure > 5 {
		t.Errorf("exposure %s, want at most 5.0", found[1])
	}
	t.Logf("%s: exposure %v", strings.TrimSpace(strings.SplitN(must(t, "systemctl", "--version"), "\n", 2)[0]), exposure)
}

func TestGuestServiceIsUpWithoutTheDriver(t *testing.T) {
	inGuest(t)
	if _, err := os.Stat("/dev/kfd"); err == nil {
		t.Fatal("the driver is there already")
	}
	must(t, "systemctl", "enable", "--now", service)
	if got := property(t, "ActiveState"); got != "active" {
		t.Fatalf("it is %s\n%s", got, lastWords(t))
	}
	if got := property(t, "StatusText"); !strings.Contains(got, "the amdgpu driver is not loaded") {
		t.Errorf("status %q", got)
	}
	answers(t)
	info, err := os.Stat(path)
	if err != nil || info.Mode() != os.ModeSocket|0o660 {
		t.Fatalf("%v, %v", info.Mode(), err)
	}
	gid := fmt.Sprint(info.Sys().(*syscall.Stat_t).Gid)
	if got := strings.Split(must(t, "getent", "group", "gpreempt"), ":")[2]; got != gid {
		t.Errorf("the socket is of group %s, want gpreempt (%s)", gid, got)
	}
}

func TestGuestJournalHasTheFieldsOfAnEvent(t *testing.T) {
	inGuest(t)
	all := entries(t, "GPREEMPT_BACKEND=kfd")
	if len(all) == 0 {
		t.Fatalf("no entry\n%s", lastWords(t))
	}
	for field, want := range map[string]string{
		"PRIORITY": "6", "SYSLOG_IDENTIFIER": "gpreemptd", "_TRANSPORT": "journal", "GPREEMPT_SOCKET": path, "GPREEMPT_GPUS": "0",
	} {
		if got := all[0][field]; got != want {
			t.Errorf("%s is %v, want %s", field, got, want)
		}
	}
	if got, want := fmt.Sprint(all[0]["MESSAGE"]), "serving: socket="+path; !strings.HasPrefix(got, want) {
		t.Errorf("MESSAGE is %s, want %s...", got, want)
	}
}

// steady checks that the service continues as one process without a restart.
func steady(t *testing.T) {
	t.Helper()
	pid, began := property(t, "MainPID"), time.Now()
	eventually(t, "5 s", guestAtOnce, func() bool { return time.Since(began) > 5*time.Second })
	if got := property(t, "MainPID"); got != pid || property(t, "ActiveState") != "active" || number(t, "NRestarts") != 0 {
		t.Errorf("it was process %s, and is %s after %s restarts\n%s", pid, got, property(t, "NRestarts"), lastWords(t))
	}
}

// loadDriver loads amdgpu, with what it needs, unless it is there.
func loadDriver(t *testing.T) {
	t.Helper()
	modules, err := filepath.Glob("/modules/*.ko")
	if err != nil || len(modules) == 0 {
		t.Fatalf("no modules: %v", err)
	}
	for _, module := range modules {
		if status, out := command(t, "insmod", module); status != 0 && !strings.Contains(out, "File exists") {
			t.Fatalf("insmod %s: %s", module, out)
		}
	}
	if _, err := os.Stat("/dev/kfd"); err != nil {
		t.Fatal(err)
	}
}

// opened returns what a process has open. It opens and closes files meanwhile.
func opened(t *testing.T, pid string) (names []string) {
	t.Helper()
	dir := filepath.Join("/proc", pid, "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		name, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	return names
}

func TestGuestDriverThatComesLateIsTakenUpAndNoGPUIsNoCrash(t *testing.T) {
	inGuest(t)
	steady(t)
	before := property(t, "MainPID")
	loadDriver(t)
	eventually(t, "the daemon that knows the driver", nowAndThen, func() bool {
		return property(t, "MainPID") != before && property(t, "ActiveState") == "active" && strings.Contains(property(t, "StatusText"), "has no compute GPU")
	})
	pid := property(t, "MainPID")
	if opened := opened(t, pid); !slices.Contains(opened, "/dev/kfd") {
		t.Errorf("it has not opened /dev/kfd: %q\n%s", opened, answers(t))
	}
	steady(t)
	t.Logf("status: %s", property(t, "StatusText"))
	t.Logf("memory: %d KiB of its cgroup", number(t, "MemoryCurrent")>>10)
}

package e2e

// The tests named TestGuest run in a guest whose first process is systemd, and test the deb: make vmtest.
// They run in the order of the files' names, on one machine: first the package from its installation to its
// purge, then what it installs without the driver, then with the real driver and no GPU, and last with a FAKED
// list of GPU processes that names a real process, for the freezer to stop.

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// guestEnv is set in a guest: the tests in it change the machine they run on.
const guestEnv = "GPREEMPT_GUEST"

// inGuest skips a test that changes the machine it runs on.
func inGuest(t *testing.T) {
	t.Helper()
	if os.Getenv(guestEnv) != "systemd" {
		t.Skip("it changes the machine it runs on: make vmtest runs it in a guest")
	}
}

// guestTimeout bounds every wait. It only decides how long a broken test takes.
const guestTimeout = 3 * time.Minute

// guestCall is the --timeout of gpctl in a guest, where a daemon may take long to start.
const guestCall = "2m"

// command runs a program and returns its exit status and what it wrote.
func command(t *testing.T, name string, args ...string) (status int, out string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), guestTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	text, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(text)
}

// must is command, for one that succeeds.
func must(t *testing.T, name string, args ...string) string {
	t.Helper()
	status, out := command(t, name, args...)
	if status != 0 {
		t.Fatalf("%s %s: exit status %d: %s\n%s", name, strings.Join(args, " "), status, out, lastWords(t))
	}
	return out
}

// lastWords is what the journal has of the daemon.
func lastWords(t *testing.T) string {
	t.Helper()
	_, out := command(t, "journalctl", "--no-pager", "-n", "60", "-o", "short-monotonic", "-u", "gpreemptd.service", "-u", "gpreemptd.socket")
	return out
}

const (
	service = "gpreemptd.service"
	socket  = "gpreemptd.socket"
	path    = "/run/gpreempt/gpreemptd.sock"
)

// property returns what systemd says of the service.
func property(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(must(t, "systemctl", "show", "--value", "-p", name, service))
}

func number(t *testing.T, name string) int {
	t.Helper()
	n, err := strconv.Atoi(property(t, name))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// How often it is looked: at a file, and where looking takes a program, which is slow on
// an emulated CPU and holds up what is looked at.
const (
	guestAtOnce = 5 * time.Millisecond
	nowAndThen  = 200 * time.Millisecond
)

// eventually waits until cond holds.
func eventually(t *testing.T, what string, every time.Duration, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for late := time.After(guestTimeout); ; {
		if cond() {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("%s: not within %v\n%s\n%s", what, guestTimeout, must(t, "systemctl", "show", service, "-p", "ActiveState,SubState,Result,StatusText,NRestarts,MainPID"), lastWords(t))
		}
	}
}

// answers is whether gpctl gets an answer.
func answers(t *testing.T) string {
	t.Helper()
	return must(t, "gpctl", "--socket", path, "--timeout", guestCall, "status")
}

// entries returns what the journal has of a unit since the boot, by field.
func entries(t *testing.T, match ...string) []map[string]any {
	t.Helper()
	must(t, "journalctl", "--sync")
	var all []map[string]any
	for line := range strings.Lines(must(t, "journalctl", append([]string{"--no-pager", "-o", "json", "_SYSTEMD_UNIT=" + service}, match...)...)) {
		var e map[string]any
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		all = append(all, e)
	}
	return all
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(name[:strings.LastIndexByte(name, '/')], 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

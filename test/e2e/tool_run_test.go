package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// gpctl run becomes the command: how it ends is how gpctl ends, for the shell too.
func TestRunPassesExitCodesAndSignals(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	for script, want := range map[string]int{"exit 0": 0, "exit 7": 7, "kill -TERM $$": 128 + 15, "kill -KILL $$": 128 + 9} {
		for _, socket := range []string{d.socket, t.TempDir() + "/none"} {
			shell := fmt.Sprintf("%q --socket %q run --class offline -- /bin/sh -c '%s'; exit $?", gpctl, socket, script)
			r := d.ctl("run", "-q", "--class", "online", "--", "/bin/sh", "-c", shell)
			unknown := strings.Contains(r.Err, "what the daemon makes of it is unknown: cannot reach the daemon")
			if r.Code != want || unknown == (socket == d.socket) {
				t.Errorf("%s at %s: exit status %d, want %d; %q", script, socket, r.Code, want, r.Err)
			}
		}
	}
}

// The report is about the process below the command that has queues, and is made by a process that
// the command is not the parent of.
func TestRunReportsWhatTheDaemonMakesOfTheCommand(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(atOnce)
	script := fmt.Sprintf("%q work --queues 1 --duration 500 --runtime; wait", kfdemuBinary)
	job := m.spawn(m.Command(context.Background(), gpctl, "--socket", d.socket, "run", "--class", "offline", "--priority", "3", "--", "/bin/sh", "-c", script))
	t.Cleanup(func() { _ = job.in.Close() }) // which ends the worker below the shell, if it has not ended
	ready := job.await("ready")
	want := fmt.Sprintf("gpctl: kfdemu (%d) is offline, priority 3, by tag: ", ready.PID)
	d.eventually("the report is printed", func() bool { return strings.Contains(job.log.String(), want) })
	if got := strings.Count(job.log.String(), "gpctl: "); got != 1 {
		t.Errorf("%d lines:\n%s", got, job.log)
	}
	job.stop()
}

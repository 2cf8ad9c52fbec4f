package e2e

import (
	"context"
	"fmt"
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
			if r := d.ctl("run", "--class", "online", "--", "/bin/sh", "-c", shell); r.Code != want {
				t.Errorf("%s at %s: exit status %d, want %d; %q", script, socket, r.Code, want, r.Err)
			}
		}
	}
}

// The tag is inherited: the process below the command that has queues has the class.
func TestRunTagsTheProcessesOfTheCommand(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(atOnce)
	script := fmt.Sprintf("%q work --queues 1 --duration 500 --runtime; wait", kfdemuBinary)
	job := m.spawn(m.Command(context.Background(), gpctl, "--socket", d.socket, "run", "--class", "offline", "--priority", "3", "--", "/bin/sh",
		"-c", script))
	t.Cleanup(func() { _ = job.in.Close() }) // which ends the worker below the shell, if it has not ended
	ready := job.await("ready")
	var explained result
	d.eventually("the process is explained", func() bool {
		explained = d.ctl("target", "explain", fmt.Sprint(ready.PID))
		return explained.Code == 0
	})
	says(t, explained.Out, "offline, priority 3, by tag")
	job.stop()
}

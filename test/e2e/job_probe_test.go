package e2e

import (
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// A probe of Kubernetes asks the program of a job: an HTTP server in it, or a command that asks it. The worker's
// command "report" is such a question.
func TestAProbeIsAnsweredDuringASuspensionUnlessTheProgramIsStopped(t *testing.T) {
	t.Parallel()
	for _, mechanism := range []string{"dbgtrap", "freezer"} {
		t.Run(mechanism, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{})
			w := m.work("--duration", "500", "--runtime")
			d := m.start(atOnce + "mechanisms: [" + mechanism + "]\n")
			d.heldBy(mechanism, w, 1)
			lease, answer := d.ask(longest)
			checkSaid(t, "suspended", said{true, done, 1}, answer)

			w.tell("report")
			if mechanism == "dbgtrap" {
				w.await("report")
				m.checkFrozen(w) // it was still suspended when it answered
			} else if m.checkAway(mechanism, w, 1); strings.Contains(w.lines(), `"report"`) {
				t.Errorf("a stopped program answered:\n%s", w.lines())
			}
			d.complete(lease)
			if mechanism == "freezer" {
				w.await("report") // the answer comes with the resume, too late for a probe
			}
			m.awaitProgress(w)
			w.stop()
		})
	}
}

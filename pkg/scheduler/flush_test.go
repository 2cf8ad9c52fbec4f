package scheduler

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// flushed is a machine that is notified of the end of each step.
type flushed struct{ *machine }

func (f flushed) Flush() { f.note("flush") }

func TestRunnerFlushesAfterTheActionsOfEachStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		runner := NewRunner(m.core, m, testutil.NewTimer(), flushed{m}, func(Record) {})
		m.Runner = runner
		m.see(beta)
		m.takeLog()
		m.announce(t, request())
		want := []string{"0s suspend 100@1", "0s suspend 101@1", "0s flush"}
		if diff := cmp.Diff(want, m.takeLog()); diff != "" {
			t.Errorf("log (-want +got):\n%s", diff)
		}
		time.Sleep(time.Second)
	})
}

package criu

import (
	"slices"
	"testing"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// The daemon dies before, in and after each call that it makes in a session, on each driver;
// all that again until it died GPREEMPT_CRASHES times. The next one resumes what is in the
// journal.
func TestDeathAtEveryCallIsUndoneByTheNextDaemon(t *testing.T) {
	deaths, paused := 0, 0
	for wanted := testutil.Number(t, "GPREEMPT_CRASHES", 1); deaths < wanted; {
		before := deaths
		for _, profile := range driver.Profiles() {
			for _, stage := range []kfdtest.Stage{kfdtest.Before, kfdtest.Hardware, kfdtest.After} {
				for nth := 1; ; nth++ {
					w := newWorld(profile, memory{})
					p := w.spawn(t)
					death := w.Inject(kfdtest.Fault{Caller: w.daemon, Stage: stage, Nth: nth, Do: w.daemon.Kill})
					w.session(t, p)
					death.Remove()
					if death.Hits() == 0 {
						break
					}
					deaths++
					if slices.ContainsFunc(w.contexts(p), func(c contextState) bool { return c.Paused }) {
						paused++
					}
					if err := w.restart(); err != nil {
						t.Fatalf("%s, %v %d: %v", profile, stage, nth, err)
					}
					w.mustNote(t)
					w.mustBe(t, p, runs)
				}
			}
		}
		if deaths == before {
			t.Fatal("no daemon died")
		}
	}
	t.Logf("%d deaths, %d of them with the process paused; every queue runs", deaths, paused)
	if paused == 0 {
		t.Error("no daemon died while the process was paused: nothing was tested")
	}
}

// session is what a daemon does with a process, up to its death. Errors are that.
func (w *world) session(t *testing.T, p *kfdtest.Process) {
	t.Helper()
	s, err := w.mechanism().Attach(t.Context(), p.Key())
	if err != nil {
		return
	}
	for range 2 {
		_ = s.Suspend(t.Context(), nil)
		_ = s.Resume(t.Context())
	}
	_ = s.Suspend(t.Context(), nil)
	_ = s.Close()
}

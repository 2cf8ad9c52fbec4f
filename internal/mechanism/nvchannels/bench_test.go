package nvchannels

import (
	"context"
	"testing"

	"github.com/gpreempt/gpreempt/internal/mechanism"
)

// BenchmarkSuspendAndResume is the mechanism's own part, on the fake driver, whose calls take no time.
func BenchmarkSuspendAndResume(b *testing.B) {
	w := newWorld(b)
	var sessions []mechanism.Session
	w.machine.Start(target)
	sessions = append(sessions, w.attach())
	for b.Loop() {
		if err := w.m.SuspendAll(context.Background(), sessions)[0]; err != nil {
			b.Fatal(err)
		}
		if err := w.m.ResumeAll(context.Background(), sessions)[0]; err != nil {
			b.Fatal(err)
		}
	}
	if err := sessions[0].Close(); err != nil {
		b.Fatal(err)
	}
}

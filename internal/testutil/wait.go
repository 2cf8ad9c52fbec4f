package testutil

import (
	"context"
	"runtime"
	"testing"
	"time"
)

// WaitTime is how long a test waits for what must happen: much longer than it takes, because a
// host may stand still for seconds, and shorter than the time-out of a run of tests.
const WaitTime = time.Minute

// Receive returns the next value of a channel, or its zero value once it is closed. It fails the
// test if neither happens; what says what the test waits for.
func Receive[T any](tb testing.TB, c <-chan T, what string) T {
	tb.Helper()
	late := time.NewTimer(WaitTime)
	defer late.Stop()
	select {
	case v := <-c:
		return v
	case <-late.C:
		tb.Fatalf("%s: not within %v", what, WaitTime)
		panic("not reached")
	}
}

// Until returns when cond is true, which it calls all the time. It fails the test if that does
// not happen.
func Until(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	for late := time.Now().Add(WaitTime); !cond(); runtime.Gosched() {
		if time.Now().After(late) {
			tb.Fatalf("%s: not within %v", what, WaitTime)
		}
	}
}

// Context returns a context for calls and streams that must end: it ends with the test or after
// WaitTime, so that a call that hangs fails with context.DeadlineExceeded.
func Context(tb testing.TB) context.Context {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), WaitTime)
	tb.Cleanup(cancel)
	return ctx
}

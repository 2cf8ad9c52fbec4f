package scheduler

import "time"

// Retry bounds the wait before something that failed is tried again.
type Retry struct{ First, Last time.Duration }

// The bounds, for everything that is retried.
var (
	// RetryAction is for an action on a target: an attach, a resume or a detach that
	// failed, and the attach after a session that failed.
	RetryAction = Retry{100 * time.Millisecond, 5 * time.Second}
	// RetryMechanism is for a mechanism that failed on a target, which may have others.
	RetryMechanism = Retry{10 * time.Second, time.Hour}
)

// Backoff counts the failures of one thing. Its zero value has none.
type Backoff struct {
	failures int
	until    Time
}

// Fail counts a failure at now and returns when to try again: after First, and after
// twice the wait before for each further failure, up to Last. The count restarts
// when the last wait ended more than Last ago.
func (b *Backoff) Fail(now Time, r Retry) Time {
	if now > b.until+r.Last {
		b.failures = 0
	}
	wait := r.Last
	if b.failures < 16 { // First << 16 is more than any Last
		wait = min(r.First<<b.failures, r.Last)
	}
	b.failures++
	b.until = now + wait
	return b.until
}

// Again counts nothing and returns now + First: for a failure that says nothing about
// the next attempt.
func (b *Backoff) Again(now Time, r Retry) Time {
	b.until = now + r.First
	return b.until
}

// Until returns when the last wait ends; the past when nothing has failed.
func (b *Backoff) Until() Time { return b.until }

// SearchInterval is the least time between two attempts to attach a better mechanism to
// a target that has one.
const SearchInterval = time.Minute

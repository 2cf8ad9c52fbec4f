package discovery

import (
	"math"
	"time"
)

// Pace decides how long to wait from one reading of a source to the next: the
// shortest time after a change, twice as long each time while nothing changes, and
// long enough that the reading takes no more than about a hundredth of the time; the
// longest time at most. Where a single reading takes more than a hundredth of that,
// so does the reading as a whole: how old the data gets comes first, since on a busy
// machine everything takes long.
//
// It is not safe for several goroutines.
type Pace struct {
	shortest, longest time.Duration
	// pause is what the last reading led to, but for how long it took.
	pause time.Duration
	// owed is how much pause the readings so far still call for. Up to the longest
	// pause of it is let pass, so that one slow reading among many delays nothing.
	owed time.Duration
}

// share is how many times as long as it reads a reader pauses, on average.
const share = 99

// aeon is so long that no sum here is too large for a Duration.
const aeon = math.MaxInt64 / 8

// NewPace returns a Pace between the two pauses, as Set takes them.
func NewPace(shortest, longest time.Duration) *Pace {
	p := &Pace{}
	p.Set(shortest, longest)
	return p
}

// Set replaces the two pauses. Negative ones are 0, and a longest below shortest
// is the same as it.
func (p *Pace) Set(shortest, longest time.Duration) {
	p.shortest = min(max(shortest, 0), aeon)
	p.longest = min(max(longest, p.shortest), aeon)
}

// Next returns the pause after a reading that took so long and did or did not find
// a change, from shortest to longest.
//
// In any run of readings of which none takes more than 1/99 of the longest pause, 99
// times what they took is at most the sum of the pauses and one longest pause more.
func (p *Pace) Next(changed bool, took time.Duration) time.Duration {
	if changed {
		p.pause = p.shortest
	} else {
		p.pause = min(max(2*p.pause, p.shortest, time.Millisecond), p.longest)
	}
	p.owed = min(p.owed+share*min(max(took, 0), aeon/share), 2*p.longest)
	pause := max(p.pause, p.owed-p.longest)
	p.owed = max(p.owed-pause, 0)
	return pause
}

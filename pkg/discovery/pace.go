package discovery

import (
	"math"
	"time"
)

// Pace determines the pause between readings of a source: the shortest after a change,
// twice as long each time while nothing changes, and long enough that reading takes at
// most about a hundredth of the time; but never longer than the longest pause. If a
// single reading takes more than a hundredth of that, reading takes a larger share: the
// age of the data has priority, since on a busy machine everything is slow.
//
// It is not safe for concurrent use.
type Pace struct {
	shortest, longest time.Duration
	// pause is the last pause without regard to the duration of the reading.
	pause time.Duration
	// pending is the pause that the readings so far still require. Up to the longest
	// pause of it is ignored, so that one slow reading among many delays nothing.
	pending time.Duration
}

// share is the ratio of pauses to readings, on average.
const share = 99

// aeon bounds durations so that their sums do not overflow.
const aeon = math.MaxInt64 / 8

// NewPace returns a Pace with the two pauses; see Set.
func NewPace(shortest, longest time.Duration) *Pace {
	p := &Pace{}
	p.Set(shortest, longest)
	return p
}

// Set replaces the two pauses. Negative values become 0, and a longest pause below the
// shortest becomes equal to it.
func (p *Pace) Set(shortest, longest time.Duration) {
	p.shortest = min(max(shortest, 0), aeon)
	p.longest = min(max(longest, p.shortest), aeon)
}

// Next returns the pause after a reading with the given duration and result, from
// shortest to longest.
//
// In any run of readings of which none takes more than 1/99 of the longest pause, 99
// times their duration is at most the sum of the pauses plus one longest pause.
func (p *Pace) Next(changed bool, took time.Duration) time.Duration {
	if changed {
		p.pause = p.shortest
	} else {
		p.pause = min(max(2*p.pause, p.shortest, time.Millisecond), p.longest)
	}
	p.pending = min(p.pending+share*min(max(took, 0), aeon/share), 2*p.longest)
	pause := max(p.pause, p.pending-p.longest)
	p.pending = max(p.pending-pause, 0)
	return pause
}

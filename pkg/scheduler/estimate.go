package scheduler

import "time"

// estimate learns a duration from samples: a smoothed mean and a smoothed mean
// deviation, the estimator TCP uses for round trips (RFC 6298). Integer
// arithmetic keeps it the same on every machine.
type estimate struct {
	mean, dev time.Duration
	samples   uint64
}

func (e *estimate) learn(sample time.Duration) {
	e.samples++
	if e.samples == 1 {
		e.mean, e.dev = sample, sample/2
		return
	}
	err := sample - e.mean
	e.mean += err / 8
	e.dev += (max(err, -err) - e.dev) / 4
}

// likely is a bound that most samples stay below.
func (e *estimate) likely() time.Duration { return e.mean + 2*e.dev }

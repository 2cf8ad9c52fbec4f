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

// high is a bound that few samples exceed.
func (e *estimate) high() time.Duration { return e.mean + 4*e.dev }

// likely is a bound that most samples stay below.
func (e *estimate) likely() time.Duration { return e.mean + 2*e.dev }

// learnWork learns how long a lease of the client needs on quiet GPUs, from a lease whose
// GPUs were quiet for all of its work and that was completed or became idle.
func (c *Core) learnWork(l *lease, end LeaseEnd) {
	if (end != EndCompleted && end != EndIdle) || !l.quiet || l.target != nil {
		return
	}
	if begin := max(l.heldAt, l.created+l.req.ETA); begin <= c.now && l.heldAt <= max(l.created+l.req.ETA, l.created+l.answer.Waited) {
		l.client.work.learn(c.now - begin)
	}
}

package gpumodel

import (
	"math"
	"slices"
	"time"
)

// full is the whole of a resource. Demands are in millionths, so that their sum
// does not depend on the order they are added in.
const full = 1_000_000

// pool is a resource shared by what runs on it: the compute units of a GPU, or
// its copy link. Everything on it runs at the same speed: 1 while the demands fit,
// less in proportion when they do not.
type pool struct {
	m       *Machine
	running []*packet
	demand  int64
	// settled is up to when the remaining work of running is worked out.
	settled time.Duration
	finish  timer
	// ended takes a packet that has run to its end.
	ended func(*packet)
}

func (p *pool) speed() float64 {
	if p.demand <= full {
		return 1
	}
	return full / float64(p.demand)
}

// settle works out what has been done since the last change.
func (p *pool) settle() {
	if done := float64(p.m.now-p.settled) * p.speed(); done > 0 {
		for _, k := range p.running {
			k.remaining -= done
		}
	}
	p.settled = p.m.now
}

// add starts or continues k. The caller calls schedule afterwards.
func (p *pool) add(k *packet) {
	p.settle()
	p.running = append(p.running, k)
	p.demand += k.demand
}

// remove stops k, which keeps its place. The caller calls schedule afterwards.
func (p *pool) remove(k *packet) {
	p.settle()
	i := slices.Index(p.running, k)
	p.running = slices.Delete(p.running, i, i+1)
	p.demand -= k.demand
}

// clear stops everything.
func (p *pool) clear() {
	p.settle()
	clear(p.running)
	p.running = p.running[:0]
	p.demand = 0
	p.schedule()
}

// schedule sets the time at which the first packet ends.
func (p *pool) schedule() {
	if len(p.running) == 0 {
		p.m.timers.stop(&p.finish)
		return
	}
	least := math.Inf(1)
	for _, k := range p.running {
		least = min(least, k.remaining)
	}
	wait := time.Duration(math.Ceil(max(least, 0) / p.speed()))
	p.m.timers.start(&p.finish, p.settled+wait)
}

// rounding is how much of a nanosecond of work may be left undone when speeds
// below 1 do not divide evenly.
const rounding = 1e-3

// expire ends what has run to its end.
func (p *pool) expire() {
	p.settle()
	for i := 0; i < len(p.running); {
		k := p.running[i]
		if k.remaining > rounding {
			i++
			continue
		}
		p.running = slices.Delete(p.running, i, i+1)
		p.demand -= k.demand
		// What ended starts puts at the end, so the rest of the walk is unharmed.
		p.ended(k)
	}
	p.schedule()
}

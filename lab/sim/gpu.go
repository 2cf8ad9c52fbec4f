package sim

import (
	"math"
	"slices"
	"sort"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// gpu is one GPU: who runs on it and how fast.
type gpu struct {
	engine *engine
	index  int

	online, offline []*stream // that run, unless everything is stopped
	// cycles is the number of runlist cycles in progress: nothing runs.
	cycles int
	// mute is the class of work whose turn it is not, under TimeSlice.
	mute    turn
	runlist runlist

	at                      time.Duration // progress is accounted for up to here
	onSpeed, offSpeed       float64
	due                     event // the next stream that reaches its stop
	dirty                   bool
	lock                    []*operation // that change the runlist, one after the other
	operations              int          // on its processes, in progress
	onlineSpan, offlineSpan evidence.Span
}

// turn is a class of work.
type turn uint8

const (
	nobody turn = iota
	onlineTurn
	offlineTurn
)

// stream is a queue on one GPU. Positions are in nanoseconds of work, as alone on the GPU.
type stream struct {
	gpu       *gpu
	occupancy float64
	kernels   *kernels
	isOnline  bool

	begin, pos float64
	// drainAt is the end of the last kernel in flight when the stream is to stop, and stepEnd
	// that of the step or request; infinite for none. The stream stops at the first of them.
	drainAt, stepEnd float64
	running          bool
	reached          func() // of an online stream
	// unmapped: it has no slot, because it is suspended or not all queues fit. mappedFor is the
	// time in which an online stream had one.
	unmapped  bool
	mappedFor time.Duration

	// The rest is of offline streams.
	process *process
	allowed bool // by the way
	// suspended by an operation
	suspended bool
	pending   int  // steps that have arrived
	endless   bool // steps follow each other
	stepped   bool // each step needs leave
}

// kernels is a sequence that repeats.
type kernels struct {
	ends []float64 // of each, from the beginning of the sequence
}

func newKernels(durations []time.Duration) *kernels {
	k := &kernels{}
	sum := 0.0
	for _, d := range durations {
		sum += float64(d)
		k.ends = append(k.ends, sum)
	}
	return k
}

func (k *kernels) total() float64 { return k.ends[len(k.ends)-1] }

// at returns the round in which a position is, the kernel there, and its begin.
func (k *kernels) at(pos float64) (round float64, index int, begin float64) {
	total := k.total()
	round = math.Floor(pos / total)
	in := pos - round*total
	index = min(sort.Search(len(k.ends), func(i int) bool { return k.ends[i] > in+fluidError }), len(k.ends)-1)
	if index > 0 {
		begin = k.ends[index-1]
	}
	return round, index, round*total + begin
}

// drain returns the end of the nth kernel from a position on, the one in progress included. A
// position between two kernels has none in progress.
func (k *kernels) drain(pos float64, n int) float64 {
	round, index, begin := k.at(pos)
	if pos <= begin+fluidError {
		n--
	}
	if n == 0 {
		return pos
	}
	last := index + n - 1
	return (round+float64(last/len(k.ends)))*k.total() + k.ends[last%len(k.ends)]
}

// fluidError is the precision of positions in nanoseconds: far below any kernel, far above the
// rounding of a position after a day.
const fluidError = 0.05

// advance accounts for the progress since the last time.
func (g *gpu) advance() {
	from, dt := g.at, float64(g.engine.now-g.at)
	g.at = g.engine.now
	if dt == 0 {
		return
	}
	g.countMapped(from)
	if d := dt * g.onSpeed; d > 0 {
		for _, s := range g.online {
			if !s.unmapped {
				s.pos = min(s.pos+d, s.stopAt())
			}
		}
	}
	if d := dt * g.offSpeed; d > 0 {
		for _, s := range g.offline {
			if !s.unmapped {
				s.pos = min(s.pos+d, s.stopAt())
			}
		}
	}
}

func (s *stream) stopAt() float64 { return min(s.drainAt, s.stepEnd) }

// plan computes the speeds and when the next stream reaches its stop.
func (g *gpu) plan() {
	e := g.engine
	g.onSpeed, g.offSpeed = g.speeds()
	next := math.Inf(1)
	if g.onSpeed > 0 {
		for _, s := range g.online {
			if !s.unmapped {
				next = min(next, (s.stopAt()-s.pos)/g.onSpeed)
			}
		}
	}
	if g.offSpeed > 0 {
		for _, s := range g.offline {
			if !s.unmapped {
				next = min(next, (s.stopAt()-s.pos)/g.offSpeed)
			}
		}
	}
	if math.IsInf(next, 1) || next > float64(maxAhead) {
		e.events.clear(&g.due)
	} else {
		e.events.set(&g.due, e.now+time.Duration(math.Ceil(next)))
	}
	g.spans()
}

// maxAhead is longer than any run.
const maxAhead = 1000 * time.Hour

// speeds returns how fast online and offline streams progress, relative to alone.
func (g *gpu) speeds() (on, off float64) {
	if g.cycles > 0 {
		return 0, 0
	}
	var wantOn, wantOff float64
	n := 0
	if g.mute != onlineTurn {
		for _, s := range g.online {
			if !s.unmapped {
				wantOn += s.occupancy
				n++
			}
		}
	}
	if g.mute != offlineTurn {
		for _, s := range g.offline {
			if !s.unmapped {
				wantOff += s.occupancy
				n++
			}
		}
	}
	if wantOn+wantOff > 1 {
		room, weight := 1.0, g.engine.o.Sharing.Weight
		if n > 1 {
			room += g.engine.o.Sharing.Gain
		}
		if weight == 0 {
			weight = 1
		}
		getOn, getOff := share(room, wantOn, wantOff, weight)
		if wantOn > 0 {
			on = getOn / wantOn
		}
		if wantOff > 0 {
			off = getOff / wantOff
		}
		return on, off
	}
	if wantOn > 0 {
		on = 1
	}
	if wantOff > 0 {
		off = 1
	}
	return on, off
}

// share divides room by weighted demand. Nobody gets more than it wants.
func share(room, wantOn, wantOff, weight float64) (on, off float64) {
	on = min(wantOn, room*wantOn/(wantOn+weight*wantOff))
	off = min(wantOff, room-on)
	return min(wantOn, room-off), off
}

// reach handles the streams that are at their stop.
func (e *engine) reach(g *gpu) {
	e.touch(g)
	// A stream that stops may start or stop others of the GPU.
	for {
		i := slices.IndexFunc(g.online, (*stream).atStop)
		if i < 0 {
			break
		}
		s := g.online[i]
		s.halt()
		s.reached()
	}
	for {
		i := slices.IndexFunc(g.offline, (*stream).atStop)
		if i < 0 {
			break
		}
		g.offline[i].atEnd()
	}
}

func (s *stream) atStop() bool { return s.pos >= s.stopAt()-fluidError }

// run and halt start and stop a stream.
func (s *stream) run() {
	if s.running {
		return
	}
	s.running = true
	s.gpu.engine.touch(s.gpu)
	list := s.list()
	*list = append(*list, s)
}

func (s *stream) halt() {
	if !s.running {
		return
	}
	s.running = false
	s.gpu.engine.touch(s.gpu)
	list := s.list()
	i := slices.Index(*list, s)
	*list = slices.Delete(*list, i, i+1)
}

func (s *stream) list() *[]*stream {
	if s.isOnline {
		return &s.gpu.online
	}
	return &s.gpu.offline
}

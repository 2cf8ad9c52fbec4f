package scheduler

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"time"
)

// The search visits every situation that some history of moves leads to, cheapest first: an
// ordinary move costs 1, a disturbance more. The first violation has a cheapest history. It
// keeps no states, only their fingerprints and, for each, the state before it and the move.
// To continue from a state it goes back to the last common state of the two histories, which
// it has an image of.

// disturbance is the cost of a move that is not part of undisturbed work.
const disturbance = 4

func (m move) ordinary() bool {
	switch m.kind {
	case moveClock, moveTick, moveAnnounce, moveComplete, movePerform, moveReport, moveReportBirth, moveReportDeath, moveReportLoss, moveUndebug, moveHung, movePark:
		return true
	default:
		return false
	}
}

// price returns the cost of a move. In the search for a bug all cost the same: few
// disturbances are searched then, and the history that is found has the fewest moves.
func (s *search) price(m move) uint8 {
	if m.ordinary() || s.x.bug != nil {
		return 1
	}
	return disturbance
}

// visited is a state by its cheapest history.
type visited struct {
	before      uint32
	depth, cost uint8
	done        bool // its moves were made
	move        move
}

// visits are the visited states by fingerprint.
type visits struct {
	nodes []visited
	slots []fingerprint
	node  []uint32 // of a slot
}

// find returns the slot of f, or the free one for it.
func (v *visits) find(f fingerprint) uint64 {
	mask := uint64(len(v.slots) - 1)
	at := f[0] & mask
	for v.slots[at] != f && v.slots[at] != (fingerprint{}) {
		at = (at + 1) & mask
	}
	return at
}

// reach takes in that a state was reached. It returns its number and whether that is new, or
// cheaper than before.
func (v *visits) reach(f fingerprint, how visited) (n uint32, isNew, cheaper bool) {
	if len(v.nodes)*4 >= len(v.slots)*3 {
		slots, node := v.slots, v.node
		v.slots = make([]fingerprint, max(1<<12, 2*len(slots)))
		v.node = make([]uint32, len(v.slots))
		for i, f := range slots {
			if f != (fingerprint{}) {
				at := v.find(f)
				v.slots[at], v.node[at] = f, node[i]
			}
		}
	}
	at := v.find(f)
	if v.slots[at] == f {
		n = v.node[at]
		if known := &v.nodes[n]; !known.done && how.cost < known.cost {
			*known = how
			return n, false, true
		}
		return n, false, false
	}
	n = uint32(len(v.nodes))
	v.slots[at], v.node[at] = f, n
	v.nodes = append(v.nodes, how)
	return n, true, true
}

// found is what a search found out.
type found struct {
	states, transitions int
	// cost is the greatest cost up to which every history was followed; longest is the
	// number of moves of the longest of them.
	cost, longest int
	took          time.Duration
	// violation is nil if every promise was kept; history leads to it.
	violation error
	history   []string
}

func (f found) String() string {
	return fmt.Sprintf("%d states, %d transitions, every history of cost %d (up to %d moves), %v", f.states, f.transitions, f.cost, f.longest, f.took.Round(time.Second))
}

// search is the search in one layout.
type search struct {
	x     *explored
	canon *canon
	visits
	// queue are the states whose moves are to be made, by cost.
	queue [][]uint32
	// path are the states from the first one to that which the core is in, with an image of
	// each.
	path []waypoint
	found
	least []byte // of fingerprint
	ties  []int
	// keep is how many of a million transitions into a known state are kept in merged.
	keep   int
	merged []merge
	// bad is the state that the cheapest violation led to.
	bad uint32
}

type waypoint struct {
	node  uint32
	image *image
	situation
}

// notFollowed are the fields that need not be saved.
var notFollowed = map[string]bool{"Core.actions": true}

// merge is a transition into a state that was known.
type merge struct {
	into, from uint32
	move       move
}

// explore follows every history in a layout until there are so many states. progress is
// called for each further cost.
func explore(l *layout, bug *seededBug, states int, progress func(found)) (found, error) {
	s, err := newSearch(l, bug)
	if err != nil {
		return found{}, err
	}
	if err = s.run(states, progress); err == nil && s.violation != nil {
		s.history, err = s.describe(l, bug, s.bad)
	}
	return s.found, err
}

func newSearch(l *layout, bug *seededBug) (*search, error) {
	x, err := newExplored(l)
	if err != nil {
		return nil, err
	}
	x.bug = bug
	s := &search{x: x, canon: newCanon(), queue: make([][]uint32, 256)}
	s.reach(s.fingerprint(), visited{})
	s.queue[0] = []uint32{0}
	s.path = []waypoint{{0, capture(x.core, notFollowed), x.situation}}
	return s, nil
}

// run searches. A cost of 200 is beyond any memory.
func (s *search) run(states int, progress func(found)) error {
	start := time.Now()
	for s.cost = 0; s.cost < 200; s.cost++ {
		for _, n := range s.queue[s.cost] {
			if node := &s.nodes[n]; node.done || int(node.cost) != s.cost {
				continue // it was reached at less cost
			}
			if s.violation != nil && s.cost+1 >= int(s.nodes[s.bad].cost) || len(s.nodes) >= states {
				s.states, s.took = len(s.nodes), time.Since(start)
				return nil
			}
			if err := s.visit(n); err != nil {
				return err
			}
		}
		s.queue[s.cost] = nil
		s.states, s.took = len(s.nodes), time.Since(start)
		progress(s.found)
	}
	return nil
}

// visit makes every move of a state.
func (s *search) visit(n uint32) error {
	node := &s.nodes[n]
	node.done = true
	s.longest = max(s.longest, int(node.depth))
	if err := s.enter(n); err != nil {
		return fmt.Errorf("a history led elsewhere when it was repeated: %w", err)
	}
	here, from := &s.path[len(s.path)-1], *node
	for i, m := range slices.Clone(s.x.possible()) {
		if i > 0 {
			here.image.restore()
			s.x.situation = here.situation
		}
		s.transitions++
		broken := s.x.make(m)
		to, isNew, cheaper := s.reach(s.fingerprint(), visited{before: n, depth: from.depth + 1, cost: from.cost + s.price(m), move: m})
		if isNew && broken == nil {
			broken = s.x.checkDeep()
		}
		if !isNew && s.transitions*7919%1_000_000 < s.keep {
			s.merged = append(s.merged, merge{to, n, m})
		}
		switch {
		case broken != nil:
			s.nodes[to].done = true
			if s.violation == nil || s.nodes[to].cost < s.nodes[s.bad].cost {
				s.violation, s.bad = broken, to
			}
		case cheaper:
			s.queue[s.nodes[to].cost] = append(s.queue[s.nodes[to].cost], to)
		}
	}
	return nil
}

// enter brings the core into a visited state.
func (s *search) enter(n uint32) error {
	var missing []uint32
	for at := n; ; at = s.nodes[at].before {
		depth := int(s.nodes[at].depth)
		if depth < len(s.path) && s.path[depth].node == at {
			s.path = s.path[:depth+1]
			break
		}
		missing = append(missing, at)
	}
	last := &s.path[len(s.path)-1]
	last.image.restore()
	s.x.situation = last.situation
	for _, n := range slices.Backward(missing) {
		if err := s.x.make(s.nodes[n].move); err != nil {
			return err
		}
		s.path = append(s.path, waypoint{n, capture(s.x.core, notFollowed), s.x.situation})
	}
	return nil
}

// describe returns how a state is reached.
func (s *search) describe(l *layout, bug *seededBug, n uint32) ([]string, error) {
	var moves []move
	for ; n != 0; n = s.nodes[n].before {
		moves = append(moves, s.nodes[n].move)
	}
	x, err := newExplored(l)
	if err != nil {
		return nil, err
	}
	x.bug = bug
	var texts []string
	for i, m := range slices.Backward(moves) {
		texts = append(texts, fmt.Sprintf("%2d. %v: %s", len(texts)+1, x.now-time.Hour, x.text(m)))
		if err := x.make(m); err != nil && i > 0 {
			return nil, fmt.Errorf("the history broke early: %w", err)
		}
	}
	return texts, nil
}

// fingerprint returns the fingerprint of the state under one of the renamings of its layout:
// those under which the situation has the least form, and among these the least.
func (s *search) fingerprint() fingerprint {
	w := s.canon
	s.least = s.least[:0]
	s.ties = s.ties[:0]
	for i := range s.x.alike {
		w.names, w.buf = &s.x.alike[i], w.buf[:0]
		w.situation(s.x)
		order := -1
		if i > 0 {
			order = bytes.Compare(w.buf, s.least)
		}
		if order < 0 {
			s.least, s.ties = append(s.least[:0], w.buf...), s.ties[:0]
		}
		if order <= 0 {
			s.ties = append(s.ties, i)
		}
	}
	var least fingerprint
	for i, tie := range s.ties {
		w.form(s.x.core, &s.x.alike[tie])
		w.buf = append(w.buf, s.least...)
		if f := fingerprintOf(w.buf); i == 0 || f.less(least) {
			least = f
		}
	}
	return least
}

// situation appends the form of what is outside the core.
func (w *canon) situation(x *explored) {
	flag := func(is ...bool) {
		n := uint8(0)
		for i, b := range is {
			if b {
				n |= 1 << i
			}
		}
		w.small(n)
	}
	later := func(t Time) { w.num(uint64(max(0, t-x.now))) }
	since := func(t Time) { w.num(uint64(x.now - t)) }
	since(x.core.now)
	flag(x.draining)
	w.small(x.policy)
	for n := uint8(1); int(n) <= len(x.places); n++ {
		i := inverse(&w.names.proc, n) - 1
		p := &x.processes[i]
		current := p.seq == 0
		if t := x.core.targets[procKey(i+1)]; t != nil {
			current = p.seq == t.flight.seq
		}
		flag(p.alive, p.unmanaged, p.enabled, p.ours, p.foreigner, p.session, p.done, p.thenDetach)
		flag(current, p.away, p.inspect != 0, x.inspected(int(i)), x.resisted[i])
		for _, n := range []uint8{p.queues, p.suspended, p.born, p.reported, uint8(p.debugger), uint8(p.flight)} {
			w.small(n)
		}
		w.text(string(p.result))
		if p.inspect != 0 {
			later(p.inspectAt + InspectTime)
		}
		later(x.quarantined[i])
		later(x.held[i])
		later(x.parked[i])
		w.num(uint64(x.credits()[i]))
	}
	for n := uint8(1); n <= worldClients; n++ {
		l := &x.leases[inverse(&w.names.client, n)-1]
		flag(l.live, l.live && l.started, l.live && l.answered)
		if l.live {
			since(l.created)
			set := uint8(0)
			for _, id := range offers[l.offer].gpus {
				set |= 1 << w.names.gpu[id]
			}
			w.small(set)
			w.small(uint8(offers[l.offer].priority))
		}
	}
	for n := uint8(1); n <= worldGPUs; n++ {
		later(x.breakers[inverse(&w.names.gpu, n)-1])
	}
	done := [worldUnits]bool{}
	for n := uint8(1); int(n) <= len(x.places); n++ {
		at := x.places[inverse(&w.names.proc, n)-1].unit
		if done[at] {
			continue
		}
		done[at] = true
		g := x.units[at]
		x.charge(&g)
		flag(g.away, g.capped)
		w.num(uint64(g.budget))
		if g.away {
			since(g.awaySince)
		}
		later(x.units[at].coveredUntil + x.policies[1].Linger)
	}
}

// memory returns what the process has from the kernel, in MiB.
func memory() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Sys >> 20
}

package debugfs

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Known is a queue of a process from sysfs, with its snapshot if there is one.
type Known struct {
	ID   uint32
	GPU  gpreempt.GPUID
	Type gpreempt.QueueType
	// RingBytes is the size of the ring; 0 is unknown.
	RingBytes uint64
	// Born ascends in the order in which the queues of the process were created; 0 is unknown.
	Born uint64
	// Snapshot has RingBase, ReadPointer, WritePointer and SaveArea of
	// GET_QUEUE_SNAPSHOT, 0 for unknown ones; nil without a snapshot.
	Snapshot *gpreempt.QueueInfo
}

// MatchQueues finds the dump of each queue of one process, and returns the properties of
// the queues, index by index with known. dumps are those of all blocks of the process. gfx
// returns the gfx_target_version of a GPU, 0 when unknown, and may be nil. FromMQD is set
// where the dump is certainly that of the queue. Otherwise Note lists the possible dumps,
// and the priority is set if it is the same in all of them.
//
// A queue with a snapshot is identified by its ring's address, GPU and kind, and all other
// common properties must agree: the two pointers, the save area and the ring's size. Two
// queues with the same properties cannot be distinguished. The caller makes sure that no queue
// was created or destroyed between the two readings.
//
// Queues of which Born is known are identified by their place: the driver lists the newest
// first (pqm_create_queue). All of them must be there, and agree with their dumps in GPU, kind,
// size, and what a snapshot has. Ids do not help there: a new queue gets the lowest free one.
//
// Otherwise a queue without a snapshot is identified by its GPU, kind and ring's size, if it is
// the only one of that size, and if both sides have the same number of that GPU and kind.
func MatchQueues(known []Known, dumps []MQD, gfx func(gpreempt.GPUID) uint32) []gpreempt.QueueInfo {
	m := matcher{known: known, cands: candidates(dumps, gfx), of: make([]int, len(known)), notes: make([][]string, len(known)), couldBe: make([][]int, len(known))}
	m.bySnapshot()
	if !m.byOrder() {
		m.bySize()
	}
	infos := make([]gpreempt.QueueInfo, len(known))
	for i := range known {
		if s := known[i].Snapshot; s != nil {
			infos[i] = *s
			if s.Note != "" {
				m.notes[i] = slices.Insert(m.notes[i], 0, s.Note)
			}
		}
		if c := m.of[i]; c >= 0 {
			m.cands[c].fill(&infos[i], m.writesPriority())
		} else {
			m.fillAlike(&infos[i], m.couldBe[i])
		}
		infos[i].Note = strings.Join(m.notes[i], "; ")
	}
	return infos
}

// candidate is a dump, decoded.
type candidate struct {
	line    int
	gpu     gpreempt.GPUID
	sdma    bool
	compute *Compute // nil for SDMA
	// problem is the reason why the dump cannot be used.
	problem string
	traits
	doorbell uint32
}

var errNoDump = errors.New("it is not complete")

func candidates(dumps []MQD, gfx func(gpreempt.GPUID) uint32) []candidate {
	cands := make([]candidate, 0, len(dumps))
	for i := range dumps {
		d := &dumps[i]
		if d.Kind == KindDIQ {
			continue // not a queue of the process
		}
		c := candidate{line: d.Line, gpu: d.GPU, sdma: d.Kind == KindSDMA}
		var err error
		switch {
		case len(d.XCCs) == 0:
			err = errNoDump
		case c.sdma:
			err = c.decodeSDMA(d, gfx)
		default:
			err = c.decodeCompute(d)
		}
		if err != nil {
			c.problem = err.Error()
		}
		cands = append(cands, c)
	}
	return cands
}

func (c *candidate) decodeSDMA(d *MQD, gfx func(gpreempt.GPUID) uint32) error {
	var version uint32
	if gfx != nil {
		version = gfx(d.GPU)
	}
	s, err := DecodeSDMA(d.XCCs[0], version)
	if err != nil {
		return err
	}
	c.traits, c.doorbell = traitsOfSDMA(&s), s.Doorbell
	return nil
}

func (c *candidate) decodeCompute(d *MQD) error {
	q, err := DecodeCompute(d.XCCs[0])
	if err != nil {
		return err
	}
	if !q.Valid {
		return fmt.Errorf("it begins with %08x instead of %08x", q.Words[0], computeHeader)
	}
	c.compute = &q
	c.traits, c.doorbell = traitsOfCompute(&q), q.Doorbell
	for _, words := range d.XCCs[1:] {
		o, err := DecodeCompute(words)
		if err != nil {
			return err
		}
		if o.RingBase != q.RingBase {
			return fmt.Errorf("its XCCs have different rings, %#x and %#x", q.RingBase, o.RingBase)
		}
	}
	return nil
}

// could reports whether a candidate has the GPU and the kind of a queue.
func (c *candidate) could(k *Known) bool {
	if c.gpu != k.GPU {
		return false
	}
	switch k.Type {
	case gpreempt.QueueCompute:
		return !c.sdma
	case gpreempt.QueueSDMA, gpreempt.QueueSDMAXGMI:
		return c.sdma
	case gpreempt.QueueUnknown:
	}
	return true
}

// fill adds the properties of the dump.
func (c *candidate) fill(info *gpreempt.QueueInfo, writesPriority bool) {
	info.Source |= gpreempt.FromMQD
	info.RingBase, info.SaveArea = cmp.Or(info.RingBase, c.ring), cmp.Or(info.SaveArea, c.save)
	info.ReadPointer, info.WritePointer = cmp.Or(info.ReadPointer, c.read), cmp.Or(info.WritePointer, c.write)
	info.Doorbell = c.doorbell
	if c.compute == nil { // the MQD of an SDMA queue has no priority
		return
	}
	info.AQL, info.MQD = c.compute.AQL, c.compute.MQD
	info.Priority, info.PriorityExact = c.compute.Priority(writesPriority)
	info.PriorityKnown = true
}

// matcher joins known and cands. of is the candidate of each queue, or -1.
type matcher struct {
	known []Known
	cands []candidate
	of    []int
	notes [][]string
	// couldBe are the candidates of which one is that of the queue, where several are
	// possible.
	couldBe [][]int
}

// fillAlike adds the common properties of the candidates.
func (m *matcher) fillAlike(info *gpreempt.QueueInfo, cands []int) {
	if len(cands) == 0 || info.PriorityKnown {
		return
	}
	writes := m.writesPriority()
	var priority gpreempt.Priority
	var exact bool
	for n, c := range cands {
		q := m.cands[c].compute
		if q == nil || m.cands[c].problem != "" {
			return
		}
		p, e := q.Priority(writes)
		if n > 0 && (p != priority || e != exact) {
			return
		}
		priority, exact = p, e
	}
	info.Priority, info.PriorityExact, info.PriorityKnown = priority, exact, true
}

func (m *matcher) note(i int, format string, args ...any) {
	m.notes[i] = append(m.notes[i], fmt.Sprintf(format, args...))
}

// writesPriority reports whether any dump proves that the kernel writes the queue
// priority.
func (m *matcher) writesPriority() bool {
	return slices.ContainsFunc(m.cands, func(c candidate) bool { return c.compute != nil && c.compute.WritesPriority() })
}

// bySnapshot matches the queues with a known ring address.
func (m *matcher) bySnapshot() {
	byRing := map[uint64][]int{}
	for c := range m.cands {
		if m.cands[c].problem == "" {
			byRing[m.cands[c].ring] = append(byRing[m.cands[c].ring], c)
		}
	}
	claims := map[int][]int{} // candidate -> queues
	for i := range m.known {
		m.of[i] = -1
		k := &m.known[i]
		if !k.located() {
			continue
		}
		var fit, unfit []int
		for _, c := range byRing[k.Snapshot.RingBase] {
			switch {
			case !m.cands[c].could(k):
			case traitsOf(k.Snapshot, k.RingBytes).contradiction(m.cands[c].traits) == "":
				fit = append(fit, c)
			default:
				unfit = append(unfit, c)
			}
		}
		switch {
		case len(fit) == 1:
			m.of[i] = fit[0]
		case len(fit) > 1:
			m.note(i, "%s have its ring %#x and cannot be distinguished", m.lines(fit), k.Snapshot.RingBase)
		case len(unfit) > 0:
			m.note(i, "%s has its ring %#x, but it has %s: another queue may have replaced it",
				m.lines(unfit[:1]), k.Snapshot.RingBase, traitsOf(k.Snapshot, k.RingBytes).contradiction(m.cands[unfit[0]].traits))
		default:
			m.note(i, "no dump has its ring %#x%s", k.Snapshot.RingBase, m.unusable(k))
		}
		for _, c := range fit {
			claims[c] = append(claims[c], i)
		}
	}
	for i := range m.known {
		if c := m.of[i]; c >= 0 && len(claims[c]) > 1 {
			m.of[i] = -1
			m.note(i, "%s fits queues %s equally", m.lines([]int{c}), m.ids(claims[c]))
		}
	}
}

// byOrder matches all queues by the order in which they were created. It reports whether that is
// known and contradicts nothing.
func (m *matcher) byOrder() bool {
	newest := make([]int, len(m.known))
	for i := range newest {
		newest[i] = i
	}
	slices.SortFunc(newest, func(a, b int) int { return cmp.Compare(m.known[b].Born, m.known[a].Born) })
	if len(m.known) == 0 || len(m.known) != len(m.cands) || m.known[newest[len(newest)-1]].Born == 0 {
		return false
	}
	for c, i := range newest {
		k, d := &m.known[i], &m.cands[c]
		is := traits{ringBytes: k.RingBytes}
		if k.Snapshot != nil {
			is = traitsOf(k.Snapshot, k.RingBytes)
		}
		if d.problem != "" || !d.could(k) || k.located() && k.Snapshot.RingBase != d.ring || is.contradiction(d.traits) != "" {
			return false
		}
	}
	for c, i := range newest {
		m.of[i], m.notes[i] = c, nil
	}
	return true
}

// located reports whether a queue has a known ring address.
func (k *Known) located() bool { return k.Snapshot != nil && k.Snapshot.RingBase != 0 }

// group identifies queues by GPU and kind, and with bytes also by the size of the ring.
type group struct {
	gpu   gpreempt.GPUID
	sdma  bool
	bytes uint64
}

// bySize matches the queues with only GPU, kind and size.
func (m *matcher) bySize() {
	queues, dumps := map[group][]int{}, map[group][]int{}
	add := func(to map[group][]int, g group, i int) {
		if g.bytes != 0 {
			to[g] = append(to[g], i)
		}
		g.bytes = 0
		to[g] = append(to[g], i)
	}
	taken := map[int]bool{}
	for i := range m.known {
		if m.of[i] >= 0 {
			taken[m.of[i]] = true
		} else if g, ok := m.known[i].group(); ok {
			add(queues, g, i)
		}
	}
	for c := range m.cands {
		if d := &m.cands[c]; !taken[c] {
			add(dumps, group{gpu: d.gpu, sdma: d.sdma, bytes: d.ringBytes}, c)
		}
	}
	for i := range m.known {
		k := &m.known[i]
		if m.of[i] >= 0 || k.located() {
			continue
		}
		g, ok := k.group()
		if !ok {
			m.note(i, "its type and its ring are unknown")
			continue
		}
		all := group{gpu: g.gpu, sdma: g.sdma}
		// A queue of unknown size might be the only one of any size.
		rivals, fit := queues[g], dumps[g]
		sizeless := slices.ContainsFunc(queues[all], func(o int) bool { return m.known[o].RingBytes == 0 })
		if sizeless {
			rivals = queues[all]
		}
		switch {
		case len(queues[all]) != len(dumps[all]):
			m.note(i, "%d queues of its kind on its GPU, but %d dumps%s", len(queues[all]), len(dumps[all]), m.unusable(k))
		case len(fit) == 0:
			m.note(i, "no dump has a ring of its %d bytes%s", k.RingBytes, m.unusable(k))
		case len(fit) > 1 || len(rivals) > 1:
			m.couldBe[i] = fit
			m.note(i, "only the size of the ring is known, and %s could be that of queues %s", m.lines(fit), m.ids(rivals))
		case m.cands[fit[0]].problem != "":
			m.note(i, "no dump remains%s", m.unusable(k))
		default:
			m.of[i] = fit[0]
		}
	}
}

// group returns the group of a queue without a ring address.
func (k *Known) group() (g group, ok bool) {
	switch k.Type {
	case gpreempt.QueueCompute:
		return group{gpu: k.GPU, bytes: k.RingBytes}, true
	case gpreempt.QueueSDMA, gpreempt.QueueSDMAXGMI:
		return group{gpu: k.GPU, sdma: true, bytes: k.RingBytes}, true
	case gpreempt.QueueUnknown:
	}
	return group{}, false
}

// unusable lists the dumps that could be of k but cannot be read.
func (m *matcher) unusable(k *Known) string {
	for c := range m.cands {
		if d := &m.cands[c]; d.problem != "" && d.could(k) {
			return fmt.Sprintf(" (%s cannot be used: %s)", m.lines([]int{c}), d.problem)
		}
	}
	return ""
}

// lines formats the lines of dumps.
func (m *matcher) lines(cands []int) string {
	numbers := list(cands, func(c int) string { return strconv.Itoa(m.cands[c].line) })
	if len(cands) == 1 {
		return "the dump of line " + numbers
	}
	return "the dumps of lines " + numbers
}

// ids formats the ids of queues.
func (m *matcher) ids(known []int) string {
	return list(known, func(i int) string { return strconv.FormatUint(uint64(m.known[i].ID), 10) })
}

// list joins a bounded number of words.
func list(items []int, name func(int) string) string {
	const most = 8
	var words []string
	for _, i := range items[:min(most, len(items))] {
		words = append(words, name(i))
	}
	if n := len(items) - most; n > 0 {
		words = append(words, fmt.Sprintf("%d more", n))
	}
	return strings.Join(words, ", ")
}

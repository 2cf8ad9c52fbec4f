package scheduler

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"reflect"
	"regexp"
	"slices"
	"time"
	"unsafe"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// A canon writes a core in a form that is the same for all cores that behave alike: with
// times relative to now, without counters and statistics, and under a renaming of GPUs,
// processes and clients. It follows the types by reflection. A field without a rule is
// written as it is, which may tell two states apart that behave alike, and never merges
// two that do not.
type canon struct {
	core  *Core
	names *renaming
	buf   []byte
	met   []unsafe.Pointer // structures written in full, by their number
}

// renaming maps the numbers of GPUs, processes and clients, from 1 on, to new ones.
type renaming struct{ gpu, proc, client [4]uint8 }

// inverse returns the number that names maps to n.
func inverse(names *[4]uint8, n uint8) uint8 { return uint8(slices.Index(names[:], n)) }

// fingerprint is the 128-bit hash of a canonical form.
type fingerprint [2]uint64

func (f fingerprint) less(g fingerprint) bool { return f[0] < g[0] || f[0] == g[0] && f[1] < g[1] }

// fingerprintOf mixes eight bytes at a time in two lanes, with the multiplication of wyhash.
func fingerprintOf(b []byte) fingerprint {
	f := fingerprint{uint64(len(b)) * 0x9e3779b97f4a7c15, ^uint64(len(b)) * 0xc2b2ae3d27d4eb4f}
	for len(b)%8 != 0 {
		b = append(b, 0xff)
	}
	for ; len(b) > 0; b = b[8:] {
		x := binary.LittleEndian.Uint64(b)
		hi, lo := bits.Mul64(f[0]^x^0xa0761d6478bd642f, 0xe7037ed1a0b428db)
		f[0] = hi ^ lo
		hi, lo = bits.Mul64(f[1]^bits.RotateLeft64(x, 29)^0x8ebc6af09c88c6e3, 0x589965cc75374cc3)
		f[1] = hi ^ lo ^ bits.RotateLeft64(f[1], 23)
	}
	return f
}

func (w *canon) num(n uint64) { w.buf = binary.LittleEndian.AppendUint64(w.buf, n) }
func (w *canon) small(n uint8) {
	w.buf = append(w.buf, n)
}

// write writes a value at an address.
type write func(w *canon, at unsafe.Pointer)

func forget(*canon, unsafe.Pointer) {}

// point writes a point in time relative to now.
func point(w *canon, at unsafe.Pointer) {
	if t := *(*Time)(at); t == 0 {
		w.num(1 << 63)
	} else {
		w.num(uint64(t - w.core.now))
	}
}

// future writes a point in time that does not count once it has passed.
func future(w *canon, at unsafe.Pointer) {
	w.num(uint64(max(0, *(*Time)(at)-w.core.now)))
}

// futureOrPast is future, but also tells a time that was set from one that never was.
func futureOrPast(w *canon, at unsafe.Pointer) {
	w.small(uint8(min(1, *(*Time)(at))))
	future(w, at)
}

// custom writes a field by a function of its structure.
func custom[T any](f func(w *canon, t *T)) write {
	return func(w *canon, at unsafe.Pointer) { f(w, (*T)(at)) }
}

// rules are for fields that are not written as they are, with the reason. whole marks
// rules that get the address of the structure.
var rules = map[string]struct {
	write write
	why   string
	whole bool
}{
	"book.limits":       {forget, "the same in all states", false},
	"Core.policy":       {custom(func(w *canon, c *Core) { w.text(c.policy.Preset) }), "its name is unique here", true},
	"Core.now":          {forget, "times are relative to it", false},
	"Core.seq":          {forget, "a counter", false},
	"Core.scans":        {forget, "a counter", false},
	"Core.gpus":         {forget, "the same as gpuOrder", false},
	"Core.targets":      {forget, "the same as order", false},
	"Core.progress":     {forget, "a measurement", false},
	"book.leases":       {forget, "those of the clients", false},
	"book.perUser":      {forget, "counts the leases", false},
	"book.requests":     {forget, "of live leases, checked in each state; ended ones are not repeated", false},
	"book.ended":        {forget, "answers about leases that ended", false},
	"book.endedNext":    {forget, "as ended", false},
	"book.endedByID":    {forget, "as ended", false},
	"Core.timers":       {forget, "the timers of all others, in order", false},
	"Core.dirty":        {forget, "empty between two steps", false},
	"Core.dirtyTargets": {forget, "empty between two steps", false},
	"book.free":         {forget, "memory for new leases", false},
	"Core.actions":      {forget, "the result of the last step", false},
	"Core.leaving":      {custom(writeLeaving), "by process", true},
	"book.clients":      {custom(writeClients), "by client", true},

	"gpu.started":      {custom(writeStarted), "most are 0", true},
	"gpu.breakerUntil": {future, "the timer has it", false},
	"gpu.gap":          {forget, "the learned linger is not explored", false},
	"gpu.lastEnd":      {forget, "as gap", false},
	"gpu.free":         {forget, "as gap", false},

	"flight.seq":              {custom(func(w *canon, f *flight) { w.small(uint8(min(1, f.seq))) }), "a counter; 0 for a Detach", true},
	"flight.inspection":       {custom(func(w *canon, f *flight) { w.small(uint8(min(1, f.inspection))) }), "a counter; 0 for none", true},
	"flight.due":              {custom(writeDue), "while an action is in flight", true},
	"target.since":            {forget, "the timer has what follows from it", false},
	"target.quarantinedUntil": {future, "", false},
	"pin.until":               {future, "", false},
	"target.resumeAt":         {future, "", false},
	"target.suspends":         {forget, "statistics", false},
	"target.awaySince":        {forget, "statistics", false},
	"target.away":             {forget, "statistics", false},
	"target.refusals":         {custom(writeRefusals), "until it is killed", true},
	"target.refusedAt":        {forget, "refusals has it", false},
	"Backoff.until":           {custom(writeBackoff), "until it is forgiven", true},
	"target.dirty":            {forget, "false between two steps", false},
	"session.retryAt":         {future, "", false},
	"estimate.samples":        {custom(func(w *canon, e *estimate) { w.small(uint8(min(1, e.samples))) }), "whether there are any", true},

	"job.progress":       {forget, "a measurement", false},
	"job.dirty":          {forget, "false between two steps", false},
	"job.seen":           {forget, "a counter", false},
	"job.suspendedSince": {custom(writeSuspendedSince), "only while it is suspended", true},
	"job.lingerUntil":    {futureOrPast, "", false},
	"job.runUntil":       {future, "", false},
	"job.runCause":       {custom(writeRunCause), "only until runUntil", true},
	"job.budget":         {custom(func(w *canon, g *job) { w.num(uint64(w.core.budgetLeft(g))) }), "as of now", true},
	"job.credit":         {custom(func(w *canon, g *job) { w.num(uint64(w.core.chargedNow(g).credit)) }), "as of now", true},
	"job.chargedAt":      {forget, "as budget and credit", false},

	"lease.created":            {custom(writeCreated), "until it is answered and started", true},
	"lease.startAt":            {future, "", false},
	"lease.answer":             {forget, "was given", false},
	"lease.awaits":             {forget, "a cache", false},
	"LeaseRequested.Lease":     {forget, "a counter", false},
	"LeaseRequested.RequestID": {forget, "a counter", false},
	"LeaseRequested.User":      {forget, "of its client", false},
	"LeaseRequested.Arrived":   {forget, "is recorded only", false},
	"LeaseRequested.Trace":     {forget, "is recorded only", false},
	"lease.id":                 {forget, "a counter", false},
	"timer.seq":                {forget, "the order of timers that are due together does not matter", false},
	"timer.index":              {forget, "as due", false},
	"timer.owner":              {forget, "it is part of it", false},
	"timer.due":                {custom(writeTimer), "while it is armed", true},
}

func writeStarted(w *canon, u *gpu) {
	for p, n := range u.started {
		if n > 0 {
			w.small(uint8(p + 1))
			w.small(uint8(n))
		}
	}
	w.small(0)
}

func writeTimer(w *canon, t *timer) {
	if t.index == 0 {
		w.num(1 << 63)
	} else {
		w.num(uint64(t.due - w.core.now))
	}
}

func writeBackoff(w *canon, b *Backoff) {
	if b.failures > 0 {
		w.num(uint64(max(-2*RetryAction.Last, b.until-w.core.now)))
	}
}

func writeRefusals(w *canon, t *target) {
	if t.refusals > 0 && t.OnResist.KillAfter > 0 && !t.killed {
		w.small(uint8(min(t.refusals, t.OnResist.KillAfter)))
		w.num(uint64(max(0, t.refusedAt+RefusalTime-w.core.now)))
	}
}

func writeSuspendedSince(w *canon, g *job) {
	if g.suspended {
		w.num(uint64(w.core.now - g.suspendedSince))
	}
}

func writeRunCause(w *canon, g *job) {
	if w.core.now < g.runUntil {
		w.text(string(g.runCause))
	}
}

func writeCreated(w *canon, l *lease) {
	if !l.answered || !l.started {
		w.num(uint64(w.core.now - l.created))
	}
}

var writeSession, writeClient write

// writeLeaving writes the sessions of the processes that have left; nothing else of them counts.
func writeLeaving(w *canon, c *Core) {
	w.small(uint8(len(c.leaving)))
	for n := uint8(1); n < 4; n++ {
		if t := c.leaving[procKey(inverse(&w.names.proc, n))]; t != nil {
			w.small(n)
			writeSession(w, unsafe.Pointer(&t.session))
			writeTimer(w, &t.timer)
		}
	}
}

func writeDue(w *canon, f *flight) {
	if !f.is(ActRecord) && f.due != Never {
		w.num(uint64(f.due - w.core.now))
	}
}

func writeClients(w *canon, c *book) {
	w.small(uint8(len(c.clients)))
	for n := uint8(1); n < 4; n++ {
		if cl := c.clients[ClientID{PID: int32(inverse(&w.names.client, n))}]; cl != nil {
			w.small(n)
			writeClient(w, unsafe.Pointer(&cl))
		}
	}
}

func (w *canon) text(s string) {
	w.small(uint8(len(s)))
	w.buf = append(w.buf, s...)
}

// pointInTime matches the names of fields that hold a point in time rather than a duration.
var pointInTime = regexp.MustCompile(`(?i)(until|since|due|now|created|expires|last|start|end)$|At$`)

// plan returns how to write a type.
func plan(t reflect.Type, field string) write {
	switch t {
	case reflect.TypeFor[time.Duration]():
		if pointInTime.MatchString(field) {
			return point
		}
	case reflect.TypeFor[gpreempt.GPUID]():
		return func(w *canon, at unsafe.Pointer) { w.small(w.names.gpu[*(*gpreempt.GPUID)(at)]) }
	case reflect.TypeFor[gpreempt.ProcessKey]():
		return func(w *canon, at unsafe.Pointer) { w.small(w.names.proc[(*gpreempt.ProcessKey)(at).PID]) }
	case reflect.TypeFor[ClientID]():
		return func(w *canon, at unsafe.Pointer) { w.small(w.names.client[(*ClientID)(at).PID]) }
	case reflect.TypeFor[[]gpreempt.GPUID]():
		return func(w *canon, at unsafe.Pointer) {
			set := uint8(0)
			for _, id := range *(*[]gpreempt.GPUID)(at) {
				set |= 1 << w.names.gpu[id]
			}
			w.small(set)
		}
	case reflect.TypeFor[[]*gpu]():
		return sorted(func(w *canon, u *gpu) uint8 { return w.names.gpu[u.id] })
	case reflect.TypeFor[[]*target]():
		return sorted((*canon).target)
	case reflect.TypeFor[[]*job]():
		return sorted((*canon).job)
	}
	switch t.Kind() {
	case reflect.Bool, reflect.Uint8, reflect.Int8:
		return func(w *canon, at unsafe.Pointer) { w.small(*(*uint8)(at)) }
	case reflect.Int32, reflect.Uint32:
		return func(w *canon, at unsafe.Pointer) { w.num(uint64(*(*uint32)(at))) }
	case reflect.Int, reflect.Int64, reflect.Uint, reflect.Uint64, reflect.Float64:
		return func(w *canon, at unsafe.Pointer) { w.num(*(*uint64)(at)) }
	case reflect.String:
		return func(w *canon, at unsafe.Pointer) { w.text(*(*string)(at)) }
	case reflect.Pointer:
		return pointerPlan(t.Elem())
	case reflect.Struct:
		return structPlan(t)
	case reflect.Array:
		return elementsPlan(t.Elem(), func(at unsafe.Pointer) (unsafe.Pointer, int) { return at, t.Len() })
	case reflect.Slice:
		return elementsPlan(t.Elem(), func(at unsafe.Pointer) (unsafe.Pointer, int) {
			s := *(*[]byte)(at) // the header of a slice does not depend on its type
			return unsafe.Pointer(unsafe.SliceData(s)), len(s)
		})
	case reflect.Map:
		return mapPlan(t)
	default:
		panic("scheduler: no plan to write " + t.String())
	}
}

func (w *canon) target(t *target) uint8 { return w.names.proc[t.Target.PID] }

// job returns the least member of a job as its name.
func (w *canon) job(g *job) uint8 {
	least := uint8(0xff)
	for _, m := range g.members {
		least = min(least, w.target(m))
	}
	return least
}

// sorted writes a slice that is a set, by the new names of its elements.
func sorted[T any](name func(*canon, *T) uint8) write {
	var element write
	return func(w *canon, at unsafe.Pointer) {
		if element == nil {
			element = plan(reflect.TypeFor[*T](), "")
		}
		set := *(*[]*T)(at)
		w.small(uint8(len(set)))
		for n, left := uint8(0), len(set); left > 0; n++ {
			for i := range set {
				if name(w, set[i]) == n {
					element(w, unsafe.Pointer(&set[i]))
					left--
				}
			}
		}
	}
}

var structPlans = map[reflect.Type]*write{}

func structPlan(t reflect.Type) write {
	if known := structPlans[t]; known != nil {
		return func(w *canon, at unsafe.Pointer) { (*known)(w, at) } // it may be under construction
	}
	done := new(write)
	structPlans[t] = done
	type step struct {
		offset uintptr
		write  write
	}
	var steps []step
	for f := range t.Fields() {
		rule, has := rules[t.Name()+"."+f.Name]
		switch {
		case has && rule.whole:
			steps = append(steps, step{0, rule.write})
		case has:
			if reflect.ValueOf(rule.write).Pointer() != reflect.ValueOf(forget).Pointer() {
				steps = append(steps, step{f.Offset, rule.write})
			}
		default:
			steps = append(steps, step{f.Offset, plan(f.Type, f.Name)})
		}
	}
	*done = func(w *canon, at unsafe.Pointer) {
		for i := range steps {
			steps[i].write(w, unsafe.Add(at, steps[i].offset))
		}
	}
	return *done
}

// pointerPlan writes a structure where it is met first, and its number afterwards.
func pointerPlan(t reflect.Type) write {
	var content write
	return func(w *canon, at unsafe.Pointer) {
		p := *(*unsafe.Pointer)(at)
		if p == nil {
			w.small(0xff)
			return
		}
		if n := slices.Index(w.met, p); n >= 0 {
			w.small(uint8(n))
			return
		}
		w.met = append(w.met, p)
		w.small(0xfe)
		if content == nil {
			content = plan(t, "")
		}
		content(w, p)
	}
}

func elementsPlan(t reflect.Type, elements func(unsafe.Pointer) (first unsafe.Pointer, n int)) write {
	var element write
	return func(w *canon, at unsafe.Pointer) {
		if element == nil {
			element = plan(t, "")
		}
		first, n := elements(at)
		w.small(uint8(n))
		for i := range n {
			element(w, unsafe.Add(first, uintptr(i)*t.Size()))
		}
	}
}

// mapPlan writes the entries of a map in the order of their bytes.
func mapPlan(t reflect.Type) write {
	key, val := plan(t.Key(), ""), plan(t.Elem(), "")
	return func(w *canon, at unsafe.Pointer) {
		m := reflect.NewAt(t, at).Elem()
		w.small(uint8(m.Len()))
		start, entries := len(w.buf), [][]byte(nil)
		for k, v := range m.Seq2() {
			from := len(w.buf)
			kp, vp := reflect.New(t.Key()), reflect.New(t.Elem())
			kp.Elem().Set(k)
			vp.Elem().Set(v)
			key(w, kp.UnsafePointer())
			val(w, vp.UnsafePointer())
			entries = append(entries, bytes.Clone(w.buf[from:]))
		}
		slices.SortFunc(entries, bytes.Compare)
		w.buf = append(w.buf[:start], bytes.Join(entries, nil)...)
	}
}

var writeCore write

func newCanon() *canon {
	if writeCore == nil {
		writeCore = plan(reflect.TypeFor[Core](), "")
		writeSession = plan(reflect.TypeFor[session](), "")
		writeClient = plan(reflect.TypeFor[*client](), "")
	}
	return &canon{}
}

// form returns the canonical form of a core under a renaming. It is valid until the next.
func (w *canon) form(c *Core, names *renaming) {
	w.core, w.names, w.met, w.buf = c, names, w.met[:0], w.buf[:0]
	writeCore(w, unsafe.Pointer(c))
}

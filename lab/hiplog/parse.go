package hiplog

import "bytes"

// maxPrefix bounds the text before a message; the source is a file name, or with some macros
// its whole path.
const maxPrefix = 512

// prefix is the text before a message.
type prefix struct {
	level        int
	source       []byte
	line, micros uint64
	pid          int32
	tid          uint64
	length       int
}

// prefixes parses prefixes. It caches the last thread, which usually wrote the next line
// too.
type prefixes struct {
	text []byte // "[pid:… tid: 0x…]"
	pid  int32
	tid  uint64
}

// parse parses the prefix of a message at the beginning of b:
//
//	ROCm 4.5            :3:rocdevice.cpp  :480 : 0001 us: [7f…] text, or without a thread
//	ROCm 5.6            :3:rocdevice.cpp  :480 : 0001 us: 2539 : [tid:0x7f…] text
//	5.7 to 6.2          :3:rocdevice.cpp  :480 : 0001 us: [pid:2539  tid:0x7f…] text
//	since, level >= 4   :3:rocdevice.cpp  :480 : 0001 us: [pid:2539 tid: 0x7f…] text
//	since, below        :3:rocdevice.cpp  :480 : 0001 us:  text
//	ROCr                :amd_blit.cpp     :480 : 0001 us: [pid:2539  tid:0x7f…] [***rocr***] text
//
// For a text that begins with a level and a source and goes on in another way, whole is false and
// other is true: a prefix of an unknown form.
func (p *prefixes) parse(b []byte) (found prefix, whole, other bool) {
	c := cursor{b: b[:min(len(b), maxPrefix)]}
	whole = p.parseAt(&c, &found)
	return found, whole, !whole && found.level >= 0 && len(found.source) > 0 && !c.broken()
}

// parseAt is parse, with the cursor.
func (p *prefixes) parseAt(c *cursor, found *prefix) bool {
	found.level = -1
	if !c.byte(':') {
		return false
	}
	if len(c.b) > 2 && c.b[2] == ':' && isDigit(c.b[1]) {
		found.level = int(c.b[1] - '0')
		c.at = 3
	}
	colon := bytes.IndexByte(c.b[c.at:], ':')
	if colon < 0 {
		c.at = len(c.b)
		return false
	}
	end := c.at + colon
	for end > c.at && c.b[end-1] == ' ' {
		end--
	}
	found.source = c.b[c.at:end]
	c.at += colon + 1
	if !c.decimal(&found.line) {
		return false
	}
	c.spaces()
	if !c.byte(':') {
		return false
	}
	c.spaces()
	if !c.decimal(&found.micros) {
		return false
	}
	c.byte('d') // "%010lud", a mistake of September 2024
	if !c.must(" us:") {
		return false
	}
	c.spaces()
	p.thread(c)
	found.pid, found.tid = p.pid, p.tid
	c.spaces()
	found.length = c.at
	return found.level >= 0 || bytes.HasPrefix(c.b[c.at:], rocrMark)
}

// threadDigits is the least number of digits of a thread without a word before it, which thus
// is no word itself.
const threadDigits = 8

// thread parses the process and the thread, if present.
func (p *prefixes) thread(c *cursor) {
	start := c.at
	if len(p.text) > 0 && bytes.HasPrefix(c.b[start:], p.text) {
		c.at += len(p.text)
		return
	}
	var pid, tid uint64
	hasPID := c.decimal(&pid)
	if hasPID {
		c.spaces()
		hasPID = c.byte(':')
		c.spaces()
	}
	if c.byte('[') {
		if !hasPID && c.literal("pid:") {
			hasPID = c.decimal(&pid)
			c.spaces()
		}
		if hasPID && c.literal("tid:") {
			c.spaces()
			if c.hex(&tid) && c.byte(']') && pid < 1<<31 {
				p.text, p.pid, p.tid = append(p.text[:0], c.b[start:c.at]...), int32(pid), tid
				return
			}
		} else if digits := c.at; !hasPID && c.digits(&tid) && c.at-digits >= threadDigits && c.byte(']') {
			p.text, p.pid, p.tid = append(p.text[:0], c.b[start:c.at]...), 0, tid
			return
		}
	}
	p.text, p.pid, p.tid = p.text[:0], 0, 0
	c.at = start
}

// next returns the position of the first record that begins in b, or -1, and parses its
// prefix.
func (p *prefixes) next(b []byte) (at int, found prefix) {
	for {
		colon := bytes.IndexByte(b[at:], ':')
		if colon < 0 {
			return -1, prefix{}
		}
		at += colon
		// A level: without one the prefix is only a guess.
		if at+2 < len(b) && isDigit(b[at+1]) && b[at+2] == ':' {
			if found, whole, _ := p.parse(b[at:]); whole {
				return at, found
			}
		}
		at++
	}
}

var rocrMark = []byte("[***rocr***]")

// parseMessage sets the fields for a message about queues. A message that begins like one
// and cannot be parsed is Torn or Unknown.
func parseMessage(rec *Record) {
	m := rec.Message
	if bytes.HasPrefix(m, rocrMark) {
		rec.ROCr = true
		m = bytes.TrimLeft(m[len(rocrMark):], " ")
		rec.Message = m
	}
	if len(m) == 0 {
		return
	}
	if m[0] == '[' { // the thread in an unknown form, or else a message that is not about queues
		if end := bytes.IndexByte(m, ']'); end >= 0 {
			rec.Message = bytes.TrimLeft(m[end+1:], " !")
			if parseMessage(rec); rec.Kind != Other || rec.Torn {
				rec.Unknown = true
			}
			rec.Message = m
		}
		return
	}
	c := cursor{b: m}
	switch m[0] {
	case 'S':
		switch {
		case c.literal("SWq="):
			rec.New = true
			c.packet(rec)
		case c.literal("ShaderName : "):
			rec.kernel(m[c.at:])
		case c.literal("Selected queue refCount:"):
			rec.New = true
			c.refCount(rec, Selected)
		case c.literal("Setting CU mask 0x"):
			c.cuMask(rec)
		}
	case 's':
		switch {
		case c.literal("selected queue refCount:"):
			rec.Old = true
			c.refCount(rec, Selected)
		case c.literal("setting CU mask 0x"):
			c.cuMask(rec)
		}
	case 'H':
		if c.literal("HWq=") {
			rec.Old = !rec.ROCr
			c.at = 0
			c.packet(rec)
		}
	case 'C':
		switch {
		case c.literal("Created SWq="):
			rec.New = true
			rec.end(Created, &c, c.address(&rec.SWq) && c.must(" to map on HWq=") && c.address(&rec.HWq) && c.created(rec))
		case c.literal("Command ("):
			c.enqueued(rec)
		}
	case 'c':
		if c.literal("created hardware queue ") {
			rec.Old = true
			rec.end(Created, &c, c.address(&rec.SWq) && c.created(rec))
		}
	case 'a':
		if c.literal("acquireQueue refCount:") {
			c.refCount(rec, Acquired)
		}
	case 'r':
		if c.literal("releaseQueue refCount:") {
			c.refCount(rec, Released)
		}
	case 'D', 'd':
		if c.at = 1; c.literal("eleting hardware queue ") {
			rec.end(Deleted, &c, c.address(&rec.Queue) && c.must(" with refCount 0"))
		}
	case 'N', 'n':
		if c.at = 1; c.literal("umber of allocated hardware queues with low priority: ") {
			rec.Old, rec.New = m[0] == 'n', m[0] == 'N'
			rec.end(Allocated, &c, c.decimal(&rec.Low) && c.must(", with normal priority: ") && c.decimal(&rec.Normal) &&
				c.must(", with high priority: ") && c.decimal(&rec.High) &&
				c.must(", maximum per priority is: ") && c.decimal(&rec.PerPriority))
		}
	case 'G':
		if c.literal("Graph ShaderName : ") {
			name := m[c.at:]
			if device := bytes.LastIndex(name, []byte(", device id : ")); device >= 0 {
				name = name[:device]
			}
			rec.kernel(name)
		}
	}
}

// end sets the kind of rec if it is whole, and otherwise why it is not, from the position of c.
func (rec *Record) end(k Kind, c *cursor, whole bool) {
	switch {
	case whole:
		rec.Kind = k
	case c.broken():
		rec.Torn = true
	default:
		rec.Unknown = true
	}
}

func (rec *Record) kernel(name []byte) {
	rec.Name = bytes.TrimSpace(name)
	rec.end(Kernel, &cursor{}, len(rec.Name) > 0)
}

func (c *cursor) refCount(rec *Record, k Kind) {
	c.spaces()
	rec.end(k, c, c.address(&rec.Queue) && c.must(" (") && c.decimal(&rec.RefCount) && c.must(")"))
}

func (c *cursor) cuMask(rec *Record) {
	digits := c.at
	for c.at < len(c.b) && hexValue(c.b[c.at]) < 16 {
		c.at++
	}
	rec.Mask = c.b[digits:c.at]
	rec.end(CUMask, c, len(rec.Mask) > 0 && c.must(" for hardware queue ") && c.address(&rec.Queue))
}

func (c *cursor) created(rec *Record) bool {
	var cooperative uint64
	if !c.must(" with size ") || !c.decimal(&rec.Size) || !c.must(" with priority ") || !c.decimal(&rec.Priority) ||
		!c.must(", cooperative: ") || !c.decimal(&cooperative) {
		return false
	}
	rec.Cooperative = cooperative != 0
	return true
}

// enqueued parses "Command (KernelExecution) enqueued: 0x… to queue: 0x…"; ROCm 6.2 does not print
// the queue.
func (c *cursor) enqueued(rec *Record) {
	at := bytes.Index(c.b[c.at:], []byte(") enqueued: "))
	if at < 0 {
		return
	}
	c.at += at + len(") enqueued: ")
	var command Address
	if whole := c.address(&command); !whole || c.at < len(c.b) {
		rec.end(Enqueued, c, whole && c.must(" to queue: ") && c.address(&rec.Stream))
	}
}

// packet parses from behind "SWq=", or from "HWq=". Since ROCm 6.2
//
//	SWq=0x…, HWq=0x…, id=1, Dispatch Header = 0xb02 (…), …, kernel_obj=0x…, …, completion_signal=0x…, correlation_id=0, rptr=0, wptr=0
//
// before it HWq alone, and nothing after completion_signal; ROCr has HWq and id. In 2026 a field
// virtual_pipe_id follows id where queues are distributed over pipes: fields that are not known are
// skipped. Barriers are "BarrierAND", "Barrier-OR", "BarrierValue", ROCr's "Barrier".
func (c *cursor) packet(rec *Record) {
	whole := (c.at == 0 || c.address(&rec.SWq) && c.must(", ")) && c.must("HWq=") && c.address(&rec.HWq) && c.must(", ")
	if !whole {
		rec.end(Other, c, false)
		return
	}
	rest := c.b[c.at:]
	what, _, found := bytes.Cut(rest, headerMark)
	if !found {
		rec.Torn = true
		return
	}
	for {
		field, after, more := bytes.Cut(what, fieldMark)
		if !more {
			break
		}
		name, value, ok := bytes.Cut(field, []byte("="))
		switch {
		case !ok || len(name) == 0 || len(value) == 0 || string(name) == "SWq" || string(name) == "HWq":
			rec.Torn = true // the beginning of one record and the end of another
			return
		case string(name) == "id":
			var id uint64
			number := cursor{b: value}
			if !number.decimal(&id) || number.at < len(value) {
				rec.Torn = true
				return
			}
			rec.ID = int64(uint32(id)) // printed with %d
		}
		what = after
	}
	switch {
	case bytes.Contains(what, []byte("Dispatch")):
		rec.Kind = Dispatch
		if at := bytes.Index(rest, []byte("kernel_obj=")); at >= 0 {
			object := cursor{b: rest, at: at + len("kernel_obj=")}
			if !object.address(&rec.KernelObject) || !object.byte(',') {
				rec.KernelObject = 0
			}
		}
	case bytes.Contains(what, []byte("Barrier")):
		rec.Kind = Barrier
		// Before 6.2 these alone print the hsa_queue_t as HWq.
		if rec.Old && bytes.Contains(what, []byte("Value")) {
			rec.SWq, rec.HWq = rec.HWq, 0
		}
	default:
		rec.Unknown = true // another kind of packet
		return
	}
	rec.Indexed = indices(rest, rec)
	rec.Torn = !rec.Indexed && !bytes.Contains(rest, []byte("completion_signal=0x"))
}

var (
	headerMark = []byte(" Header = ")
	fieldMark  = []byte(", ")
)

// indices parses " rptr=12, wptr=34" in b, the last of them.
func indices(b []byte, rec *Record) bool {
	at := bytes.LastIndex(b, []byte(" rptr="))
	if at < 0 {
		return false
	}
	c := cursor{b: b, at: at + len(" rptr=")}
	var read, write uint64
	if !c.decimal(&read) || !c.literal(", wptr=") || !c.decimal(&write) || !c.atEnd() && !c.peek(",") && !c.peek(" ") {
		return false
	}
	rec.ReadIndex, rec.WriteIndex = read, write
	return true
}

// lastDecimal removes the number at the end of b.
func lastDecimal(b []byte) (rest []byte, v uint64, ok bool) {
	at := len(b)
	for at > 0 && isDigit(b[at-1]) {
		at--
	}
	c := cursor{b: b, at: at}
	ok = c.decimal(&v) && c.at == len(b)
	return b[:at], v, ok
}

// cutDuration removes ": duration: 34 us" from the message of an API call.
func cutDuration(rec *Record) {
	m := bytes.TrimRight(rec.Message, " ")
	body, ok := bytes.CutSuffix(m, []byte(" us"))
	if !ok {
		return
	}
	body, duration, ok := lastDecimal(body)
	if !ok {
		return
	}
	if body, ok = bytes.CutSuffix(body, []byte(": duration: ")); ok {
		rec.Message, rec.Duration, rec.Timed = body, duration, true
	}
}

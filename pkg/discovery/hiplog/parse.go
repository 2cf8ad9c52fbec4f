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
//	ROCm 5.6            :3:rocdevice.cpp  :480 : 0001 us: 2539 : [tid:0x7f…] text
//	5.7 to 6.2          :3:rocdevice.cpp  :480 : 0001 us: [pid:2539  tid:0x7f…] text
//	since, level >= 4   :3:rocdevice.cpp  :480 : 0001 us: [pid:2539 tid: 0x7f…] text
//	since, below        :3:rocdevice.cpp  :480 : 0001 us:  text
//	ROCr                :amd_blit.cpp     :480 : 0001 us: [pid:2539  tid:0x7f…] [***rocr***] text
func (p *prefixes) parse(b []byte) (found prefix, ok bool) {
	c := cursor{b: b[:min(len(b), maxPrefix)]}
	if !c.byte(':') {
		return found, false
	}
	found.level = -1
	if len(c.b) > 2 && c.b[2] == ':' && isDigit(c.b[1]) {
		found.level = int(c.b[1] - '0')
		c.at = 3
	}
	colon := bytes.IndexByte(c.b[c.at:], ':')
	if colon < 0 {
		return found, false
	}
	end := c.at + colon
	for end > c.at && c.b[end-1] == ' ' {
		end--
	}
	found.source = c.b[c.at:end]
	c.at += colon + 1
	if !c.decimal(&found.line) {
		return found, false
	}
	c.spaces()
	if !c.byte(':') {
		return found, false
	}
	c.spaces()
	if !c.decimal(&found.micros) {
		return found, false
	}
	c.byte('d') // "%010lud", a mistake of September 2024
	if !c.literal(" us:") {
		return found, false
	}
	c.spaces()
	p.thread(&c)
	found.pid, found.tid = p.pid, p.tid
	c.spaces()
	found.length = c.at
	return found, found.level >= 0 || bytes.HasPrefix(c.b[c.at:], rocrMark)
}

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
			if found, ok := p.parse(b[at:]); ok {
				return at, found
			}
		}
		at++
	}
}

var rocrMark = []byte("[***rocr***]")

// parseMessage sets the fields for a message about queues. A message that begins like one
// and cannot be parsed to its end is Torn.
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
			rec.end(Created, c.address(&rec.SWq) && c.literal(" to map on HWq=") && c.address(&rec.HWq) && c.created(rec))
		case c.literal("Command ("):
			c.enqueued(rec)
		}
	case 'c':
		if c.literal("created hardware queue ") {
			rec.Old = true
			rec.end(Created, c.address(&rec.SWq) && c.created(rec))
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
			rec.end(Deleted, c.address(&rec.Queue) && c.literal(" with refCount 0"))
		}
	case 'N', 'n':
		if c.at = 1; c.literal("umber of allocated hardware queues with low priority: ") {
			rec.Old, rec.New = m[0] == 'n', m[0] == 'N'
			rec.end(Allocated, c.decimal(&rec.Low) && c.literal(", with normal priority: ") && c.decimal(&rec.Normal) &&
				c.literal(", with high priority: ") && c.decimal(&rec.High) &&
				c.literal(", maximum per priority is: ") && c.decimal(&rec.PerPriority))
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

// end sets the kind of rec if it is complete.
func (rec *Record) end(k Kind, whole bool) {
	if whole {
		rec.Kind = k
	} else {
		rec.Torn = true
	}
}

func (rec *Record) kernel(name []byte) {
	rec.Name = bytes.TrimSpace(name)
	rec.end(Kernel, len(rec.Name) > 0)
}

func (c *cursor) refCount(rec *Record, k Kind) {
	c.spaces()
	rec.end(k, c.address(&rec.Queue) && c.literal(" (") && c.decimal(&rec.RefCount) && c.byte(')'))
}

func (c *cursor) cuMask(rec *Record) {
	digits := c.at
	for c.at < len(c.b) && hexValue(c.b[c.at]) < 16 {
		c.at++
	}
	rec.Mask = c.b[digits:c.at]
	rec.end(CUMask, len(rec.Mask) > 0 && c.literal(" for hardware queue ") && c.address(&rec.Queue))
}

func (c *cursor) created(rec *Record) bool {
	var cooperative uint64
	if !c.literal(" with size ") || !c.decimal(&rec.Size) || !c.literal(" with priority ") || !c.decimal(&rec.Priority) ||
		!c.literal(", cooperative: ") || !c.decimal(&cooperative) {
		return false
	}
	rec.Cooperative = cooperative != 0
	return true
}

// enqueued parses "Command (KernelExecution) enqueued: 0x… to queue: 0x…".
func (c *cursor) enqueued(rec *Record) {
	at := bytes.Index(c.b[c.at:], []byte(") enqueued: "))
	if at < 0 {
		return
	}
	c.at += at + len(") enqueued: ")
	var command Address
	rec.end(Enqueued, c.address(&command) && c.literal(" to queue: ") && c.address(&rec.Stream))
}

// packet parses from behind "SWq=", or from "HWq=". Since ROCm 6.2
//
//	SWq=0x…, HWq=0x…, id=1, Dispatch Header = 0xb02 (…), …, kernel_obj=0x…, …, completion_signal=0x…, correlation_id=0, rptr=0, wptr=0
//
// before it HWq alone, and nothing after completion_signal; ROCr has HWq and id.
// Barriers are "BarrierAND", "Barrier-OR", "BarrierValue", ROCr's "Barrier".
func (c *cursor) packet(rec *Record) {
	if c.at > 0 && (!c.address(&rec.SWq) || !c.literal(", ")) || !c.literal("HWq=") || !c.address(&rec.HWq) || !c.literal(", ") {
		rec.Torn = true
		return
	}
	if c.literal("id=") {
		var id uint64
		if !c.decimal(&id) || !c.byte(',') {
			rec.Torn = true
			return
		}
		rec.ID = int64(uint32(id)) // printed with %d
		c.spaces()
	}
	rest := c.b[c.at:]
	switch what, _, ok := bytes.Cut(rest, []byte("=")); {
	case !ok || !bytes.HasSuffix(what, []byte(" Header ")):
		rec.Torn = true
		return
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
		return
	}
	rec.Indexed = indices(rest, rec)
	rec.Torn = !rec.Indexed && !bytes.Contains(rest, []byte("completion_signal=0x"))
}

// indices parses ", rptr=12, wptr=34" at the end of b.
func indices(b []byte, rec *Record) bool {
	b, write, ok := lastDecimal(bytes.TrimRight(b, " "))
	if !ok || !bytes.HasSuffix(b, []byte(", wptr=")) {
		return false
	}
	b, read, ok := lastDecimal(b[:len(b)-len(", wptr=")])
	if !ok || !bytes.HasSuffix(b, []byte(" rptr=")) {
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

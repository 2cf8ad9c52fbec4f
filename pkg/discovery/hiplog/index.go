package hiplog

// index follows a packet index that is printed with 32 or 64 bits.
type index struct {
	known bool
	last  uint64
}

// follow returns the whole index of which v is at least the low 32 bits: the one
// nearest to the one before.
func (i *index) follow(v uint64) uint64 {
	if i.known && v < 1<<32 {
		step := int64(int32(uint32(v) - uint32(i.last)))
		if whole := int64(i.last) + step; whole >= 0 {
			v = uint64(whole)
		}
	}
	i.known, i.last = true, v
	return v
}

func (r *Range) extend(v uint64) *Range {
	if r == nil {
		return &Range{Min: v, Max: v}
	}
	r.Min, r.Max = min(r.Min, v), max(r.Max, v)
	return r
}

// maxRing is the longest ring KFD gives, in packets: 4 GiB of 64 bytes.
const maxRing = 1 << 26

// indices notes where the packet was put, and how far behind the reader was.
func (q *queue) indices(rec *Record) {
	q.ReadIndex = q.ReadIndex.extend(q.read.follow(rec.ReadIndex))
	q.WriteIndex = q.WriteIndex.extend(q.write.follow(rec.WriteIndex))
	length := uint64(maxRing)
	if q.SizePackets > 0 {
		length = q.SizePackets
	}
	// Both wrap at the same place, so their distance does not.
	waiting := uint64(uint32(rec.WriteIndex) - uint32(rec.ReadIndex))
	switch {
	case waiting > length:
		q.OddIndices++
	case q.MaxBacklog == nil || waiting > q.MaxBacklog.Packets:
		q.MaxBacklog = &Backlog{Packets: waiting, Event: Event{Line: rec.Line, Micros: rec.Micros}}
	}
}

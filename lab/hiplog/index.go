package hiplog

// index extends a packet index that is printed with 32 or 64 bits.
type index struct {
	known bool
	last  uint64
}

// follow returns the complete index for v, which has at least its low 32 bits: the nearest
// to the previous index.
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

// maxRing is KFD's largest ring in packets: 4 GiB of 64 bytes.
const maxRing = 1 << 26

// indices records the indices of a packet and its backlog.
func (q *queue) indices(rec *Record) {
	q.ReadIndex = q.ReadIndex.extend(q.read.follow(rec.ReadIndex))
	q.WriteIndex = q.WriteIndex.extend(q.write.follow(rec.WriteIndex))
	length := uint64(maxRing)
	if q.SizePackets > 0 {
		length = q.SizePackets
	}
	// Both wrap at the same value, so their distance does not.
	pending := uint64(uint32(rec.WriteIndex) - uint32(rec.ReadIndex))
	switch {
	case pending > length:
		q.OddIndices++
	case q.MaxBacklog == nil || pending > q.MaxBacklog.Packets:
		q.MaxBacklog = &Backlog{Packets: pending, Event: Event{Line: rec.Line, Micros: rec.Micros}}
	}
}

package engine

import (
	"encoding/binary"
	"errors"
)

const (
	// window is how much of an SDMA ring is read at once, unless one command is longer.
	window = 4096
	// pieceBytes is how much a copy moves at once.
	pieceBytes = 256 << 10
)

// fetchSDMA reads commands up to the write position, until one cannot start yet.
func (q *queue) fetchSDMA(write uint64) {
	write &^= 3
	at := q.fetched.Load()
	end := min(write, q.read.Load()+uint64(q.RingBytes))
	if at >= end {
		q.waiting = at < write
		return
	}
	ring, ok := q.readRing(at, min(end-at, window))
	if !ok {
		return
	}
	n, err := CommandBytes(ring)
	if err == nil && n > len(ring) && uint64(n) <= end-at {
		if ring, ok = q.readRing(at, uint64(n)); !ok {
			return
		}
	}
	for len(ring) > 0 {
		c, n, err := DecodeCommand(ring)
		switch {
		case errors.Is(err, ErrShort) && q.fetched.Load() > at:
			// The rest of it is in the next window, if anywhere.
			q.look = true
			return
		case errors.Is(err, ErrShort):
			if n, err := CommandBytes(ring); err == nil && n > int(q.RingBytes) {
				q.faultInTurn(q.Ring + at&uint64(q.RingBytes-1))
			}
			q.waiting = true
			return
		case err != nil:
			q.faultInTurn(q.Ring + q.fetched.Load()&uint64(q.RingBytes-1))
			q.waiting = true
			return
		case !q.fetchCommand(c, uint32(n)):
			q.waiting = true
			return
		}
		ring = ring[n:]
	}
	q.look = q.fetched.Load() < end
}

// readRing reads n bytes of the ring, around its end, to memory of their own.
func (q *queue) readRing(at, n uint64) ([]byte, bool) {
	b := make([]byte, n)
	first := at & uint64(q.RingBytes-1)
	straight := min(n, uint64(q.RingBytes)-first)
	ok := q.readAt(b[:straight], q.Ring+first) && (straight == n || q.readAt(b[straight:], q.Ring))
	return b, ok
}

// fetchCommand takes a command; false when it cannot start yet, or the queue stopped.
func (q *queue) fetchCommand(c Command, bytes uint32) bool {
	p := &packet{bytes: bytes, command: c, moves: 1}
	switch c := c.(type) {
	case NOP:
		if q.joinNOP(bytes, uint64(bytes)) {
			return true
		}
	case Poll:
		if !q.polled(c) {
			return false
		}
	case Copy:
		p.moves = int64(c.Bytes)
	case CopyRect:
		p.moves = int64(c.Width) * int64(c.Height) * int64(c.Depth) << c.Element
	case Fill:
		p.moves = int64(c.Bytes)
	case Write:
		p.moves = int64(len(c.Data))
	}
	q.take(p, uint64(bytes))
	return true
}

// polled reports whether the condition of a command holds, once all before it have ended.
func (q *queue) polled(c Poll) bool {
	if !c.Memory {
		return true
	}
	var dword [4]byte
	return q.idle() && q.readAt(dword[:], c.Address) && c.Holds(binary.LittleEndian.Uint32(dword[:]))
}

// retireCommand applies the effect of an SDMA or PM4 command: before the read position passes
// it if it moves data, afterwards if it signals that.
func (q *queue) retireCommand(p *packet) bool {
	step := p.step
	if p.lost {
		return q.advance(step)
	}
	switch c := p.command.(type) {
	case Copy:
		return q.move(c.Source, c.Target, uint64(c.Bytes)) && q.advance(step)
	case CopyRect:
		return q.moveRect(c) && q.advance(step)
	case Fill:
		return q.fill(c) && q.advance(step)
	case Write:
		return q.writeAt(c.Data, c.Target) && q.advance(step)
	case Timestamp:
		return q.write64(c.Address, q.e.cfg.Ticks(p.ended)) && q.advance(step)
	case Fence:
		return q.advance(step) && q.writeAt(binary.LittleEndian.AppendUint32(nil, c.Value), c.Address)
	case Atomic:
		var b [8]byte
		return q.advance(step) && q.readAt(b[:], c.Address) && q.write64(c.Address, binary.LittleEndian.Uint64(b[:])+c.Add)
	case Release:
		return q.release(c, p)
	case Trap:
		if !q.advance(step) {
			return false
		}
		q.interrupt(c.Event)
		return true
	}
	return q.advance(step)
}

// piece returns a buffer of n bytes, pieceBytes at most. The machine is locked.
func (e *Engine) piece(n uint64) []byte {
	if e.copying == nil {
		e.copying = make([]byte, pieceBytes)
	}
	return e.copying[:min(n, pieceBytes)]
}

func (q *queue) move(from, to, n uint64) bool {
	for n > 0 {
		b := q.e.piece(n)
		if !q.readAt(b, from) || !q.writeAt(b, to) {
			return false
		}
		done := uint64(len(b))
		from, to, n = from+done, to+done, n-done
	}
	return true
}

func (q *queue) moveRect(c CopyRect) bool {
	at := func(p Plane, y, z uint32) uint64 {
		elements := uint64(p.Z+z)*uint64(p.Slice) + uint64(p.Y+y)*uint64(p.Pitch) + uint64(p.X)
		return p.Base + elements<<c.Element
	}
	for z := range c.Depth {
		for y := range c.Height {
			if !q.move(at(c.Source, y, z), at(c.Target, y, z), uint64(c.Width)<<c.Element) {
				return false
			}
		}
	}
	return true
}

func (q *queue) fill(c Fill) bool {
	pattern := binary.LittleEndian.AppendUint32(nil, c.Value)[:1<<c.Size]
	b := q.e.piece(uint64(c.Bytes))
	for i := range b {
		b[i] = pattern[i%len(pattern)]
	}
	for to, n := c.Target, uint64(c.Bytes); n > 0; {
		b = b[:min(uint64(len(b)), n)]
		if !q.writeAt(b, to) {
			return false
		}
		to, n = to+uint64(len(b)), n-uint64(len(b))
	}
	return true
}

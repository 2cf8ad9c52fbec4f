package engine

import (
	"encoding/binary"
	"time"
)

const (
	// batch is how many packets are read at once, so that no queue delays the others.
	batch = 64
	// packetTime is the time of the packet processor for a packet without a kernel: an
	// assumption.
	packetTime = time.Microsecond
	// allDone is the progress of a kernel that ended.
	allDone = 1_000_000
)

// fetchAQL reads packets up to the write index, until one cannot start yet.
func (q *queue) fetchAQL(write uint64) {
	slots := uint64(q.RingBytes / PacketBytes)
	at := q.fetched.Load()
	// A producer may have taken a slot that is not free yet.
	end := min(write, q.read.Load()+slots)
	if at >= end {
		q.waiting = at < write
		return
	}
	first := at & (slots - 1)
	n := min(end-at, batch, slots-first)
	var ring [batch * PacketBytes]byte
	packets := ring[:n*PacketBytes]
	addr := q.Ring + first*PacketBytes
	// A packet is only valid when it is read after its header was seen: so everything is
	// read twice.
	if !q.readAt(packets, addr) {
		return
	}
	ready := 0
	for ready < int(n) && Ready(packets[ready*PacketBytes:]) {
		ready++
	}
	packets = packets[:ready*PacketBytes]
	if ready > 0 && !q.readAt(packets, addr) {
		return
	}
	for i := range ready {
		if !q.fetchPacket(packets[i*PacketBytes:][:PacketBytes], addr+uint64(i)*PacketBytes) {
			q.waiting = !q.stopped.Load()
			return
		}
	}
	// A packet that is not written yet, or not free yet, is waited for. When there are
	// more, they are next.
	q.waiting = ready < int(n) || at+n == end && end < write
	q.look = !q.waiting && at+n < end
}

// fetchPacket takes a packet; false when it cannot start yet, or the queue stopped.
func (q *queue) fetchPacket(b []byte, slot uint64) bool {
	header := HeaderOf(b)
	p := &packet{
		bytes: PacketBytes, slot: slot, signal: CompletionOf(b), overlap: !header.Barrier(),
		time: packetTime, share: 1.0 / WholeGPU,
	}
	ok := false
	switch header.Type() {
	case PacketDispatch:
		ok = q.fetchKernel(p, b)
	case PacketBarrierAnd, PacketBarrierOr:
		ok = q.mayPass(header) && q.satisfied(header.Type(), DecodeBarrier(b).Deps)
	case PacketVendor:
		switch FormatOf(b) {
		case VendorPM4:
			ok = true
		case VendorBarrierValue:
			ok = q.mayPass(header) && q.met(DecodeBarrierValue(b))
		default:
			q.faultInTurn(slot)
		}
	default:
		q.faultInTurn(slot)
	}
	if ok {
		q.take(p, 1)
	}
	return ok
}

// mayPass reports whether a packet that waits for something may look at it: with the
// barrier bit, all before it must have ended.
func (q *queue) mayPass(h Header) bool { return !h.Barrier() || q.idle() }

// faultInTurn faults once all packets before it have ended.
func (q *queue) faultInTurn(addr uint64) {
	if q.idle() {
		q.fault(addr)
	}
}

// fetchKernel reads what a kernel does.
func (q *queue) fetchKernel(p *packet, b []byte) bool {
	d := DecodeDispatch(b)
	p.time, p.share = q.e.cfg.KernelTime, 1
	var object [KernelBytes]byte
	switch err := q.Memory.ReadAt(object[:], d.Kernel); {
	case err != nil && !isFault(err):
		q.stop()
		return false
	case err != nil:
		// The code of a real kernel may be where only the GPU can read.
		return true
	}
	k, emulated := DecodeKernel(object[:])
	if !emulated {
		return true
	}
	if k.Duration > 0 {
		p.time = k.Duration
	}
	if k.Occupancy > 0 {
		p.share = float64(k.Occupancy) / WholeGPU
	}
	switch k.Op {
	case OpNothing:
		return true
	case OpMix:
		var kernarg [MixBytes]byte
		err := q.Memory.ReadAt(kernarg[:], d.Kernarg)
		if err == nil {
			mix := DecodeMix(kernarg[:])
			p.mix = &mix
			return true
		}
		if isFault(err) {
			q.faultInTurn(d.Kernarg)
		} else {
			q.stop()
		}
		return false
	}
	q.faultInTurn(d.Kernel)
	return false
}

// satisfied reports whether the condition of a barrier holds.
func (q *queue) satisfied(t PacketType, deps [BarrierDeps]uint64) bool {
	for _, dep := range deps {
		if dep == 0 {
			continue
		}
		var value [8]byte
		if !q.readAt(value[:], dep+SignalValue) {
			return false
		}
		zero := value == [8]byte{}
		if zero && t == PacketBarrierOr {
			return true
		}
		if !zero && t == PacketBarrierAnd {
			return false
		}
	}
	return t == PacketBarrierAnd
}

// met reports whether a signal has the value a barrier waits for.
func (q *queue) met(b BarrierValue) bool {
	if b.Signal == 0 {
		return true
	}
	var value [8]byte
	if !q.readAt(value[:], b.Signal+SignalValue) {
		return false
	}
	return b.Condition.Holds(int64(binary.LittleEndian.Uint64(value[:]))&b.Mask, b.Value)
}

// mix applies the effect of a kernel that ended.
func (q *queue) mix(p *packet) bool {
	if p.mix == nil {
		return true
	}
	var result [ResultBytes]byte
	if !q.readAt(result[:], p.mix.Result) {
		return false
	}
	count, hash := binary.LittleEndian.Uint64(result[:]), binary.LittleEndian.Uint64(result[8:])
	binary.LittleEndian.PutUint64(result[:], count+1)
	binary.LittleEndian.PutUint64(result[8:], MixHash(hash, p.mix.Value))
	return q.writeAt(result[:], p.mix.Result) && (p.mix.Progress == 0 || q.write64(p.mix.Progress, allDone))
}

// retireAQL frees the slot of a packet and signals its completion.
func (q *queue) retireAQL(p *packet) bool {
	invalid := [2]byte{byte(PacketInvalid)}
	return q.writeAt(invalid[:], p.slot) && q.advance(1) && (p.lost || p.signal == 0 || q.complete(p))
}

// complete decrements the completion signal of a packet.
func (q *queue) complete(p *packet) bool {
	var b [SignalBytes]byte
	const known = SignalStart
	if !q.readAt(b[:known], p.signal) {
		return false
	}
	s := DecodeSignal(b[:])
	s.Start, s.End = q.e.cfg.Ticks(p.started), q.e.cfg.Ticks(p.ended)
	s.Put(b[:])
	if !q.writeAt(b[SignalStart:SignalEnd+8], p.signal+SignalStart) ||
		!q.write64(p.signal+SignalValue, uint64(s.Value-1)) {
		return false
	}
	if s.Mailbox == 0 {
		return true
	}
	if !q.write64(s.Mailbox, uint64(s.Event)) {
		return false
	}
	q.interrupt(s.Event)
	return true
}

package workload

import (
	"fmt"

	"github.com/gpreempt/gpreempt/emu/engine"
)

// step64 is the difference between one state of SplitMix64 and the next.
const step64 = 0x9e3779b97f4a7c15

// mix64 returns the number of a state of SplitMix64.
func mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// packetValue returns the value of packet n of a worker. It differs for each of the first
// 2^40 packets of 2^24 workers.
func packetValue(worker, n uint64) uint64 { return mix64((worker<<40 + n + 1) * step64) }

// proof is the expected hash of the packets of one queue, for any number that ran.
type proof struct {
	// pushed counts the packets.
	pushed uint64
	// hashes has, at n modulo its length, the hash after n packets, for the latest n.
	hashes []uint64
}

// newProof returns the proof of a queue that has at most window packets not found complete.
func newProof(window int) proof { return proof{hashes: make([]uint64, window+1)} }

// push records a packet.
func (p *proof) push(value uint64) {
	hash := engine.MixHash(p.hash(), value)
	p.pushed++
	p.hashes[p.pushed%uint64(len(p.hashes))] = hash
}

// hash returns the hash of all packets.
func (p *proof) hash() uint64 { return p.hashes[p.pushed%uint64(len(p.hashes))] }

// check checks that the first count packets, in order, have the hash.
func (p *proof) check(count, hash uint64) error {
	switch oldest := p.pushed - min(p.pushed, uint64(len(p.hashes)-1)); {
	case count > p.pushed:
		return fmt.Errorf("%d packets ran, of %d", count, p.pushed)
	case count < oldest:
		return fmt.Errorf("%d packets ran, but %d had completed before", count, oldest)
	}
	if want := p.after(count); hash != want {
		return fmt.Errorf("%d packets ran with the hash 0x%016x, want 0x%016x when each runs once and in order", count, hash, want)
	}
	return nil
}

// after returns the hash of the first count packets, if that is still known.
func (p *proof) after(count uint64) uint64 {
	return p.hashes[min(count, p.pushed)%uint64(len(p.hashes))]
}

// checkAll is check when every packet must have run.
func (p *proof) checkAll(count, hash uint64) error {
	if count < p.pushed {
		return fmt.Errorf("%d packets ran, of %d", count, p.pushed)
	}
	return p.check(count, hash)
}

package inventory

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Units of a backlog.
const (
	Packets = "packets"
	Dwords  = "dwords"
	Bytes   = "bytes"
)

// Backlog is the work on a queue that its owner has written and the GPU has not read.
// What the GPU has read may still run: the packet processor goes on to the next packet
// as soon as it has started one that has no barrier.
type Backlog struct {
	// Known is set when it could be read and is plausible; otherwise the rest is zero.
	Known bool
	// Value is in Unit.
	Value uint64
	Unit  string
	// Written is the owner's position. It changes with new work, also where that was done by
	// the time of the next reading.
	Written uint64
}

// ErrMemoryBusy reports that earlier readings of the process, or of too many others,
// have not ended.
var ErrMemoryBusy = errors.New("an earlier read of its memory has not ended: a file system behind the memory does not answer, or the process ends and its queues do not leave the GPU")

const (
	// readTimeout is how long Read waits for memory that does not answer.
	readTimeout = 50 * time.Millisecond
	// maxStuck bounds the readings that do not end. Each holds a thread.
	maxStuck = 16
)

// BacklogReader reads backlogs. Its methods may be called by any number of goroutines.
type BacklogReader struct {
	// check returns proc.ErrGone for a process that has ended.
	check func(gpreempt.ProcessKey) error
	// peek reads 64-bit words at addresses of a process, from the first on, and returns
	// how many it read: at least one, or an error.
	peek func(pid int32, addresses []uint64, words []uint64) (int, error)

	mu sync.Mutex // guards reading
	// reading are the processes whose memory a goroutine reads.
	reading map[int32]struct{}
}

// NewBacklogReader returns a reader of the processes of this host.
func NewBacklogReader() *BacklogReader {
	return &BacklogReader{
		check: func(key gpreempt.ProcessKey) error { return proc.Check("/", key) },
		peek:  peek, reading: map[int32]struct{}{},
	}
}

// Read returns the backlogs of queues of one process, index by index. The error is
// proc.ErrGone, ErrMemoryBusy, one of the kernel, or the cause of ctx.
//
// The memory may be backed by a file system of the owner, which need not answer, and since Linux
// 7.2 the reader of a process that ends may have to wait until its queues have left the GPU
// (exit_mmap, kfd_process_notifier_release): Read gives up after a while, and reads from that
// process again only when the earlier read has ended.
func (r *BacklogReader) Read(ctx context.Context, key gpreempt.ProcessKey, queues []gpreempt.QueueEntry) ([]Backlog, error) {
	var addresses []uint64
	for _, q := range queues {
		if readable(q) {
			// The read position first: what the owner adds meanwhile makes the backlog
			// larger, never less than nothing.
			addresses = append(addresses, q.Info.ReadPointer, q.Info.WritePointer)
		}
	}
	backlogs := make([]Backlog, len(queues))
	if len(addresses) == 0 {
		return backlogs, nil
	}
	words, known, err := r.read(ctx, key, addresses)
	if err != nil {
		return nil, err
	}
	for n, q := range queues {
		if !readable(q) {
			continue
		}
		if known[0] && known[1] {
			backlogs[n] = of(q, words[0], words[1])
		}
		words, known = words[2:], known[2:]
	}
	return backlogs, nil
}

func readable(q gpreempt.QueueEntry) bool { return q.Info.ReadPointer != 0 && q.Info.WritePointer != 0 }

// of returns the backlog that two positions mean. Positions of AQL and copy queues count from the
// creation of the queue and never wrap in a lifetime; those of other compute queues
// are offsets into the ring. A backlog larger than the ring is impossible: the
// addresses are not those of positions.
func of(q gpreempt.QueueEntry, read, write uint64) Backlog {
	b := Backlog{Known: true, Value: write - read, Written: write}
	var capacity uint64
	switch {
	case q.Info.AQL:
		b.Unit, capacity = Packets, q.RingBytes/packetBytes
	case q.Type == gpreempt.QueueCompute:
		b.Unit, capacity = Dwords, q.RingBytes/4
		if capacity > 0 {
			b.Value %= capacity // a power of two
		}
	default:
		b.Unit, capacity = Bytes, q.RingBytes
	}
	if b.Value > capacity {
		return Backlog{}
	}
	return b
}

// packetBytes is the size of an AQL packet.
const packetBytes = 64

// answer is what one reading found.
type answer struct {
	words []uint64
	known []bool
	err   error
}

// read collects in a goroutine, which it abandons after readTimeout.
func (r *BacklogReader) read(ctx context.Context, key gpreempt.ProcessKey, addresses []uint64) ([]uint64, []bool, error) {
	r.mu.Lock()
	if _, under := r.reading[key.PID]; under || len(r.reading) >= maxStuck {
		r.mu.Unlock()
		return nil, nil, fmt.Errorf("process %d: %w", key.PID, ErrMemoryBusy)
	}
	r.reading[key.PID] = struct{}{}
	r.mu.Unlock()
	done := make(chan answer, 1)
	go func() {
		a := r.collect(key, addresses)
		r.mu.Lock()
		delete(r.reading, key.PID)
		r.mu.Unlock()
		done <- a
	}()
	giveUp := time.NewTimer(readTimeout)
	defer giveUp.Stop()
	select {
	case a := <-done:
		return a.words, a.known, a.err
	case <-giveUp.C:
		return nil, nil, fmt.Errorf("process %d: %w", key.PID, ErrMemoryBusy)
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
}

// collect reads all addresses, and then checks that the pid was that of the process.
func (r *BacklogReader) collect(key gpreempt.ProcessKey, addresses []uint64) answer {
	a := answer{words: make([]uint64, len(addresses)), known: make([]bool, len(addresses))}
	for at := 0; at < len(addresses); {
		n, err := r.peek(key.PID, addresses[at:], a.words[at:])
		for i := range n {
			a.known[at+i] = true
		}
		at += n
		if errors.Is(err, errUnmapped) {
			at++
		} else if err != nil {
			a.err = err
			break
		}
	}
	if err := r.check(key); err != nil {
		a.err = err
	} else if a.err != nil {
		a.err = fmt.Errorf("read the memory of process %d: %w", key.PID, a.err)
	}
	return a
}

// Package backlog hides how the work waiting on a queue is read: from the two
// positions its owner and the GPU keep in the owner's memory.
package backlog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Units of a backlog.
const (
	Packets = "packets"
	Dwords  = "dwords"
	Bytes   = "bytes"
)

// Queue is what has to be known of a queue to read its backlog.
type Queue struct {
	gpreempt.Queue
	Info gpreempt.QueueInfo
}

// Backlog is the work on a queue that was written and not yet read by the GPU.
// What is read may still run: the packet processor goes on to the next packet as
// soon as it has started one that has no barrier.
type Backlog struct {
	// Known tells that it could be read and makes sense; otherwise it is zero.
	Known bool
	// Value is in Unit.
	Value uint64
	Unit  string
}

// The errors of Read.
var (
	// ErrGone reports that the process has ended, or the pid is another's.
	ErrGone = errors.New("the process has exited")
	// ErrBusy reports that earlier readings of the process, or of too many others,
	// have not come back.
	ErrBusy = errors.New("its memory is being read already, and that takes long: it may be backed by a file system that does not answer")
)

const (
	// patience is how long Read waits for memory that does not answer.
	patience = 50 * time.Millisecond
	// maxStuck bounds the readings that do not come back. Each holds a thread.
	maxStuck = 16
)

// Reader reads backlogs. Its methods may be called by any number of goroutines.
type Reader struct {
	// proc reads /proc/PID/stat.
	proc func(pid int32) (discovery.ProcStat, error)
	// peek reads 64-bit words at addresses of a process, from the first on, and tells
	// how many it read: one at least, or there is an error.
	peek func(pid int32, addresses []uint64, words []uint64) (int, error)

	mu sync.Mutex // guards reading
	// reading are the processes that a goroutine reads from now.
	reading map[int32]struct{}
}

// New returns a reader of the processes of this host.
func New() *Reader {
	return &Reader{proc: statOf, peek: peek, reading: map[int32]struct{}{}}
}

// Read returns the backlogs of queues of one process, index by index. The errors are
// ErrGone, ErrBusy, what the kernel says, or the cause of ctx.
//
// The memory may be backed by what its owner chose, and then does not answer for as
// long as the owner likes: Read gives up on it, and reads from that process again
// only when it has answered.
func (r *Reader) Read(ctx context.Context, key gpreempt.ProcessKey, queues []Queue) ([]Backlog, error) {
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

func readable(q Queue) bool { return q.Info.ReadPointer != 0 && q.Info.WritePointer != 0 }

// of says what two positions mean. Positions of AQL and copy queues count from the
// creation of the queue and never wrap in a lifetime; those of other compute queues
// are offsets into the ring. More than the ring holds cannot be: then the addresses
// are not those of positions.
func of(q Queue, read, write uint64) Backlog {
	b := Backlog{Known: true, Value: write - read}
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

// read has a goroutine of its own do the reading.
func (r *Reader) read(ctx context.Context, key gpreempt.ProcessKey, addresses []uint64) ([]uint64, []bool, error) {
	r.mu.Lock()
	if _, under := r.reading[key.PID]; under || len(r.reading) >= maxStuck {
		r.mu.Unlock()
		return nil, nil, fmt.Errorf("process %d: %w", key.PID, ErrBusy)
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
	giveUp := time.NewTimer(patience)
	defer giveUp.Stop()
	select {
	case a := <-done:
		return a.words, a.known, a.err
	case <-giveUp.C:
		return nil, nil, fmt.Errorf("process %d: %w", key.PID, ErrBusy)
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
}

// collect reads all addresses. The process is looked at afterwards: if it lives
// then, no other had the pid before.
func (r *Reader) collect(key gpreempt.ProcessKey, addresses []uint64) answer {
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
	stat, err := r.proc(key.PID)
	switch {
	case err != nil || stat.Start != key.Start || !stat.Alive():
		a.err = fmt.Errorf("process %d: %w", key.PID, ErrGone)
	case a.err != nil:
		a.err = fmt.Errorf("read the memory of process %d: %w", key.PID, a.err)
	}
	return a
}

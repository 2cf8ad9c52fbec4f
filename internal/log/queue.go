package log

import (
	"bytes"
	"io"
	"sync/atomic"
	"time"
)

const (
	// queueLines bounds the lines that wait to be written.
	queueLines = 4096
	// flushTime is how long Close waits for them to be written.
	flushTime = time.Second
)

// linesLost is the message about a full queue.
const linesLost = "log lines lost: the reader of the log is too slow"

// queue writes lines from a goroutine of its own. State changes are logged under the
// scheduler's lock, and a reader of the log that has stopped reading must not delay a
// resume. If the queue is full, lines are lost, and one line says how many.
type queue struct {
	gap   func(lines int64) // writes the line that says how many are lost
	lines chan func()       // each writes one
	lost  atomic.Int64
	stop  chan struct{}
	done  chan struct{}
}

func newQueue(gap func(int64)) *queue {
	q := &queue{gap: gap, lines: make(chan func(), queueLines), stop: make(chan struct{}), done: make(chan struct{})}
	go q.run()
	return q
}

// put queues the writing of one line. It does not block.
func (q *queue) put(write func()) {
	select {
	case q.lines <- write:
	default:
		q.lost.Add(1)
	}
}

// queued writes lines by a queue.
type queued struct {
	queue *queue
	to    io.Writer
}

// Write queues one line. An error cannot be logged and is ignored.
func (w queued) Write(line []byte) (int, error) {
	line = bytes.Clone(line)
	w.queue.put(func() { _, _ = w.to.Write(line) })
	return len(line), nil
}

func (q *queue) run() {
	defer close(q.done)
	for {
		select {
		case line := <-q.lines:
			q.pass(line)
		case <-q.stop:
			for {
				select {
				case line := <-q.lines:
					q.pass(line)
				default:
					return
				}
			}
		}
	}
}

func (q *queue) pass(write func()) {
	write()
	if n := q.lost.Swap(0); n > 0 {
		q.gap(n)
	}
}

// Close waits until the queued lines are written, at most flushTime.
func (q *queue) Close() {
	close(q.stop)
	for range 2 { // after a pause of the process, half of the time is left
		select {
		case <-q.done:
			return
		case <-time.After(flushTime / 2):
		}
	}
}

package workload

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// Answer runs a client that works on request, as an inference server does: for each line
// of in it submits --packets packets to every queue, and writes "answer" when the last has
// completed. It proves its work and ends when in or ctx ends. Otherwise it is like Main.
func Answer(ctx context.Context, sys Sys, args []string, in io.Reader, out, help io.Writer) int {
	return run(sys, args, out, help, (*Config).atOnce, func(c *client) {
		if err := errors.Join(c.answer(ctx, in), c.load.drain()); err != nil {
			c.load.failed.Store(true)
			c.fail(err)
		}
	})
}

// atOnce checks the configuration for Answer, and sets a depth for all packets of an
// answer.
func (c *Config) atOnce() error {
	switch {
	case c.Packets == 0 || c.Packets > maxDepth:
		return fmt.Errorf("--packets %d: 1 to %d for each answer", c.Packets, maxDepth)
	case c.Churn || c.Rate != 0 || c.SDMA:
		return errors.New("--churn, --rate and --sdma cannot be used by a client that works on request")
	}
	c.Depth = int(c.Packets)
	return nil
}

// answer answers lines until their end.
func (c *client) answer(ctx context.Context, in io.Reader) error {
	lines, next, end := make(chan string), make(chan struct{}), make(chan struct{})
	defer close(end)
	go read(in, lines, next, end)
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, more := <-lines:
			if !more {
				return nil
			}
		}
		if err := c.load.once(); err != nil {
			return err
		}
		c.say(Message{Event: "answer"})
		next <- struct{}{}
	}
}

// once submits the packets of an answer to each queue and waits until all have completed.
// The workers have no goroutines.
func (l *load) once() error {
	for _, w := range l.workers {
		if err := w.burst(l.cfg.Packets); err != nil {
			return err
		}
	}
	for _, w := range l.workers {
		if err := w.settleBurst(); err != nil {
			return err
		}
	}
	return nil
}

// burst submits n packets to an empty queue. The last one raises the event.
func (w *worker) burst(n uint64) error {
	q, ok := w.queue.(*compute)
	if !ok {
		return errors.New("an answer needs a compute queue")
	}
	defer func() { q.wake = w.wake }()
	for i := range n {
		q.wake = nil
		if i == n-1 {
			q.wake = w.wake
		}
		if pushed, _, err := w.turn(time.Now(), true, time.Time{}); err != nil || !pushed {
			return errors.Join(err, fmt.Errorf("packet %d of %d does not fit into the queue", i+1, n))
		}
	}
	return nil
}

// settleBurst waits until the packets of a burst have completed.
func (w *worker) settleBurst() error {
	for missed := false; ; {
		_, flying, err := w.turn(time.Now(), false, time.Time{})
		switch {
		case err != nil:
			return err
		case flying == 0 && missed:
			// The GPU raises the event after it writes: the event may follow.
			if raised, err := w.wake.wait(maxWait); err != nil || raised {
				return err
			}
			return errors.New("all packets have completed, but the event of the last was not raised")
		case flying == 0:
			return nil
		case w.wake == nil:
			w.watch(maxWait)
		default:
			raised, err := w.wake.wait(maxWait)
			if err != nil {
				return err
			}
			missed = !raised
		}
	}
}

// drain ends the queues of workers without goroutines when they are empty, and proves
// them.
func (l *load) drain() error {
	var errs []error
	for _, w := range l.workers {
		drained, err := w.drain()
		errs = append(errs, err, w.destroy(drained))
	}
	return errors.Join(errs...)
}

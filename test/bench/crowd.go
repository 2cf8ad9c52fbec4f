package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// crowd is a number of clients, each with a connection, that announce and complete.
type crowd struct {
	conns []*grpc.ClientConn
	// every is the time from one announcement of a client to its next; 0: none.
	every  time.Duration
	notify *series
	// rates has the calls per second of each repeat; fewest has the calls of the slowest
	// client as a share of the mean.
	rates, fewest []float64
}

func (b *bench) newCrowd(name, socket string, clients int, every time.Duration) (*crowd, error) {
	c := &crowd{every: every, notify: b.series("i", fmt.Sprintf("%s/clients=%d/every=%v/call=NotifyOnline", name, clients, every))}
	for range clients {
		conn, err := dial(socket)
		if err != nil {
			return nil, errors.Join(err, c.close())
		}
		c.conns = append(c.conns, conn)
	}
	return c, nil
}

func (c *crowd) close() error {
	var all error
	for _, conn := range c.conns {
		all = errors.Join(all, conn.Close())
	}
	return all
}

// run makes all clients call until the window ends. The first calls of each client are
// not counted: they connect.
func (c *crowd) run(ctx context.Context, window time.Duration) error {
	const warm = 2
	each, errs := make([][]time.Duration, len(c.conns)), make([]error, len(c.conns))
	var ready, done sync.WaitGroup
	ready.Add(len(c.conns))
	var began, end time.Time
	begin := make(chan struct{})
	for i, conn := range c.conns {
		done.Go(func() {
			online := gpreemptv1.NewOnlineServiceClient(conn)
			call := func() {
				began := time.Now()
				answer, err := online.NotifyOnline(ctx, announcement)
				each[i] = append(each[i], time.Since(began))
				if err == nil {
					_, err = online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: answer.GetLeaseId()})
				}
				errs[i] = cmp.Or(errs[i], err)
			}
			for range warm {
				call()
			}
			each[i] = each[i][:0]
			ready.Done()
			<-begin
			// Paced clients start evenly spread over their interval.
			next := began.Add(c.every * time.Duration(i) / time.Duration(len(c.conns)))
			for ; errs[i] == nil && time.Now().Before(end); next = next.Add(c.every) {
				time.Sleep(time.Until(next))
				call()
			}
		})
	}
	ready.Wait()
	began = time.Now()
	end = began.Add(window)
	close(begin)
	done.Wait()
	took := time.Since(began)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	calls, fewest := 0, len(each[0])
	for _, all := range each {
		c.notify.samples = append(c.notify.samples, all...)
		calls, fewest = calls+len(all), min(fewest, len(all))
	}
	c.notify.endRepeat()
	c.rates = append(c.rates, 2*float64(calls)/took.Seconds())
	c.fewest = append(c.fewest, float64(fewest)*float64(len(each))/float64(calls))
	return nil
}

// crowds is section i.
func (b *bench) crowds(ctx context.Context) (err error) {
	h, err := b.startHost(ctx, 1, 1, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	var single *series
	for _, m := range []struct {
		clients       int
		every, window time.Duration
	}{
		{1, 0, 300 * time.Millisecond},
		{16, 0, 300 * time.Millisecond},
		{256, 0, time.Second}, // for each to have some calls
		{256, 500 * time.Millisecond, time.Second},
	} {
		name := fmt.Sprintf("%d clients, ", m.clients)
		if m.every > 0 {
			name += fmt.Sprintf("one announcement each in %v, ", m.every)
		}
		b.say("i: %s%v", name, m.window)
		bare, daemon, err := b.compareCrowds(ctx, h.socket, m.clients, m.every, m.window)
		if err != nil {
			return err
		}
		b.figure("i", name+"NotifyOnline / unary echo, p99", "x", ratios(p99, daemon.notify, bare.notify, 1))
		if m.clients == 1 {
			single = daemon.notify
		}
		many := m.clients == 256
		if m.every == 0 {
			b.figure("i", name+"throughput", "calls/s", daemon.rates)
			relative := b.figure("i", name+"throughput / unary echo's", "x", quotients(daemon.rates, bare.rates))
			if many {
				relative.atLeast(0.7)
			}
		}
		if many {
			b.figure("i", name+"p99 / p50 of one client", "x", quotients(each(p99, daemon.notify), each(p50, single))).atMost(20)
			b.figure("i", name+"unary echo's p99 / p50 of one client", "x", quotients(each(p99, bare.notify), each(p50, single)))
		}
		if many && m.every == 0 {
			b.figure("i", name+"fewest calls of a client / mean", "x", daemon.fewest).atLeast(0.5)
			b.figure("i", name+"fewest calls of a client / mean, unary echo", "x", bare.fewest)
		}
	}
	return nil
}

// compareCrowds runs equally many clients of the echo and of the daemon in turns.
func (b *bench) compareCrowds(ctx context.Context, socket string, clients int, every, window time.Duration) (bare, daemon *crowd, err error) {
	if bare, err = b.newCrowd("BareCrowd", echoSocket(b.dir), clients, every); err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, bare.close()) }()
	if daemon, err = b.newCrowd("DaemonCrowd", socket, clients, every); err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, daemon.close()) }()
	if b.quick {
		window /= 2
	}
	sides := []*crowd{bare, daemon}
	for range b.repeats {
		slices.Reverse(sides) // the first side changes
		for _, side := range sides {
			if err := side.run(ctx, window); err != nil {
				return nil, nil, err
			}
		}
	}
	return bare, daemon, nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// turn makes the calls of one side in a round and times them.
type turn func(ctx context.Context) error

// rhythm describes how the sides are interleaved: the number of calls of a side in a row,
// and the pause before each call. A block begins with a call that is not counted.
type rhythm struct {
	name  string
	block int
	pause time.Duration
	// rounds is the number of rounds in a repeat of a full run.
	rounds int
}

var (
	// backToBack is the hardest for the daemon: the echo needs no wake-up, and an
	// announcement arrives during the resume of the previous one.
	backToBack = rhythm{"back to back", 20, 0, 100}
	// paced is closer to inference: earlier work is complete and servers have to wake up.
	paced = rhythm{"paced", 1, 150 * time.Microsecond, 400}
)

// interleave runs the sides in turns for a number of rounds and summarises the series
// after each repeat. The first side changes from round to round.
func interleave(ctx context.Context, repeats, rounds int, r rhythm, all []*series, turns ...turn) error {
	counted := make([]int, len(all))
	for range repeats {
		for round := range rounds {
			for i := range turns {
				for k, s := range all {
					counted[k] = len(s.samples)
				}
				for call := range 1 + r.block {
					settle(r.pause)
					if err := turns[(round+i)%len(turns)](ctx); err != nil {
						return err
					}
					for k, s := range all {
						if call == 0 {
							s.samples = s.samples[:counted[k]]
						}
					}
				}
			}
		}
		for _, s := range all {
			s.endRepeat()
		}
	}
	return nil
}

// settle waits until work that the previous call left in the servers is complete, so that
// it is not charged to the next side. Short pauses are busy: the wake-up of a CPU is not
// part of the measurement.
func settle(pause time.Duration) {
	const awake = 150 * time.Microsecond
	if pause > awake {
		time.Sleep(pause - awake)
		pause = awake
	}
	for began := time.Now(); time.Since(began) < pause; {
	}
}

// rawTurn sends as many bytes as an announcement has and waits for as many as its answer
// has.
func rawTurn(conn net.Conn, s *series) turn {
	request, answer := make([]byte, proto.Size(announcement)), make([]byte, proto.Size(announced))
	return func(context.Context) error {
		return s.time(func() error {
			if _, err := conn.Write(request); err != nil {
				return err
			}
			_, err := io.ReadFull(conn, answer)
			return err
		})
	}
}

// exchange is an announcement and the end of its lease: how long each takes, and both
// together.
type exchange struct{ notify, complete, pair *series }

func (b *bench) exchange(section, name, rest string) exchange {
	of := func(call string) *series { return b.series(section, name+"/call="+call+rest) }
	return exchange{of("NotifyOnline"), of("Complete"), of("Both")}
}

// turn times an announcement that suspends all targets, the end of its lease, and both.
func (x exchange) turn(targets int, announce func(context.Context) (*gpreemptv1.NotifyOnlineResponse, error), complete func(context.Context, string) error) turn {
	return func(ctx context.Context) error {
		var answer *gpreemptv1.NotifyOnlineResponse
		if err := x.notify.time(func() (err error) {
			answer, err = announce(ctx)
			return err
		}); err != nil {
			return err
		}
		if err := quiet(answer, targets); err != nil {
			return err
		}
		if err := x.complete.time(func() error { return complete(ctx, answer.GetLeaseId()) }); err != nil {
			return err
		}
		x.pair.add(x.notify.last() + x.complete.last())
		return nil
	}
}

// unaryTurn is an exchange by two calls.
func unaryTurn(online gpreemptv1.OnlineServiceClient, targets int, x exchange) turn {
	return x.turn(targets, func(ctx context.Context) (*gpreemptv1.NotifyOnlineResponse, error) {
		return online.NotifyOnline(ctx, announcement)
	}, func(ctx context.Context, lease string) error {
		_, err := online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: lease})
		return err
	})
}

// streamTurn is an exchange by two frames of a session.
func streamTurn(session gpreemptv1.OnlineService_SessionClient, targets int, x exchange) turn {
	var tag uint64
	ask := func(frame *gpreemptv1.SessionRequest) (*gpreemptv1.SessionResponse, error) {
		tag++
		frame.Tag = tag
		if err := session.Send(frame); err != nil {
			return nil, err
		}
		answer, err := session.Recv()
		if err == nil && (answer.GetTag() != tag || answer.GetError() != nil) {
			err = fmt.Errorf("the session answered %v", answer)
		}
		return answer, err
	}
	return x.turn(targets, func(context.Context) (*gpreemptv1.NotifyOnlineResponse, error) {
		answer, err := ask(&gpreemptv1.SessionRequest{Frame: &gpreemptv1.SessionRequest_Announce{Announce: announcement}})
		return answer.GetAnnounced(), err
	}, func(_ context.Context, lease string) error {
		_, err := ask(&gpreemptv1.SessionRequest{Frame: &gpreemptv1.SessionRequest_Complete{Complete: &gpreemptv1.CompleteRequest{LeaseId: lease}}})
		return err
	})
}

// sdkTurn does the same with the Go SDK.
func sdkTurn(c *client.Client, acquire, release *series) turn {
	request := client.Request{GPUs: client.OwnGPUs(), Label: announcement.GetLabel(), TTL: announcement.GetTtl().AsDuration(), MaxWait: announcement.GetMaxWait().AsDuration()}
	return func(ctx context.Context) error {
		var lease *client.Lease
		if err := acquire.time(func() (err error) {
			lease, err = c.Acquire(ctx, request)
			return err
		}); err != nil {
			return err
		}
		if !lease.Quiet() || lease.SuspendedTargets() != 1 {
			return errors.New("the SDK's announcement did not suspend the job")
		}
		return release.time(func() error { return releaseLease(ctx, lease) })
	}
}

// releaseLease releases a lease. The SDK waits a second for the answer, which a busy machine exceeds.
func releaseLease(ctx context.Context, lease interface{ Release(context.Context) error }) error {
	for {
		err := lease.Release(ctx)
		if gpreempt.ReasonOf(err) != gpreempt.ReasonDaemonUnavailable {
			return err
		}
	}
}

// quiet checks that an announcement suspended all targets.
func quiet(answer *gpreemptv1.NotifyOnlineResponse, targets int) error {
	if !answer.GetQuiesced() || int(answer.GetSuspendedTargets()) != targets {
		return fmt.Errorf("an announcement of %d jobs was answered %v", targets, answer)
	}
	return nil
}

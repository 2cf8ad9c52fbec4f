package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpreempt/gpreempt/pkg/client"
)

// groupHosts is the number of daemons in section n.
const groupHosts = 8

// groups is section n: an announcement on one host and on several at once.
func (b *bench) groups(ctx context.Context) (err error) {
	var members []client.Member
	for i := range groupHosts {
		h, err := b.startHost(ctx, 1, 1, modelled)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, h.close()) }()
		c, err := client.Dial(h.socket, client.FailClosed())
		if err != nil {
			return err
		}
		defer c.Close()
		members = append(members, client.Member{Name: fmt.Sprint("host", i), Client: c})
	}
	sides := []*series{b.series("n", "Group/hosts=1"), b.series("n", fmt.Sprintf("Group/hosts=%d", groupHosts))}
	turnOf := func(g *client.Group, s *series) turn {
		return func(ctx context.Context) error {
			var lease *client.GroupLease
			if err := s.time(func() (err error) {
				lease, err = g.Acquire(ctx, client.Request{GPUs: client.OwnGPUs(), MaxWait: 10 * time.Second})
				return err
			}); err != nil {
				return err
			}
			if !lease.Quiet() {
				return errors.New("the hosts are not quiet")
			}
			return releaseLease(ctx, lease)
		}
	}
	if err := interleave(ctx, b.repeats, b.rounds(100), rhythm{block: 1, pause: 16 * modelled}, sides,
		turnOf(client.NewGroup(members[:1]...), sides[0]), turnOf(client.NewGroup(members...), sides[1])); err != nil {
		return err
	}
	b.figure("n", "group of 1 host, 400 µs, p50", "µs", micros(p50, sides[0]))
	b.figure("n", fmt.Sprintf("group of %d hosts / 1, 400 µs, p50", groupHosts), "x", ratios(p50, sides[1], sides[0], 1))
	b.figure("n", fmt.Sprintf("group of %d hosts / 1, 400 µs, p99", groupHosts), "x", ratios(p99, sides[1], sides[0], 1))
	return nil
}

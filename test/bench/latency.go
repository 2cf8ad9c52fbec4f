package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// calls measures sections a to e: the same exchange through more and more layers.
func (b *bench) calls(ctx context.Context) (err error) {
	raw, err := new(net.Dialer).DialContext(ctx, "unix", rawSocket(b.dir))
	if err != nil {
		return err
	}
	defer raw.Close()
	bare, err := dial(echoSocket(b.dir))
	if err != nil {
		return err
	}
	defer bare.Close()
	h, err := b.startHost(ctx, 1, 1, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	sdk, err := client.Dial(h.socket, client.FailClosed())
	if err != nil {
		return err
	}
	defer sdk.Close()
	// Two streams of one process: the leases of each are its own.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	bareStream, err := gpreemptv1.NewOnlineServiceClient(bare).Session(ctx)
	if err != nil {
		return err
	}
	stream, err := gpreemptv1.NewOnlineServiceClient(h.conn).Session(ctx)
	if err != nil {
		return err
	}

	for _, m := range []rhythm{backToBack, paced} {
		if b.quick && m.name == paced.name {
			continue
		}
		first := len(b.report.Series)
		rhythm := "/rhythm=" + strings.ReplaceAll(m.name, " ", "")
		pingpong := b.series("a", "RawSocket/call=PingPong"+rhythm)
		bareUnary, bareFrames := b.exchange("b", "BareUnary", rhythm), b.exchange("c", "BareStream", rhythm)
		unary, frames := b.exchange("d", "DaemonUnary", rhythm), b.exchange("e", "DaemonSession", rhythm)
		acquire, release := b.series("e", "SDKSession/call=Acquire"+rhythm), b.series("e", "SDKSession/call=Release"+rhythm)
		if err := interleave(ctx, b.repeats, b.rounds(m.rounds), m, b.report.Series[first:],
			rawTurn(raw, pingpong),
			unaryTurn(gpreemptv1.NewOnlineServiceClient(bare), 1, bareUnary),
			unaryTurn(gpreemptv1.NewOnlineServiceClient(h.conn), 1, unary),
			streamTurn(bareStream, 1, bareFrames),
			streamTurn(stream, 1, frames),
			sdkTurn(sdk, acquire, release),
		); err != nil {
			return err
		}
		b.figure("a", "raw ping-pong, p50, "+m.name, "µs", micros(p50, pingpong))
		b.figure("b", "bare unary echo / raw ping-pong, p50, "+m.name, "x", ratios(p50, bareUnary.notify, pingpong, 1))
		b.figure("c", "bare stream echo / raw ping-pong, p50, "+m.name, "x", ratios(p50, bareFrames.notify, pingpong, 1))
		b.figure("d", "NotifyOnline / unary echo, p50, "+m.name, "x", ratios(p50, unary.notify, bareUnary.notify, 1)).atMost(1.25)
		b.figure("d", "NotifyOnline / unary echo, p99, "+m.name, "x", ratios(p99, unary.notify, bareUnary.notify, 1)).atMost(1.6)
		b.figure("d", "NotifyOnline+Complete / two unary echoes, p50, "+m.name, "x", ratios(p50, unary.pair, bareUnary.pair, 1)).atMost(1.25)
		b.figure("d", "NotifyOnline+Complete / two unary echoes, p99, "+m.name, "x", ratios(p99, unary.pair, bareUnary.pair, 1)).atMost(1.6)
		b.figure("e", "announce by Session / stream echo, p50, "+m.name, "x", ratios(p50, frames.notify, bareFrames.notify, 1)).atMost(1.2)
		b.figure("e", "announce+complete by Session / two stream echoes, p50, "+m.name, "x", ratios(p50, frames.pair, bareFrames.pair, 1)).atMost(1.2)
		b.figure("e", "SDK's Acquire by Session / stream echo, p50, "+m.name, "x", ratios(p50, acquire, bareFrames.notify, 1))
		b.figure("e", "SDK's Acquire by Session / raw ping-pong, p50, "+m.name, "x", ratios(p50, acquire, pingpong, 1))
	}
	return nil
}

// scale is one side of sections f and g.
type scale struct {
	targets, gpus int
	exchange
}

// grow measures announcements with growing numbers of targets and GPUs, interleaved, and
// fills in the exchanges of sizes.
func (b *bench) grow(ctx context.Context, section, name string, rounds int, cost, pause time.Duration, sizes ...scale) (err error) {
	first := len(b.report.Series)
	var turns []turn
	for i, s := range sizes {
		b.say("%s: %d jobs on %d GPUs", section, s.targets, s.gpus)
		h, err := b.startHost(ctx, s.targets, s.gpus, cost)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, h.close()) }()
		sizes[i].exchange = b.exchange(section, fmt.Sprintf("%s/targets=%d/gpus=%d", name, s.targets, s.gpus), "")
		turns = append(turns, unaryTurn(gpreemptv1.NewOnlineServiceClient(h.conn), s.targets, sizes[i].exchange))
	}
	return interleave(ctx, b.repeats, rounds, rhythm{block: 1, pause: pause}, b.report.Series[first:], turns...)
}

// manyTargets is section f.
func (b *bench) manyTargets(ctx context.Context) error {
	sizes := []scale{{targets: 1, gpus: 1}, {targets: 8, gpus: 1}, {targets: 64, gpus: 1}, {targets: 1, gpus: 8}, {targets: 8, gpus: 8}, {targets: 64, gpus: 8}}
	if b.quick {
		sizes = []scale{sizes[0], sizes[len(sizes)-1]}
	}
	if err := b.grow(ctx, "f", "NoCost", b.rounds(60), 0, 2*time.Millisecond, sizes...); err != nil {
		return err
	}
	for _, s := range sizes[1:] {
		f := b.figure("f", fmt.Sprintf("targets x GPUs %dx%d / 1x1, no cost, p50", s.targets, s.gpus), "x", ratios(p50, s.notify, sizes[0].notify, 1))
		if s.targets == 64 && s.gpus == 8 {
			f.atMost(2)
		}
	}
	return nil
}

// modelled is the duration of a suspend or a resume in section g.
const modelled = 400 * time.Microsecond

// parallel is section g.
func (b *bench) parallel(ctx context.Context) error {
	// The driver changes the runlist of a GPU for one process at a time, and so does the
	// model: jobs on one GPU wait for each other, jobs on different GPUs do not.
	sizes := []scale{{targets: 1, gpus: 1}, {targets: 8, gpus: 8}, {targets: 64, gpus: 64}, {targets: 64, gpus: 8}}
	if err := b.grow(ctx, "g", "Modelled400us", b.rounds(50), modelled, 16*modelled, sizes...); err != nil {
		return err
	}
	one := sizes[0].notify
	b.figure("g", "targets x GPUs 1x1, 400 µs, p50", "µs", micros(p50, one))
	b.figure("g", "targets x GPUs 8x8 / 1x1, 400 µs, p50", "x", ratios(p50, sizes[1].notify, one, 1)).atMost(1.3)
	b.figure("g", "targets x GPUs 64x64 / 1x1, 400 µs, p50", "x", ratios(p50, sizes[2].notify, one, 1)).atMost(1.3)
	b.figure("g", "targets x GPUs 64x8 / 8 times 1x1, 400 µs, p50", "x", ratios(p50, sizes[3].notify, one, 8)).atMost(1.3)
	return nil
}

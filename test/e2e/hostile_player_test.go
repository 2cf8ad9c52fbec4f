package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// order is what a client process does from the receipt of the order to that of the next line.
// A process carries out one order after another.
type order struct {
	// Abuse is the name of an abuse; "" for an honest client, which announces and completes.
	Abuse string
	// Address is the path of a socket, or HOST:PORT for TLS with the certificates.
	Address string
	// Certificates are of the clients, each with as many connections as the abuse has.
	Certificates []certificate `json:",omitempty"`
	CA           string        `json:",omitempty"`

	Method string
	// Request is a message of the method, with the header that it has in DATA frames.
	Request                      []byte
	ClientStreams, ServerStreams bool
}

// certificate has the names of the files of a client.
type certificate struct{ Cert, Key string }

// played is the outcome of an order.
type played struct {
	// Sent counts requests, and Ended connections that the daemon refused or closed.
	Sent, Ended uint64
	// Took are the times of an honest client's announcements.
	Took    []time.Duration `json:",omitempty"`
	Failure string          `json:",omitempty"`
}

// methodAbuse is what a client can do with any method.
type methodAbuse struct {
	name string
	// connections is how many a client has at once, or has loops that open them.
	connections int
	users       bool // several users do it at once
	// do uses a connection until ctx or the connection ends. The error is that the daemon
	// ended it.
	do func(p *player, ctx context.Context, c *h2) error
}

var methodAbuses = []methodAbuse{
	{name: "maximum rate", connections: 4, do: (*player).fast},
	{name: "slow reader", connections: 8, do: (*player).unread},
	{name: "zero window", connections: 8, do: (*player).zeroWindow},
	{name: "many connections", connections: 2, do: (*player).connects},
	{name: "garbage", connections: 4, do: (*player).garbage},
	{name: "many users", connections: 1, users: true, do: (*player).fast},
}

// abusers is how many users do it where several do.
const abusers = 8

// player carries out one order.
type player struct {
	order
	tls   []*tls.Config // of Certificates
	began func()        // is called when the first request is sent

	sent, refused atomic.Uint64
}

// playerMain carries out the orders that it reads, one line each. It prints "began" when the
// first request of an order is sent; an empty line ends the order, and it prints the outcome.
func playerMain(in io.Reader, out io.Writer) int {
	lines, answers := json.NewDecoder(in), json.NewEncoder(out)
	conns := map[string]*grpc.ClientConn{} // of honest clients
	for {
		var o order
		if lines.Decode(&o) != nil {
			return 0 // the test has ended
		}
		p := &player{order: o, began: sync.OnceFunc(func() { fmt.Fprintln(out, "began") })}
		if answers.Encode(p.until(conns, func() { var end struct{}; _ = lines.Decode(&end) })) != nil {
			return 1
		}
	}
}

// until carries out the order until end returns.
func (p *player) until(conns map[string]*grpc.ClientConn, end func()) played {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan played, 1)
	go func() { done <- p.play(ctx, conns) }()
	end()
	cancel()
	return <-done
}

// play carries out the order until ctx ends.
func (p *player) play(ctx context.Context, conns map[string]*grpc.ClientConn) played {
	defer p.began() // also if it fails
	for _, c := range p.Certificates {
		config, err := clientConfig(c, p.CA)
		if err != nil {
			return played{Failure: err.Error()}
		}
		p.tls = append(p.tls, config)
	}
	if p.Abuse == "" {
		return p.serve(ctx, conns)
	}
	a := methodAbuses[slices.IndexFunc(methodAbuses, func(a methodAbuse) bool { return a.name == p.Abuse })]
	var all sync.WaitGroup
	for i := range a.connections * max(1, len(p.tls)) {
		all.Go(func() {
			pause := time.NewTicker(time.Millisecond)
			defer pause.Stop()
			for ctx.Err() == nil {
				if c, err := p.dial(ctx, i); err != nil || a.do(p, ctx, c) != nil {
					p.refused.Add(1)
				}
				select {
				case <-pause.C:
				case <-ctx.Done():
				}
			}
		})
	}
	all.Wait()
	return played{Sent: p.sent.Load(), Ended: p.refused.Load()}
}

func clientConfig(c certificate, ca string) (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	if err != nil {
		return nil, err
	}
	authorities, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authorities)
	return &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13}, nil
}

// dial opens the i-th connection, which is closed when ctx ends.
func (p *player) dial(ctx context.Context, i int) (*h2, error) {
	var raw net.Conn
	var err error
	if len(p.tls) > 0 {
		dialer := tls.Dialer{Config: p.tls[i%len(p.tls)]}
		raw, err = dialer.DialContext(ctx, "tcp", p.Address)
	} else {
		var dialer net.Dialer
		raw, err = dialer.DialContext(ctx, "unix", p.Address)
	}
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { _ = raw.Close() })
	c := newH2(raw)
	if err := c.send(hello); err != nil {
		_ = raw.Close()
		return nil, err
	}
	return c, nil
}

// calls returns so many calls with a body, beginning with a stream.
func (p *player) calls(stream uint32, n int, body []byte) (b []byte) {
	for i := range n {
		b = append(b, call(stream+uint32(2*i), p.Method)...)
		b = append(b, frame(frameData, flagEndStream, stream+uint32(2*i), body)...)
	}
	return b
}

// fast makes calls, 32 at a time, or sends messages on one stream, as fast as the daemon takes
// them. A stream that the daemon would not end is reset at its first answer.
func (p *player) fast(ctx context.Context, c *h2) error {
	defer c.Close()
	slots, ended := make(chan struct{}, 32), make(chan error, 1)
	var open sync.Map // streams
	over := func(stream uint32) {
		if _, was := open.LoadAndDelete(stream); was {
			<-slots
			c.widen(stream, 1<<30) // nothing waits to send on it
		}
	}
	c.onFrame = func(kind, flags byte, stream uint32, _ []byte) {
		switch {
		case kind == frameReset || kind == frameHeaders && flags&flagEndStream != 0:
			over(stream)
		case kind == frameData && p.ServerStreams && !p.ClientStreams:
			if _, was := open.Load(stream); was {
				_ = c.send(frame(frameReset, 0, stream, []byte{0, 0, 0, 8})) // an error ends the reader
				over(stream)
			}
		}
	}
	go func() { ended <- c.read() }()
	for stream := uint32(1); ; stream += 2 {
		select {
		case slots <- struct{}{}:
		case err := <-ended:
			return err
		}
		open.Store(stream, true)
		err := c.send(call(stream, p.Method))
		for once := true; err == nil && (once || p.ClientStreams); once = false {
			flags := byte(flagEndStream)
			if p.ClientStreams {
				flags = 0
				if _, still := open.Load(stream); !still {
					break
				}
			}
			err = c.data(stream, flags, p.Request)
			p.sent.Add(1)
			p.began()
		}
		if err != nil {
			_ = c.Close()
			return <-ended
		}
	}
}

// unread makes calls and reads nothing.
func (p *player) unread(ctx context.Context, c *h2) error {
	defer c.Close()
	const batch = 32
	for i := 0; (i+batch)*len(p.Request) < h2Window && i < 1024; i += batch {
		if err := c.send(p.calls(streamID(i), batch, p.Request)); err != nil {
			return err
		}
		p.sent.Add(batch)
		p.began()
	}
	again := time.NewTimer(time.Second)
	defer again.Stop()
	select {
	case <-ctx.Done():
	case <-again.C:
	}
	return nil
}

// zeroWindow makes calls whose answers may not be sent, and reads what comes.
func (p *player) zeroWindow(ctx context.Context, c *h2) error {
	if err := c.send(settings(4, 0)); err != nil {
		_ = c.Close()
		return err
	}
	return p.fast(ctx, c)
}

// connects opens connections with a call each, and closes the oldest of 128.
func (p *player) connects(ctx context.Context, c *h2) error {
	var open []*h2
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	for i := 0; ; i++ {
		open = append(open, c)
		if err := c.send(p.calls(1, 1, p.Request)); err != nil {
			return err
		}
		p.sent.Add(1)
		p.began()
		if len(open) >= 128 {
			_ = open[0].Close()
			open = open[1:]
		}
		var err error
		if c, err = p.dial(ctx, i); err != nil {
			return err
		}
	}
}

// garbage makes calls whose messages are noise, larger than they claim, larger than may be, or
// compressed by nothing known, and ends with bytes that are no frames.
func (p *player) garbage(ctx context.Context, c *h2) error {
	defer c.Close()
	ended := make(chan error, 1)
	go func() { ended <- c.read() }()
	noise := make([]byte, 1<<10)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	bodies := [][]byte{
		append([]byte{0, 0, 0, 4, 0}, noise...),
		append([]byte{0, 0, 0, 0, 16}, noise...),
		append([]byte{0, 0xff, 0xff, 0xff, 0xff}, noise...),
		append([]byte{1, 0, 0, 4, 0}, noise...),
		noise,
	}
	var err error
	for i := 0; err == nil && i < 60; i++ {
		if err = c.send(p.calls(streamID(i), 1, bodies[i%len(bodies)])); err == nil {
			p.sent.Add(1)
			p.began()
		}
	}
	if err == nil {
		err = c.send(noise)
	}
	if err != nil || ctx.Err() != nil {
		_ = c.Close()
	}
	return <-ended
}

// serve announces and completes as an inference server does, some hundred times a second.
func (p *player) serve(ctx context.Context, conns map[string]*grpc.ClientConn) (is played) {
	conn := conns[p.Address]
	if conn == nil {
		var err error
		if len(p.tls) > 0 {
			conn, err = grpc.NewClient(p.Address, grpc.WithTransportCredentials(credentials.NewTLS(p.tls[0])))
		} else {
			conn, err = connect(p.Address)
		}
		if err != nil {
			return played{Failure: err.Error()}
		}
		conns[p.Address] = conn
	}
	online := gpreemptv1.NewOnlineServiceClient(conn)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		began := time.Now()
		// The call in flight at the end is counted.
		lease, err := online.NotifyOnline(context.WithoutCancel(ctx), &gpreemptv1.NotifyOnlineRequest{MaxWait: durationpb.New(time.Second)}, grpc.WaitForReady(true))
		is.Took = append(is.Took, time.Since(began))
		if err == nil {
			_, err = online.Complete(context.WithoutCancel(ctx), &gpreemptv1.CompleteRequest{LeaseId: lease.GetLeaseId()})
		}
		if err != nil {
			is.Failure = err.Error()
			return is
		}
		p.began()
		select {
		case <-ctx.Done():
			return is
		case <-tick.C:
		}
	}
}

// short is the last part of a method's name, with its service.
func short(method string) string {
	return strings.ReplaceAll(strings.TrimPrefix(strings.TrimPrefix(method, "/"), "gpreempt.v1."), "grpc.", "")
}

package events

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// address is the address of a client.
type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) + ":1" }

// Every place is taken by one address, then others come: each gets a place, and the oldest
// connection of the address that has most is closed for it, but none whose request is answered.
func TestNewConnectionDisplacesTheOldestOfTheAddressThatHasMost(t *testing.T) {
	l := &listener{}
	connect := func(from address) (c, displaced *conn) {
		c = &conn{from: l, network: auth.Network(from)}
		return c, l.add(c)
	}
	var greedy []*conn
	for range connections {
		c, displaced := connect("192.0.2.1")
		if displaced != nil {
			t.Fatal("a connection was displaced while there was room")
		}
		greedy = append(greedy, c)
	}
	greedy[0].setBusy(true)
	for i, from := range []address{"192.0.2.2", "192.0.2.1", "[2001:db8::1]"} {
		if _, displaced := connect(from); displaced != greedy[i+1] {
			t.Errorf("connection %d, from %s: the oldest without a request was not displaced", i, from)
		}
	}
	// Hosts of one network count together.
	for i := range connections / 2 {
		connect(address(fmt.Sprintf("[2001:db8::%x]", i+2)))
	}
	of := map[string]int{}
	for _, c := range l.open {
		of[c.network.String()]++
	}
	if of["192.0.2.1/32"] < connections/2-1 || of["2001:db8::/64"] > connections/2 || of["192.0.2.2/32"] != 1 {
		t.Errorf("connections by network: %v, want an equal part of two and the one of the third", of)
	}
	for _, c := range l.open {
		c.busy = true
	}
	if c, displaced := connect("192.0.2.3"); displaced != c {
		t.Error("a connection was displaced although each had a request")
	}
	if len(l.open) != connections || !slices.Contains(l.open, greedy[0]) {
		t.Errorf("%d connections are open, want %d with the first, whose request was answered all the time", len(l.open), connections)
	}
}

// A client opens more connections than there are places, each with half a request. A probe
// from the same address is answered while they are open.
func TestProbeIsAnsweredWhileOthersHoldHalfRequests(t *testing.T) {
	l, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := MetricsHandler(MetricsConfig{Snapshot: history(t).snapshot, Alive: func() {}, Ready: func() bool { return true }})
	s := newServer(h)
	s.ReadTimeout = 0 // half a request stays
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	defer func() { _ = s.Close(); <-ended }()
	dial := func(send string) net.Conn {
		var dialer net.Dialer
		c, err := dialer.DialContext(t.Context(), "tcp", l.Addr().String())
		if err == nil {
			_, err = c.Write([]byte(send))
		}
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	var halves []net.Conn
	for range 300 {
		half := dial("GET /healthz HTTP/1.1\r\nHost: x\r\n")
		defer func() { _ = half.Close() }()
		halves = append(halves, half)
	}
	c := dial("GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	defer func() { _ = c.Close() }()
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("the probe gets %s", resp.Status)
	}
	if err := halves[0].SetReadDeadline(time.Now().Add(testutil.WaitTime)); err != nil {
		t.Fatal(err)
	}
	if n, err := halves[0].Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the first of 300 connections is not closed: %d bytes, %v", n, err)
	}
}

package client

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestAnnouncementsAreFramesOfOneStream(t *testing.T) {
	c, d := newPair(t)
	release(t, acquire(t, c, testRequest))
	release(t, acquire(t, c, testRequest))
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	d.expect(t, "session begun", "announced lease-1", "completed lease-1", "announced lease-2", "completed lease-2", "session over")
}

func TestAnswersAreMatchedByTag(t *testing.T) {
	_, hook := reports()
	c, d := newPair(t, hook)
	// The daemon answers in reverse order: the first waits for the last.
	last := make(chan struct{})
	d.on = func(_ context.Context, request any) error {
		if r, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok {
			switch r.GetLabel() {
			case "first":
				<-last
			case "last":
				defer close(last)
				return &gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonUnknownGPU, Message: "last"}
			}
		}
		return nil
	}
	release(t, acquire(t, c, testRequest)) // opens the stream
	first := make(chan *Lease)
	var waiting sync.WaitGroup
	waiting.Go(func() {
		r := testRequest
		r.Label = "first"
		l, err := c.Acquire(t.Context(), r)
		if err != nil {
			t.Error(err)
		}
		first <- l
	})
	r := testRequest
	r.Label = "last"
	if l := acquire(t, c, r); gpreempt.ReasonOf(l.Cause()) != gpreempt.ReasonUnknownGPU {
		t.Errorf("last: %v", l.Cause())
	}
	l := <-first
	waiting.Wait()
	if !l.Protected() {
		t.Errorf("first: %v", l.Cause())
	}
	// A refused frame does not end the stream.
	release(t, acquire(t, c, testRequest))
	d.expect(t, "session begun", "announced lease-1", "completed lease-1", "announced lease-2", "announced lease-3", "completed lease-3")
}

func TestBrokenStreamEndsItsLeases(t *testing.T) {
	c, d := newPair(t)
	l, other := acquire(t, c, testRequest), acquire(t, c, testRequest)
	d.on = func(_ context.Context, request any) error {
		if _, ok := request.(*gpreemptv1.RenewRequest); ok {
			return errHangUp
		}
		return nil
	}
	l.renew() // the daemon ends the stream
	<-l.Lost()
	<-other.Lost()
	if l.Protected() {
		t.Error("protected after its stream broke")
	}
	release(t, l)
	if l := acquire(t, c, testRequest); !l.Protected() {
		t.Errorf("the stream was not opened again: %v", l.Cause())
	}
}

func TestAnnouncementIsRepeatedWhenItsStreamBreaks(t *testing.T) {
	c, d := newPair(t)
	broken := false
	var mu sync.Mutex
	d.on = func(_ context.Context, request any) error {
		mu.Lock()
		defer mu.Unlock()
		if _, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok && !broken {
			broken = true
			return errHangUp
		}
		return nil
	}
	if l := acquire(t, c, testRequest); !l.Protected() {
		t.Errorf("unprotected: %v", l.Cause())
	}
	d.expect(t, "session begun")
}

func TestLeaseOfALateAnswerIsCompleted(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, c *Client){
		"context ended": func(t *testing.T, c *Client) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			if _, err := c.Acquire(ctx, testRequest); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		},
		"call timed out": func(t *testing.T, c *Client) {
			t.Helper()
			if l := acquire(t, c, Request{GPUs: OwnGPUs(), MaxWait: time.Millisecond}); l.Protected() {
				t.Error("protected")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDaemon()
				d.on = func(_ context.Context, request any) error {
					if _, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok {
						time.Sleep(time.Second)
					}
					return nil
				}
				_, hook := reports()
				c, end := newBubble(t, d, hook)
				defer end()
				leave(t, c)
				d.expect(t, "session begun", "announced lease-1", "completed lease-1")
			})
		})
	}
}

func TestClosedClientHasNoLeases(t *testing.T) {
	c, d := newPair(t)
	l := acquire(t, c, testRequest)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	<-l.Lost()
	release(t, l)
	if _, err := c.Acquire(t.Context(), testRequest); !errors.Is(err, ErrClosed) {
		t.Errorf("Acquire returned %v", err)
	}
	if err := c.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	d.expect(t, "session begun", "announced lease-1", "session over")
}

// More announcements than the daemon answers at a time on a stream wait until others are answered.
func TestMoreAnnouncementsThanAStreamHasPlacesWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDaemon()
		answer := make(chan struct{})
		var asked atomic.Int32
		d.on = func(_ context.Context, request any) error {
			if _, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok {
				asked.Add(1)
				<-answer
			}
			return nil
		}
		c, end := newBubble(t, d)
		defer end()
		var all sync.WaitGroup
		for i := range maxOutstanding + 1 {
			r := testRequest
			r.Label = strconv.Itoa(i) // each has its own lease
			all.Go(func() { release(t, acquire(t, c, r)) })
		}
		synctest.Wait()
		if n := asked.Load(); n != maxOutstanding {
			t.Errorf("%d announcements were sent, want %d", n, maxOutstanding)
		}
		close(answer)
		all.Wait()
		if n := asked.Load(); n != maxOutstanding+1 {
			t.Errorf("%d announcements were sent after the answers, want %d", n, maxOutstanding+1)
		}
	})
}

func TestCloseDuringAnAcquireEndsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDaemon()
		asked := make(chan struct{}, 1)
		d.on = func(ctx context.Context, request any) error {
			if _, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok {
				asked <- struct{}{}
				<-ctx.Done()
			}
			return nil
		}
		c, end := newBubble(t, d)
		defer end()
		got := make(chan error)
		go func() { _, err := c.Acquire(t.Context(), testRequest); got <- err }()
		<-asked
		c.Close()
		if err := <-got; !errors.Is(err, ErrClosed) {
			t.Errorf("Acquire returned %v", err)
		}
	})
}

// neverReads accepts sessions and does not read from them.
type neverReads struct{ *daemon }

func (d neverReads) Session(rpc gpreemptv1.OnlineService_SessionServer) error {
	<-rpc.Context().Done()
	return nil
}

func TestDaemonThatStopsReadingDelaysAcquireByItsLimitOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got, hook := reports()
		c, end := newBubbleOf(t, neverReads{newDaemon()}, hook)
		defer end()
		st, err := c.stream(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		// Fill all buffers between the client and the daemon.
		full := Request{GPUs: OwnGPUs(), Label: strings.Repeat("x", 1<<20)}
		call, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begun := time.Now()
		for err == nil {
			err = st.send(call, &gpreemptv1.SessionRequest{Frame: &gpreemptv1.SessionRequest_Announce{Announce: full.announcement()}})
		}
		if took := time.Since(begun); took != time.Minute {
			t.Errorf("sending failed after %v with %v, want at its deadline", took, err)
		}
		begun = time.Now()
		l := acquire(t, c, Request{GPUs: OwnGPUs(), MaxWait: 20 * time.Millisecond})
		if took := time.Since(begun); took != 120*time.Millisecond || l.Protected() {
			t.Errorf("protected %v after %v, want false after 120ms", l.Protected(), took)
		}
		if err := <-got; gpreempt.ReasonOf(err) != gpreempt.ReasonDaemonUnavailable {
			t.Errorf("reported %v", err)
		}
	})
}

// wrongAnswers answers every frame with a completion.
type wrongAnswers struct{ *daemon }

func (wrongAnswers) Session(rpc gpreemptv1.OnlineService_SessionServer) error {
	for {
		frame, err := rpc.Recv()
		if err != nil {
			return err
		}
		err = rpc.Send(&gpreemptv1.SessionResponse{
			Tag: frame.GetTag(), Frame: &gpreemptv1.SessionResponse_Completed{Completed: &gpreemptv1.CompleteResponse{}},
		})
		if err != nil {
			return err
		}
	}
}

func TestAnswerOfTheWrongTypeIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, end := newBubbleOf(t, wrongAnswers{newDaemon()}, FailClosed())
		defer end()
		if _, err := c.Acquire(t.Context(), testRequest); gpreempt.ReasonOf(err) != gpreempt.ReasonBadFrame {
			t.Errorf("got %v", err)
		}
	})
}

func TestGeneratedClientsShareTheConnection(t *testing.T) {
	c, d := newPair(t)
	answer, err := c.Online().NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{})
	if err != nil {
		t.Fatal(err)
	}
	d.expect(t, "announced "+answer.GetLeaseId())
	if _, err := c.Admin().GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{}); err == nil {
		t.Error("the fake has no admin service, and answered")
	}
	if _, err := gpreemptv1.NewOnlineServiceClient(c.Conn()).Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: answer.GetLeaseId()}); err != nil {
		t.Error(err)
	}
}

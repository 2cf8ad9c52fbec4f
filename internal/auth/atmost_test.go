package auth

import (
	"errors"
	"net"
	"testing"
)

func TestConnectionsBeyondTheLimitAreRefusedUntilOneEnds(t *testing.T) {
	refused := make(chan error, 1)
	l, path := listen(t, UnixOptions{MaxConns: 2, Refused: func(err error) { refused <- err }})
	dial(t, path)
	first := accept(t, l)
	dial(t, path)
	accept(t, l)
	next := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
		}
		next <- c
	}()
	for range 3 {
		dial(t, path)
		if err := <-refused; !errors.Is(err, ErrFull) {
			t.Errorf("error %v, want %v", err, ErrFull)
		}
	}
	for range 2 { // closing twice counts once
		if err := first.Close(); err != nil {
			t.Error(err)
		}
	}
	dial(t, path)
	(<-next).Close()
	if got := l.held.Load(); got != 1 {
		t.Errorf("%d connections are counted, want 1", got)
	}
}

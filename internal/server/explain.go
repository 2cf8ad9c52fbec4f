package server

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"time"

	"golang.org/x/net/http2"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// explaining is how many refused connections may be open, of which one user has at most
	// explainingPerUser, and explainTime for how long each. Further ones get a Refusal: a refusal must
	// stay cheaper than a connection.
	explaining        = 64
	explainingPerUser = 4
	explainTime       = time.Second
	// refusalTime bounds the write of a Refusal, which fits the buffer of a new socket.
	refusalTime = 100 * time.Millisecond
)

// Refusal returns what a connection of HTTP/2 is sent that is closed without reading: settings,
// which must be first, and GOAWAY with the reason and the text of an error.
func Refusal(why error) []byte {
	reason := cmp.Or(gpreempt.ReasonOf(why), gpreempt.ReasonNoIdentity)
	if errors.Is(why, auth.ErrFull) {
		reason = gpreempt.ReasonConnsTotal
	}
	text := fmt.Sprintf("%s: %v", reason, why)
	var b bytes.Buffer
	frames := http2.NewFramer(&b, nil)
	_ = errors.Join(frames.WriteSettings(), frames.WriteGoAway(0, http2.ErrCodeEnhanceYourCalm, []byte(text[:min(len(text), 512)]))) // to a buffer
	return b.Bytes()
}

// explain keeps a refused connection for explainTime, on which each call gets the reason, if there is a
// place for it. Else the client gets a Refusal, and the connection is closed.
func (s *Server) explain(c *connection) (kept bool) {
	u := c.client.user
	own := u.explaining.take()
	if !own || !s.explaining.take() {
		if own {
			u.explaining.free()
		}
		why := c.refusal("")
		s.Refused(why)
		_ = c.SetWriteDeadline(time.Now().Add(refusalTime))
		_, _ = c.Write(Refusal(why)) // the client may be gone
		s.parting.Close(c.Conn)
		return false
	}
	s.explainers.Go(func() {
		defer u.explaining.free()
		defer s.explaining.free()
		select {
		case <-c.Done():
		case <-s.closing.Done():
		case <-time.After(explainTime):
		}
		_ = c.Close()
		c.unread.end()
		if !c.explained.Load() { // no call gets it
			s.Refused(c.refusal(""))
		}
	})
	return true
}

// refusal returns why a connection was refused, for a call of a method, or "" for none.
func (c *connection) refusal(method string) error {
	if !errors.Is(c.refused, errNoRight) {
		return c.refused
	}
	need, _ := auth.Need(method)
	if method == "" {
		need = auth.Online
	}
	return forbidden(c.peer, cmp.Or(method, "any method"), need)
}

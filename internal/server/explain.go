package server

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// explaining is how many refused connections may wait for their first call, of which one
	// user has at most explainingPerUser, and explainTime for how long each. Further ones get a
	// Refusal: a refusal must stay cheaper than a connection.
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

// explain answers the first call on a refused connection with the reason, and closes the
// connection. It returns at once.
func (s *Server) explain(c *connection, why error) {
	u := c.client.user
	own := u.explaining.take()
	if !own || !s.explaining.take() {
		if own {
			u.explaining.free()
		}
		_ = c.conn.SetWriteDeadline(time.Now().Add(refusalTime))
		_, _ = c.conn.Write(Refusal(s.refuse(c, why, ""))) // the client may be gone
		s.parting.Close(c.conn)
		return
	}
	s.explainers.Go(func() {
		defer u.explaining.free()
		defer s.explaining.free()
		defer func() { _ = c.conn.Close() }()
		// Not a deadline of the connection: gRPC clears that when it gives up the connection.
		ctx, cancel := context.WithTimeout(s.closing, explainTime)
		defer cancel()
		stop := context.AfterFunc(ctx, func() { _ = c.conn.Close() })
		defer stop()
		method := ""
		_ = answerFirst(c.conn, func(m string) error { // the client may be gone
			method = m
			return s.refuse(c, why, m)
		})
		if method == "" {
			_ = s.refuse(c, why, "") // no call gets it
		}
	})
}

// refuse counts and logs a refused connection, and returns the error for its first call;
// method is "" when it made no call.
func (s *Server) refuse(c *connection, why error, method string) error {
	if errors.Is(why, errNoRight) {
		need, _ := auth.Need(method)
		if method == "" {
			need = auth.Online
		}
		why = forbidden(c.peer, cmp.Or(method, "any method"), need)
		s.auditRefusal(c, method, nil, why)
	}
	s.Refused(why)
	return why
}

// answerFirst reads the first call of a new connection of HTTP/2, sends an error as its
// outcome, and reads until the client closes.
func answerFirst(conn net.Conn, outcome func(method string) error) error {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(conn, preface); err != nil || string(preface) != http2.ClientPreface {
		return err
	}
	frames := http2.NewFramer(conn, conn)
	frames.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	frames.MaxHeaderListSize = maxHeaderBytes
	if err := frames.WriteSettings(); err != nil {
		return err
	}
	for {
		f, err := frames.ReadFrame()
		if err != nil {
			return err
		}
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				err = frames.WriteSettingsAck()
			}
		case *http2.MetaHeadersFrame:
			header := statusHeader(outcome(f.PseudoValue("path")))
			err = errors.Join(
				frames.WriteHeaders(http2.HeadersFrameParam{StreamID: f.StreamID, BlockFragment: header, EndStream: true, EndHeaders: true}),
				frames.WriteGoAway(f.StreamID, http2.ErrCodeNo, nil))
			if err == nil {
				// Closing now could discard what the client has not read.
				_, err = io.Copy(io.Discard, conn)
			}
			return err
		}
		if err != nil {
			return err
		}
	}
}

// statusHeader returns the header of a call of gRPC that ends with an error.
func statusHeader(err error) []byte {
	st := status.Convert(api.ToStatus(err))
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	write := func(name, value string) { _ = encoder.WriteField(hpack.HeaderField{Name: name, Value: value}) } // to a buffer
	write(":status", "200")
	write("content-type", "application/grpc")
	write("grpc-status", fmt.Sprint(uint32(st.Code())))
	write("grpc-message", url.PathEscape(st.Message()))
	if details, err := proto.Marshal(st.Proto()); err == nil {
		write("grpc-status-details-bin", base64.RawStdEncoding.EncodeToString(details))
	}
	return block.Bytes()
}

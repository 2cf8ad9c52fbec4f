package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// What gRPC's own client would never send is written frame by frame (RFC 9113).

// preface begins every connection.
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// The types and flags of frames that are used.
const (
	frameData, frameHeaders, frameReset, frameSettings = 0, 1, 3, 4
	framePing, frameGoAway, frameWindow, frameMore     = 6, 7, 8, 9

	flagEndStream, flagAck, flagEndHeaders = 1, 1, 4
)

// The window of a connection and of each stream until its peer widens it.
const h2Window = 65535

// frame is one frame as bytes.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := make([]byte, 9, 9+len(payload))
	b[0], b[1], b[2] = byte(len(payload)>>16), byte(len(payload)>>8), byte(len(payload))
	b[3], b[4] = kind, flags
	binary.BigEndian.PutUint32(b[5:], stream)
	return append(b, payload...)
}

// settings is a SETTINGS frame of one setting.
func settings(id uint16, value uint32) []byte {
	return frame(frameSettings, 0, 0, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16(nil, id), value))
}

// field is a header field, by HPACK's plainest form (RFC 7541, 6.2.2).
func field(name, value string) []byte {
	b := append([]byte{0}, hpackString(name)...)
	return append(b, hpackString(value)...)
}

func hpackString(s string) []byte {
	if len(s) < 127 {
		return append([]byte{byte(len(s))}, s...)
	}
	b, rest := []byte{127}, len(s)-127
	for ; rest >= 128; rest >>= 7 {
		b = append(b, byte(rest)|128)
	}
	return append(append(b, byte(rest)), s...)
}

// callHeader is the header block of a call.
func callHeader(method string, more ...[]byte) (block []byte) {
	for _, f := range [][2]string{
		{":method", "POST"},
		{":scheme", "http"},
		{":path", method},
		{":authority", "localhost"},
		{"content-type", "application/grpc"},
		{"te", "trailers"},
	} {
		block = append(block, field(f[0], f[1])...)
	}
	for _, m := range more {
		block = append(block, m...)
	}
	return block
}

// call is the HEADERS frame that begins a call.
func call(stream uint32, method string) []byte {
	return frame(frameHeaders, flagEndHeaders, stream, callHeader(method))
}

// message is a gRPC message, as it stands in DATA frames.
func message(m proto.Message) []byte {
	payload, err := proto.Marshal(m)
	if err != nil {
		panic(err) // a message of the test
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(payload))), payload...)
}

// h2 is a connection on which the test writes what it likes, and the answers are
// read as a client would.
type h2 struct {
	net.Conn
	// onFrame, when set, is called with every frame.
	onFrame func(kind, flags byte, stream uint32, payload []byte)

	mu      sync.Mutex // guards all below
	changed sync.Cond  // a window widened, or the connection ended
	conn    int        // what may be sent on it
	streams map[uint32]int
	most    uint32 // streams that may be open
	ended   error

	writing sync.Mutex
}

// dialH2 connects, and sends the preface.
func dialH2(socket string) (*h2, error) {
	raw, err := net.Dial("unix", socket)
	if err != nil {
		return nil, err
	}
	c := newH2(raw)
	if err := c.send(hello); err != nil {
		_ = raw.Close()
		return nil, err
	}
	return c, nil
}

// newH2 returns a connection on which nothing has been sent.
func newH2(raw net.Conn) *h2 {
	c := &h2{Conn: raw, onFrame: func(byte, byte, uint32, []byte) {}, conn: h2Window, streams: map[uint32]int{}, most: 100}
	c.changed.L = &c.mu
	return c
}

func (c *h2) send(b []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	_, err := c.Write(b)
	return err
}

// data sends a message on a stream, and waits for the windows it needs. The error
// is that the connection ended.
func (c *h2) data(stream uint32, flags byte, b []byte) error {
	c.mu.Lock()
	if _, known := c.streams[stream]; !known {
		c.streams[stream] = h2Window
	}
	for c.ended == nil && (c.conn < len(b) || c.streams[stream] < len(b)) {
		c.changed.Wait()
	}
	c.conn -= len(b)
	c.streams[stream] -= len(b)
	if flags&flagEndStream != 0 {
		delete(c.streams, stream)
	}
	err := c.ended
	c.mu.Unlock()
	if err != nil {
		return err
	}
	return c.send(frame(frameData, flags, stream, b))
}

// read takes in frames until the connection ends, and says why it did.
func (c *h2) read() error {
	err := c.readAll()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = err
	c.changed.Broadcast()
	return err
}

func (c *h2) readAll() error {
	header, payload := make([]byte, 9), make([]byte, 1<<14)
	unread, due := 0, h2Window/4
	for {
		if _, err := io.ReadFull(c, header); err != nil {
			return err
		}
		n := int(header[0])<<16 | int(header[1])<<8 | int(header[2])
		if n > len(payload) {
			return fmt.Errorf("a frame of %d bytes", n)
		}
		if _, err := io.ReadFull(c, payload[:n]); err != nil {
			return err
		}
		kind, flags, stream := header[3], header[4], binary.BigEndian.Uint32(header[5:])
		switch kind {
		case frameWindow:
			c.widen(stream, int(binary.BigEndian.Uint32(payload)))
		case frameSettings:
			if flags&flagAck == 0 {
				for s := payload[:n]; len(s) >= 6; s = s[6:] {
					if binary.BigEndian.Uint16(s) == 3 {
						c.most = binary.BigEndian.Uint32(s[2:])
					}
				}
				if err := c.send(frame(frameSettings, flagAck, 0, nil)); err != nil {
					return err
				}
			}
		case framePing:
			if flags&flagAck == 0 {
				if err := c.send(frame(framePing, flagAck, 0, payload[:n])); err != nil {
					return err
				}
			}
		case frameGoAway:
			c.onFrame(kind, flags, stream, payload[:n])
			return fmt.Errorf("the server says goodbye: code %d, %s", binary.BigEndian.Uint32(payload[4:]), payload[8:n])
		case frameData:
			if unread += n; unread >= due {
				grant := binary.BigEndian.AppendUint32(nil, uint32(unread))
				if err := c.send(append(frame(frameWindow, 0, 0, grant), frame(frameWindow, 0, stream, grant)...)); err != nil {
					return err
				}
				unread = 0
			}
		}
		c.onFrame(kind, flags, stream, payload[:n])
	}
}

func (c *h2) widen(stream uint32, by int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if stream == 0 {
		c.conn += by
	} else if _, known := c.streams[stream]; known {
		c.streams[stream] += by
	}
	c.changed.Broadcast()
}

var errNoMessage = errors.New("no whole message")

// messages returns the gRPC messages in b, and what is left.
func messages(b []byte) (all [][]byte, rest []byte) {
	for len(b) >= 5 {
		n := int(binary.BigEndian.Uint32(b[1:]))
		if len(b) < 5+n {
			break
		}
		all, b = append(all, b[5:5+n]), b[5+n:]
	}
	return all, b
}

// fieldNumber returns the number of the last field of a message: which of a oneof it
// holds, when that comes last.
func fieldNumber(b []byte) (last protowire.Number, err error) {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return 0, errNoMessage
		}
		m := protowire.ConsumeFieldValue(number, kind, b[n:])
		if m < 0 {
			return 0, errNoMessage
		}
		last, b = number, b[n+m:]
	}
	return last, nil
}

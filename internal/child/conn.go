package child

import (
	"encoding/gob"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// maxPacket is the most bytes of one packet: much less than a socket takes by default.
const maxPacket = 32 << 10

// packets is a stream of bytes over a socket that keeps packets apart.
type packets struct {
	file *os.File
	buf  [maxPacket]byte
	rest []byte // of buf, not read yet
}

// Read implements io.Reader. It returns io.EOF when the other side has closed the socket.
func (p *packets) Read(to []byte) (int, error) {
	if len(p.rest) == 0 {
		n, err := p.file.Read(p.buf[:])
		if err != nil {
			return 0, err
		}
		p.rest = p.buf[:n]
	}
	n := copy(to, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

// ReadByte implements io.ByteReader: a decoder then reads no further than it must.
func (p *packets) ReadByte() (byte, error) {
	var b [1]byte
	_, err := p.Read(b[:])
	return b[0], err
}

// Write implements io.Writer.
func (p *packets) Write(from []byte) (written int, err error) {
	for len(from) > 0 {
		n, err := p.file.Write(from[:min(len(from), maxPacket)])
		written += n
		if err != nil {
			return written, err
		}
		from = from[n:]
	}
	return written, nil
}

var _ io.ByteReader = (*packets)(nil)

// message is what one side sends: a request and its answer have the same number, and what a child
// reports without being asked has the number 0.
type message[T any] struct {
	Number uint64
	Body   T
}

// conn is one end of a connection. Any goroutine may send, and one may receive.
type conn[Out, In any] struct {
	packets
	decoder *gob.Decoder

	sending sync.Mutex // guards what follows
	encoder *gob.Encoder
}

func newConn[Out, In any](file *os.File) *conn[Out, In] {
	c := &conn[Out, In]{packets: packets{file: file}}
	c.decoder, c.encoder = gob.NewDecoder(&c.packets), gob.NewEncoder(&c.packets)
	return c
}

// send sends a message. After an error the connection is of no use.
func (c *conn[Out, In]) send(number uint64, body Out) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	return c.encoder.Encode(message[Out]{number, body})
}

func (c *conn[Out, In]) receive() (m message[In], err error) {
	err = c.decoder.Decode(&m)
	return m, err
}

// Pair returns the two ends of a connection, which no program inherits.
func Pair() (daemon, child *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "child"), os.NewFile(uintptr(fds[1]), "daemon"), nil
}

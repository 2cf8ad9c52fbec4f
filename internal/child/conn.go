package child

import (
	"encoding/gob"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// message is what one side sends: a request and its answer have the same number, and what a child
// reports without being asked has the number 0.
type message[T any] struct {
	Number uint64
	Body   T
}

// conn is one end of a connection. Any goroutine may send, and one may receive.
type conn[Out, In any] struct {
	file    *os.File
	decoder *gob.Decoder

	sending sync.Mutex // guards what follows
	encoder *gob.Encoder
}

func newConn[Out, In any](file *os.File) *conn[Out, In] {
	return &conn[Out, In]{file: file, decoder: gob.NewDecoder(file), encoder: gob.NewEncoder(file)}
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
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "child"), os.NewFile(uintptr(fds[1]), "daemon"), nil
}

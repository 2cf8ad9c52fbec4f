package child

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/proc"
)

// socketFD is the descriptor by which a child talks to its daemon.
const socketFD = 3

// Main begins the program of a child, whose name in ps and top ends in the kind, of at most 6 bytes, and
// returns its end of the connection.
func Main(kind string) (*os.File, error) {
	name := proc.Name + "-" + kind
	// A terminal and systemd send these to all processes of the daemon. The daemon resumes
	// everything first; a child ends when it has.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	if err := unix.SetNonblock(socketFD, true); err != nil {
		return nil, fmt.Errorf("%s is started by gpreemptd only: descriptor %d: %w", name, socketFD, err)
	}
	unix.CloseOnExec(socketFD)
	// Threads that come get the name of the one that starts them.
	threads, _ := filepath.Glob("/proc/self/task/*/comm")
	for _, thread := range threads {
		_ = os.WriteFile(thread, []byte(name), 0) // only people read it
	}
	return os.NewFile(socketFD, "daemon"), nil
}

// Request is a request of the daemon.
type Request[Q any] struct {
	number uint64
	Body   Q
}

// Daemon is the daemon as a child knows it: it sends requests Q, and takes messages A.
type Daemon[Q, A any] struct {
	conn *conn[A, Q]
	// Requests is closed when the daemon has closed its end, or was not understood: Err returns why.
	Requests <-chan Request[Q]
	err      error
}

// Serve returns the daemon at the other end of a connection. All of its requests must be taken.
func Serve[Q, A any](file *os.File) *Daemon[Q, A] {
	requests := make(chan Request[Q])
	d := &Daemon[Q, A]{conn: newConn[A, Q](file), Requests: requests}
	go func() {
		defer close(requests)
		for {
			m, err := d.conn.receive()
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
					d.err = fmt.Errorf("read a request: %w", err)
				}
				return
			}
			requests <- Request[Q]{m.Number, m.Body}
		}
	}()
	return d
}

// Err returns why Requests was closed, nil for the end of the daemon.
func (d *Daemon[Q, A]) Err() error { return d.err }

// Answer answers a request. That the daemon has ended shows at Requests.
func (d *Daemon[Q, A]) Answer(r Request[Q], a A) { _ = d.conn.send(r.number, a) }

// Report sends a message that the daemon has not asked for.
func (d *Daemon[Q, A]) Report(a A) { _ = d.conn.send(0, a) }

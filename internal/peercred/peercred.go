// Package peercred hides how the kernel proves which process is at the other
// end of a unix socket, and how the daemon learns that it died.
//
// The identity is that of the process that called connect, as it was then, in
// the daemon's own pid and user namespaces. It does not change when the socket
// is inherited or handed over, and it ends with that process: whoever else holds
// the socket then is cut off.
package peercred

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/peer"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Peer is who connected.
type Peer struct {
	// PID is the process id, never 0.
	PID int32
	// UID and GID are the effective ids when it connected.
	UID, GID uint32
	// Groups are the supplementary groups when it connected, in the kernel's
	// order. They do not repeat GID unless the process has it twice.
	Groups []uint32
	// Start is field 22 of /proc/PID/stat: start time in clock ticks since boot.
	Start uint64
}

// Process returns the name of the process as the rest of the daemon uses it.
func (p Peer) Process() gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: p.PID, Start: p.Start} }

// Principal names what the process acts for: two processes with the same belong to
// the same user.
func (p Peer) Principal() string { return fmt.Sprintf("uid %d", p.UID) }

// String names the peer for people.
func (p Peer) String() string { return fmt.Sprintf("uid %d pid %d", p.UID, p.PID) }

// Option changes what a listener does.
type Option func(*listener)

// OnRefused has report called for each connection that was closed because its
// peer could not be identified. The error says who, why and what to do. report
// is called by Accept, so it must not block.
func OnRefused(report func(error)) Option { return func(l *listener) { l.refused = report } }

// AtMost bounds the connections that are open at a time. One more is closed at once
// and reported to OnRefused with ErrFull; whoever has one keeps it. Each takes two
// file descriptors.
func AtMost(n int) Option { return func(l *listener) { l.most = int64(n) } }

// Admit has may called with the user of each connection, before anything else is
// done for it: an error refuses it, wrapped, at the price of two system calls. may is
// called by Accept, so it must not block.
func Admit(may func(uid uint32) error) Option { return func(l *listener) { l.may = may } }

// NewListener returns a listener whose connections are all *Conn. A connection
// whose peer cannot be identified is closed and Accept goes on to the next.
// Accept makes no call that a peer can keep waiting. Closing the listener
// closes l and leaves the accepted connections alone.
func NewListener(l *net.UnixListener, opts ...Option) net.Listener {
	nl := &listener{UnixListener: l, refused: func(error) {}, may: func(uint32) error { return nil }, open: openPeer, most: math.MaxInt64}
	for _, opt := range opts {
		opt(nl)
	}
	return nl
}

type listener struct {
	*net.UnixListener
	refused func(error)
	may     func(uid uint32) error
	// open is openPeer, or what a test puts there to be an older kernel.
	open func(socket int, pid int32) (pidfd int, start uint64, err error)
	// most is how many connections there may be, and held how many there are.
	most int64
	held atomic.Int64
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		socket, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if l.held.Load() >= l.most {
			err = fmt.Errorf("connection refused: %d are open: %w", l.most, ErrFull)
		} else if conn, failure := l.identify(socket); failure == nil {
			return conn, nil
		} else {
			err = failure
		}
		_ = socket.Close()
		l.refused(err)
	}
}

// identify proves who is at the other end. Its order is what makes the proof:
// first everything is looked up by pid, and at the end the pidfd is asked whether
// the process is still alive. If it is, its pid was not reused meanwhile.
func (l *listener) identify(socket *net.UnixConn) (*Conn, error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("connection refused: its socket: %w", err)
	}
	var p Peer
	pidfd := -1
	var failure error
	err = raw.Control(func(fd uintptr) {
		p, pidfd, failure = l.lookup(int(fd))
	})
	if err = errors.Join(err, failure); err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(pidfd, true); err != nil {
		_ = unix.Close(pidfd)
		return nil, refusal(p, fmt.Errorf("its pidfd: %w", err))
	}
	c := &Conn{Conn: socket, peer: p, pidfd: os.NewFile(uintptr(pidfd), "pidfd"), done: make(chan struct{}), held: &l.held}
	// Only a file in the runtime's poller takes deadlines; one that is not would
	// block a thread for each client.
	if err := c.pidfd.SetReadDeadline(time.Time{}); err != nil {
		_ = c.pidfd.Close()
		return nil, refusal(p, fmt.Errorf("its pidfd cannot be polled: %w", err))
	}
	exit, err := c.pidfd.SyscallConn()
	if err != nil {
		_ = c.pidfd.Close()
		return nil, refusal(p, fmt.Errorf("its pidfd: %w", err))
	}
	if c.dead() {
		_ = c.pidfd.Close()
		return nil, refusal(p, ErrExited)
	}
	l.held.Add(1)
	go c.watch(exit)
	return c, nil
}

// lookup asks the kernel for everything that is known of the peer. The caller
// closes the pidfd.
func (l *listener) lookup(socket int) (p Peer, pidfd int, err error) {
	cred, err := unix.GetsockoptUcred(socket, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return p, -1, fmt.Errorf("connection refused: SO_PEERCRED: %w", err)
	}
	p = Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}
	if p.PID == 0 {
		return p, -1, fmt.Errorf("connection of uid %d refused: its process is in a pid namespace that gpreemptd does not see into:"+
			" run gpreemptd in the host's pid namespace (hostPID: true in a pod)", p.UID)
	}
	if err := l.may(p.UID); err != nil {
		return p, -1, refusal(p, err)
	}
	if p.Groups, err = peerGroups(socket); err != nil {
		return p, -1, refusal(p, fmt.Errorf("SO_PEERGROUPS: %w", err))
	}
	if pidfd, p.Start, err = l.open(socket, p.PID); err != nil {
		return p, -1, refusal(p, err)
	}
	return p, pidfd, nil
}

// openPeer returns a pidfd of the process that connected, and its start time.
func openPeer(socket int, pid int32) (pidfd int, start uint64, err error) {
	pidfd, err = unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	switch {
	case errors.Is(err, unix.ENOPROTOOPT):
		return openPID(socket, pid)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENODATA):
		return -1, 0, ErrExited // which errno says so depends on the kernel
	case err != nil:
		return -1, 0, fmt.Errorf("SO_PEERPIDFD: %w", err)
	}
	stat, err := readStat(pid)
	if err != nil {
		_ = unix.Close(pidfd)
		return -1, 0, unreadable(err)
	}
	return pidfd, stat.Start, nil
}

// openPID is openPeer for kernels before 6.5, which have no SO_PEERPIDFD. That
// the pid was not reused while we looked is proved by the start time, which is
// read before and after. That it was not reused between connect and the first
// look cannot be proved on such kernels; uid, gid and groups, which decide
// rights, come from the socket and are right in any case.
func openPID(_ int, pid int32) (pidfd int, start uint64, err error) {
	before, err := readStat(pid)
	if err != nil {
		return -1, 0, unreadable(err)
	}
	pidfd, err = unix.PidfdOpen(int(pid), 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return -1, 0, ErrExited
	case err != nil:
		return -1, 0, fmt.Errorf("pidfd_open: %w", err)
	}
	after, err := readStat(pid)
	if err == nil && after.Start == before.Start {
		return pidfd, after.Start, nil
	}
	_ = unix.Close(pidfd)
	if err != nil {
		return -1, 0, unreadable(err)
	}
	return -1, 0, ErrExited
}

// ErrExited is what OnRefused gets, wrapped, when the peer was gone before it
// could be identified: no trouble of the host, and nothing to do.
var ErrExited = errors.New("it has exited meanwhile")

// ErrFull is what OnRefused gets, wrapped, for a connection beyond AtMost.
var ErrFull = errors.New("no more fit: end some clients, or give gpreemptd more file descriptors (LimitNOFILE)")

func unreadable(err error) error {
	return fmt.Errorf("its start time cannot be read: %w: if it is alive, give gpreemptd a /proc of its own pid namespace, without hidepid", err)
}

func refusal(p Peer, err error) error {
	return fmt.Errorf("connection of pid %d, uid %d refused: %w", p.PID, p.UID, err)
}

// Conn is a connection whose peer is known. Its methods may be called from any
// goroutine.
type Conn struct {
	net.Conn
	peer  Peer
	pidfd *os.File
	held  *atomic.Int64 // counts it until the end

	once     sync.Once
	done     chan struct{}
	died     bool  // written before done is closed
	closeErr error // likewise
}

// Peer tells who is at the other end. The caller must not change Groups.
func (c *Conn) Peer() Peer { return c.peer }

// Done is closed when the connection is over: Close was called, as gRPC does when
// the stream of bytes ends, or the process died, and then the connection has
// been closed even if another process holds its other end.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Died tells, once Done is closed, whether the connection ended because the
// process died. It is false before.
func (c *Conn) Died() bool {
	select {
	case <-c.done:
		return c.died
	default:
		return false
	}
}

// Close closes the connection, once.
func (c *Conn) Close() error {
	select {
	case <-c.done:
		return c.closeErr
	default:
	}
	return c.end(c.Exiting())
}

// Exiting reports whether the process has exited or is about to. It is true from
// the moment a dying process begins to lose its sockets, which is before Done.
func (c *Conn) Exiting() bool { return c.dead() || c.leaving() }

func (c *Conn) end(died bool) error {
	c.once.Do(func() {
		c.died = died
		c.closeErr = c.Conn.Close()
		_ = c.pidfd.Close()
		c.held.Add(-1)
		close(c.done)
	})
	return c.closeErr
}

// watch waits for the death of the process; closing the pidfd ends it.
func (c *Conn) watch(exit syscall.RawConn) {
	if err := exit.Read(readable); err == nil {
		_ = c.end(true)
	}
}

// readable reports whether the process of a pidfd has exited; that is what makes
// a pidfd readable, reaped or not.
func readable(pidfd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
}

// dead reports whether the process has exited.
func (c *Conn) dead() (dead bool) {
	raw, err := c.pidfd.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(pidfd uintptr) { dead = readable(pidfd) })
	return dead
}

// leaving reports whether the process is exiting. A dying process loses its
// sockets before its pidfd becomes readable, by as long as the rest of its files
// take, so the end of the connection is seen first.
func (c *Conn) leaving() bool {
	stat, err := readStat(c.peer.PID)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
	}
	return stat.Start != c.peer.Start || stat.Flags&discovery.FlagExiting != 0
}

// FromContext returns the connection a gRPC call came by; false when it did not
// come by a connection of this package.
func FromContext(ctx context.Context) (*Conn, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.Conn, ok
}

package auth

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Process is a process of this host that connected over a unix socket.
type Process struct {
	// PID is the process id, never 0.
	PID int32
	// UID and GID are the effective ids when it connected.
	UID, GID uint32
	// Groups are the supplementary groups when it connected, in the kernel's
	// order. They do not repeat GID unless the process has it twice.
	Groups []uint32
	// Start is field 22 of /proc/PID/stat: start time in clock ticks since boot.
	Start uint64
	// Nested is set if it is in a pid namespace below that of the daemon, as in a
	// container. Root there can become any user and join any group of the host.
	Nested bool
	// Account is the principal, if that is not UID: who can act as many users of the host
	// is one. It is the owner of the user namespace, or else the container.
	Account string
}

// Key returns the key of the process.
func (p Process) Key() gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: p.PID, Start: p.Start} }

// Principal returns the user that the process acts for, the same text for every process
// of that user.
func (p Process) Principal() string {
	if p.Account != "" {
		return p.Account
	}
	return fmt.Sprintf("uid %d", p.UID)
}

// accountOf returns Process.Account of the process that has a pid. Who made a user namespace has
// as many uids in it as are mapped. In one that root made, as for a container, and in a pid
// namespace, root can become each user of it: the namespace itself has the account. "" also if
// the namespaces cannot be read: then the uid that the kernel gives counts.
func accountOf(pid int32) string {
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: pid})
	if err != nil {
		return ""
	}
	defer p.Close()
	switch ns, below, err := p.Below("user"); {
	case err != nil || !below:
	case ns.Owner != 0:
		return fmt.Sprintf("uid %d", ns.Owner)
	default:
		return fmt.Sprintf("user namespace %d", ns.Inode)
	}
	if ns, below, err := p.Below("pid"); err == nil && below {
		return fmt.Sprintf("pid namespace %d", ns.Inode)
	}
	return ""
}

// String returns the user and the pid for a person to read.
func (p Process) String() string { return fmt.Sprintf("uid %d pid %d", p.UID, p.PID) }

// Origin is where a process comes from.
type Origin struct {
	// Exe is the path of its program, as its mount namespace has it, and Cgroup that
	// of its control group; "" when it cannot be read.
	Exe, Cgroup string
}

// Origin reads where the process comes from; false when it has exited. A process can
// change both, so nothing is cached.
func (p Process) Origin() (Origin, bool) {
	handle, err := proc.Open("/", p.Key())
	if err != nil {
		return Origin{}, false
	}
	defer handle.Close()
	var o Origin
	o.Exe, _ = handle.Exe() // a kernel thread has none
	if text, err := handle.Cgroup(); err == nil {
		o.Cgroup = discovery.ParseCgroup(text).Path
	}
	return o, handle.Check() == nil
}

// factsTime is how long Facts waits. factReadings bounds the readings that hang: each keeps a
// thread in the kernel.
const factsTime = 100 * time.Millisecond

var factReadings = make(chan struct{}, 16)

// Facts returns what the process is classified by, as proc.Process.Facts does; false when that
// cannot be read, or not within a tenth of a second.
func (p Process) Facts(env []string) (gpreempt.Process, bool) {
	select {
	case factReadings <- struct{}{}:
	default:
		return gpreempt.Process{}, false
	}
	read := make(chan *gpreempt.Process, 1)
	go func() { // ends when the kernel returns, no later than the process
		defer func() { <-factReadings }()
		handle, err := proc.Open("/", p.Key())
		if err != nil {
			read <- nil
			return
		}
		defer handle.Close()
		if facts, err := handle.Facts(env); err == nil {
			read <- &facts
		} else {
			read <- nil
		}
	}()
	select {
	case facts := <-read:
		if facts != nil {
			return *facts, true
		}
	case <-time.After(factsTime):
	}
	return gpreempt.Process{}, false
}

// UnixOptions configure a listener. The zero value accepts every connection.
type UnixOptions struct {
	// MaxConns bounds the connections that are open at a time; 0: no bound. Accept
	// closes another one at once and reports it with ErrFull. Each connection takes two
	// file descriptors. The last sixteenth of them is for the peers for which Reserved
	// returns true.
	MaxConns int
	// Reserved reports whether a peer may have one of the last connections. Accept calls
	// it, so it must not block.
	Reserved func(Process) bool
	// Admit is called with PID, UID, GID and Account of each peer, before the rest is known:
	// an error refuses the connection, wrapped, at the cost of a few system calls. Accept
	// calls it, so it must not block.
	Admit func(Process) error
	// Refusal returns what a connection is sent that is closed because of an error, a moment
	// later. What does not fit the socket's buffer at once is dropped.
	Refusal func(error) []byte
	// Refused is called for each connection that Accept closed because it did not
	// identify the peer. The error names the peer, the reason and the remedy. Accept
	// calls it, so it must not block.
	Refused func(error)
}

// NewUnixListener returns a listener whose connections are all Conns of a Process. A
// connection whose peer cannot be identified is closed, and Accept continues with the
// next. Accept makes no call that a peer can block. Closing the listener closes l and
// leaves the accepted connections open.
func NewUnixListener(l *net.UnixListener, o UnixOptions) net.Listener {
	if o.Admit == nil {
		o.Admit = func(Process) error { return nil }
	}
	if o.Reserved == nil {
		o.Reserved = func(Process) bool { return false }
	}
	if o.Refusal == nil {
		o.Refusal = func(error) []byte { return nil }
	}
	if o.Refused == nil {
		o.Refused = func(error) {}
	}
	return &unixListener{UnixListener: l, options: o, open: openPeer}
}

type unixListener struct {
	*net.UnixListener
	options UnixOptions
	// open is openPeer.
	open    func(socket int, pid int32) (pidfd int, start uint64, err error)
	held    atomic.Int64 // connections that are open
	parting Parting
}

func (l *unixListener) Accept() (net.Conn, error) {
	for {
		socket, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if most := l.options.MaxConns; most > 0 && l.held.Load() >= int64(most) {
			err = fmt.Errorf("connection refused: %d are open: %w", most, ErrFull)
		} else if conn, failure := l.identify(socket); failure == nil {
			return conn, nil
		} else {
			err = failure
		}
		if raw, failure := socket.SyscallConn(); failure == nil {
			_ = raw.Write(func(fd uintptr) bool { _, _ = unix.Write(int(fd), l.options.Refusal(err)); return true }) // it may have left
		}
		if errors.Is(err, ErrFull) || errors.Is(err, ErrExited) { // no descriptor can be spared, or nobody reads it
			_ = socket.Close()
		} else {
			l.parting.Close(socket)
		}
		l.options.Refused(err)
	}
}

// identify identifies the peer. The order matters: everything is looked up by pid
// first, and then the pidfd shows that the process is alive. Then its pid was not
// reused meanwhile.
func (l *unixListener) identify(socket *net.UnixConn) (*unixConn, error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("connection refused: its socket: %w", err)
	}
	var p Process
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
	c := &unixConn{Conn: socket, peer: p, pidfd: os.NewFile(uintptr(pidfd), "pidfd"), done: make(chan struct{}), held: &l.held}
	// Only a file in the runtime's poller takes deadlines; one that is not would
	// block a thread for each client.
	if err := c.pidfd.SetReadDeadline(time.Time{}); err != nil {
		_ = c.pidfd.Close()
		return nil, refusal(p, fmt.Errorf("its pidfd cannot be polled: %w", err))
	}
	if c.exit, err = c.pidfd.SyscallConn(); err != nil {
		_ = c.pidfd.Close()
		return nil, refusal(p, fmt.Errorf("its pidfd: %w", err))
	}
	if c.dead() {
		_ = c.pidfd.Close()
		return nil, refusal(p, ErrExited)
	}
	if most := l.options.MaxConns; most > 0 && l.held.Load() >= int64(most-most/16) && !l.options.Reserved(p) {
		_ = c.pidfd.Close()
		return nil, refusal(p, ErrFull)
	}
	l.held.Add(1)
	go c.watch()
	return c, nil
}

// lookup returns what the kernel knows of the peer. The caller closes the pidfd.
func (l *unixListener) lookup(socket int) (p Process, pidfd int, err error) {
	cred, err := unix.GetsockoptUcred(socket, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return p, -1, fmt.Errorf("connection refused: SO_PEERCRED: %w", err)
	}
	p = Process{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}
	if p.PID == 0 {
		return p, -1, fmt.Errorf("connection of uid %d refused: its process is in a pid namespace that gpreemptd cannot see:"+
			" run gpreemptd in the host's pid namespace (hostPID: true in a pod)", p.UID)
	}
	p.Account = accountOf(p.PID)
	if err := l.options.Admit(p); err != nil {
		return p, -1, refusal(p, err)
	}
	if p.Groups, err = peerGroups(socket); err != nil {
		return p, -1, refusal(p, fmt.Errorf("SO_PEERGROUPS: %w", err))
	}
	if pidfd, p.Start, err = l.open(socket, p.PID); err != nil {
		return p, -1, refusal(p, err)
	}
	if p.Nested, err = nested(p.Key()); err != nil {
		_ = unix.Close(pidfd)
		return p, -1, refusal(p, err)
	}
	return p, pidfd, nil
}

// nested returns Process.Nested of a process.
func nested(key gpreempt.ProcessKey) (is bool, err error) {
	p, err := proc.Open("/", key)
	if err == nil {
		is, err = p.Nested()
		p.Close()
	}
	switch {
	case errors.Is(err, proc.ErrGone):
		return false, ErrExited
	case err != nil:
		return false, fmt.Errorf("its pid namespace cannot be read: %w: give gpreemptd a /proc of its own pid namespace, without hidepid", err)
	}
	return is, nil
}

// openPeer returns a pidfd of the process that connected, and its start time.
func openPeer(socket int, pid int32) (pidfd int, start uint64, err error) {
	pidfd, err = unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	switch {
	case errors.Is(err, unix.ENOPROTOOPT):
		return openPID(socket, pid)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENODATA):
		return -1, 0, ErrExited // the errno depends on the kernel
	case err != nil:
		return -1, 0, fmt.Errorf("SO_PEERPIDFD: %w", err)
	}
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: pid})
	if err != nil {
		_ = unix.Close(pidfd)
		return -1, 0, unreadable(err)
	}
	p.Close()
	return pidfd, p.Key().Start, nil
}

// openPID is openPeer for kernels before 6.5, which have no SO_PEERPIDFD. It returns
// the pidfd of the process that has the pid now: on such kernels the pid may have been
// reused since connect. The user and groups, which decide what is permitted,
// come from the socket and are right in any case.
func openPID(_ int, pid int32) (pidfd int, start uint64, err error) {
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: pid})
	if err != nil {
		return -1, 0, unreadable(err)
	}
	defer p.Close()
	pidfd, err = p.Pidfd()
	switch {
	case errors.Is(err, proc.ErrGone):
		return -1, 0, ErrExited
	case err != nil:
		return -1, 0, err
	}
	return pidfd, p.Key().Start, nil
}

// ErrExited is reported as refused, wrapped, when the peer exited before it could be
// identified. It needs no action.
var ErrExited = errors.New("it has exited")

// ErrFull is reported as refused, wrapped, for a connection beyond MaxConns.
var ErrFull = errors.New("the limit is reached: end some clients, or give gpreemptd more file descriptors (LimitNOFILE)")

func unreadable(err error) error {
	return fmt.Errorf("its start time cannot be read: %w: if it is alive, give gpreemptd a /proc of its own pid namespace, without hidepid", err)
}

func refusal(p Process, err error) error {
	return fmt.Errorf("connection of pid %d, uid %d refused: %w", p.PID, p.UID, err)
}

// unixConn is a connection of a Process.
type unixConn struct {
	net.Conn
	peer  Process
	pidfd *os.File
	exit  syscall.RawConn // of pidfd
	held  *atomic.Int64   // counts the connection until it is closed

	once     sync.Once
	done     chan struct{}
	died     bool  // written before done is closed
	closeErr error // likewise
}

// handshake does nothing: Accept has identified the peer.
func (*unixConn) handshake() error { return nil }

func (c *unixConn) Peer() Peer { return c.peer }

func (c *unixConn) Done() <-chan struct{} { return c.done }

func (c *unixConn) Died() bool {
	select {
	case <-c.done:
		return c.died
	default:
		return false
	}
}

// Close closes the connection, once.
func (c *unixConn) Close() error {
	select {
	case <-c.done:
		return c.closeErr
	default:
	}
	return c.end(c.Exiting())
}

func (c *unixConn) Exiting() bool { return c.dead() || c.leaving() }

func (c *unixConn) Left() bool { return left(c.Conn) }

func (c *unixConn) end(died bool) error {
	c.once.Do(func() {
		c.died = died
		c.closeErr = c.Conn.Close()
		_ = c.pidfd.Close()
		c.held.Add(-1)
		close(c.done)
	})
	return c.closeErr
}

// watch waits until the process exits or the pidfd is closed.
func (c *unixConn) watch() {
	if err := c.exit.Read(func(pidfd uintptr) bool { return proc.Exited(int(pidfd)) }); err == nil {
		_ = c.end(true)
	}
}

// dead reports whether the process has exited.
func (c *unixConn) dead() (dead bool) {
	_ = c.exit.Control(func(pidfd uintptr) { dead = proc.Exited(int(pidfd)) })
	return dead
}

// leaving reports whether the process is exiting. A dying process loses its sockets
// before its pidfd becomes readable, by as long as closing the rest of its files
// takes, so the end of the connection is seen first.
func (c *unixConn) leaving() bool {
	p, err := proc.Open("/", c.peer.Key())
	if err == nil {
		_, err = p.LiveThread()
		p.Close()
	}
	return errors.Is(err, proc.ErrGone)
}

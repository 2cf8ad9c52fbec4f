package seccomp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The protocol on a unix socket with messages (SOCK_SEQPACKET): the program sends protocol
// with the listener attached. The supervisor answers accepted, or refused and a text.
const (
	protocol byte = 1
	accepted byte = 0
	refused  byte = 1

	// maxMessage bounds the text of a refusal, in bytes.
	maxMessage = 4096
	// sendTimeout limits the time of a peer to send its listener.
	sendTimeout = 10 * time.Second
	// acceptAgain is the pause after a failure to accept a connection, most likely for
	// lack of a descriptor.
	acceptAgain = 100 * time.Millisecond
)

// Server receives the listeners of programs that Enter.
type Server struct {
	socket *net.UnixListener
	accept func(listener int) error
	failed func(error)
	work   sync.WaitGroup

	// mu guards conns, the open connections; nil after the server was closed.
	mu    sync.Mutex
	conns map[*net.UnixConn]struct{}
}

// Serve listens on a unix socket: a path, or "@name" for one without a file.
//
// accept is called with each listener. If it returns no error it owns the listener. An error is sent to the program as text. accept must serve the
// listener soon, and may be called for several programs at a time.
//
// Only processes of the supervisor's own user and of root are accepted, and only from pid
// namespaces visible to the supervisor. failed is called with the error of every failed
// transfer, possibly by several goroutines.
func Serve(socket string, accept func(listener int) error, failed func(error)) (*Server, error) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("seccomp: %w", err)
	}
	s := &Server{socket: l, accept: accept, failed: failed, conns: make(map[*net.UnixConn]struct{})}
	s.work.Go(s.serve)
	return s, nil
}

// Close stops listening, removes the socket's file, cancels transfers in progress and waits
// for them. Accepted listeners continue.
func (s *Server) Close() error {
	err := s.socket.Close()
	s.mu.Lock()
	for conn := range s.conns {
		_ = conn.Close() // its goroutine reports the error
	}
	s.conns = nil
	s.mu.Unlock()
	s.work.Wait()
	return err
}

func (s *Server) serve() {
	for {
		conn, err := s.socket.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.failed(fmt.Errorf("seccomp: accept on %s: %w", s.socket.Addr(), err))
			time.Sleep(acceptAgain)
			continue
		}
		if !s.begin(conn) {
			_ = conn.Close()
			return
		}
		s.work.Go(func() {
			defer s.end(conn)
			if err := s.handOver(conn); err != nil {
				s.failed(err)
			}
		})
	}
}

func (s *Server) begin(conn *net.UnixConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		return false
	}
	s.conns[conn] = struct{}{}
	return true
}

func (s *Server) end(conn *net.UnixConn) {
	_ = conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, conn)
}

// handOver serves one connection.
func (s *Server) handOver(conn *net.UnixConn) error {
	peer, err := peerOf(conn)
	if err != nil {
		return fmt.Errorf("seccomp: identify a program: %w", err)
	}
	if err := s.take(conn, peer); err != nil {
		text := append([]byte{refused}, err.Error()...)
		_, werr := conn.Write(text[:min(len(text), maxMessage)])
		return fmt.Errorf("seccomp: listener of process %d of user %d: %w", peer.Pid, peer.Uid, errors.Join(err, werr))
	}
	if _, err := conn.Write([]byte{accepted}); err != nil {
		return fmt.Errorf("seccomp: listener of process %d of user %d: acknowledge: %w", peer.Pid, peer.Uid, err)
	}
	return nil
}

// take receives the listener of a peer and passes it to accept. It reads the message even
// if the peer is refused: closing a socket with an unread message would drop the refusal.
func (s *Server) take(conn *net.UnixConn, peer *unix.Ucred) error {
	if err := conn.SetReadDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	message, fd, err := readMessage(conn)
	if err != nil {
		return err
	}
	if err = mayEnter(peer, uint32(os.Geteuid())); err == nil {
		if len(message) != 1 || message[0] != protocol || fd < 0 {
			err = fmt.Errorf("invalid message %q: it has no listener, or the program has another version", message)
		} else {
			err = s.accept(fd)
		}
	}
	if err != nil && fd >= 0 {
		err = errors.Join(err, unix.Close(fd))
	}
	return err
}

// mayEnter checks whether a supervisor of the user euid serves the peer.
func mayEnter(peer *unix.Ucred, euid uint32) error {
	if peer.Uid != euid && peer.Uid != 0 {
		return fmt.Errorf("user %d cannot enter: the supervisor serves its own user %d and root", peer.Uid, euid)
	}
	if peer.Pid == 0 {
		return errors.New("the program is in a pid namespace that is not visible to the supervisor")
	}
	return nil
}

// peerOf returns the process at the other end, with its IDs when it connected, in the
// supervisor's namespaces.
func peerOf(conn *net.UnixConn) (peer *unix.Ucred, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	controlErr := raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return peer, errors.Join(controlErr, err)
}

// readMessage returns a message and the descriptor attached to it, -1 for none. Further
// descriptors are closed.
func readMessage(conn *net.UnixConn) (message []byte, fd int, err error) {
	buf := make([]byte, maxMessage)
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return nil, -1, err
	}
	fd = -1
	controls, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return nil, -1, fmt.Errorf("descriptors of a message: %w", err)
	}
	for _, control := range controls {
		rights, err := unix.ParseUnixRights(&control)
		if err != nil {
			continue // no descriptors in it
		}
		for _, r := range rights {
			if fd < 0 {
				fd = r
				continue
			}
			_ = unix.Close(r)
		}
	}
	return buf[:n], fd, nil
}

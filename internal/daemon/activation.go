package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// adopt returns the listener of the socket that systemd passed. Clients wait in its queue
// while no daemon runs. Closing the listener leaves the path in place, because systemd
// still listens on it. adopt closes the files.
func adopt(files []*os.File, path string) (*net.UnixListener, error) {
	defer func() {
		for _, f := range files {
			_ = f.Close() // the listener has a copy
		}
	}()
	wrong := func(next, format string, args ...any) error {
		return &gpreempt.Error{
			Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonSocketPassed,
			Message: "systemd passed " + fmt.Sprintf(format, args...), Next: next,
		}
	}
	if len(files) != 1 {
		return nil, wrong("keep one ListenStream= in gpreemptd.socket", "%d sockets; the daemon serves one", len(files))
	}
	const stream = "in gpreemptd.socket, set ListenStream= to an absolute path and do not set Accept=yes"
	switch kind, err := socketKind(files[0]); {
	case err != nil:
		return nil, wrong(stream, "a descriptor that is not a socket: %v", err)
	case kind != (socketFacts{syscall.AF_UNIX, syscall.SOCK_STREAM, 1}):
		return nil, wrong(stream, "%v; the daemon needs a listening unix stream socket", kind)
	}
	l, err := net.FileListener(files[0])
	if err != nil {
		return nil, fmt.Errorf("socket passed by systemd: %w", err)
	}
	if at := l.Addr().String(); at != path {
		return nil, errors.Join(wrong("use the same path for ListenStream= in gpreemptd.socket and socket in the config file, then systemctl daemon-reload",
			"the socket %s; the config file has %s", at, path), l.Close())
	}
	return l.(*net.UnixListener), nil
}

// socketFacts are SO_DOMAIN, SO_TYPE and SO_ACCEPTCONN of a socket.
type socketFacts struct{ domain, kind, listens int }

// String describes the socket in the terms of unit files.
func (s socketFacts) String() string {
	kind := map[int]string{syscall.SOCK_STREAM: "stream", syscall.SOCK_DGRAM: "datagram", syscall.SOCK_SEQPACKET: "seqpacket"}[s.kind]
	domain := map[int]string{syscall.AF_UNIX: "unix", syscall.AF_INET: "IPv4", syscall.AF_INET6: "IPv6"}[s.domain]
	if domain == "" || kind == "" {
		return fmt.Sprintf("a socket of family %d and type %d", s.domain, s.kind)
	}
	if s.listens == 0 && s.kind != syscall.SOCK_DGRAM {
		return fmt.Sprintf("a %s %s socket that does not listen", domain, kind)
	}
	return fmt.Sprintf("a %s %s socket", domain, kind)
}

func socketKind(f *os.File) (s socketFacts, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return s, err
	}
	controlErr := raw.Control(func(fd uintptr) {
		for option, value := range map[int]*int{syscall.SO_DOMAIN: &s.domain, syscall.SO_TYPE: &s.kind, syscall.SO_ACCEPTCONN: &s.listens} {
			var failed error
			*value, failed = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, option)
			err = errors.Join(err, failed)
		}
	})
	return s, errors.Join(err, controlErr)
}

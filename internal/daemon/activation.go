package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// adopt serves on the socket that systemd listens on for the daemon, in whose queue
// clients wait while none runs. The path stays when the listener is closed: it is
// systemd's. It takes over the files.
func adopt(files []*os.File, path string) (*net.UnixListener, error) {
	defer func() {
		for _, f := range files {
			_ = f.Close() // the listener has its own
		}
	}()
	wrong := func(next, format string, args ...any) error {
		return &gpreempt.Error{
			Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonSocketPassed,
			Message: "systemd passed " + fmt.Sprintf(format, args...), Next: next,
		}
	}
	if len(files) != 1 {
		return nil, wrong("keep one ListenStream= in gpreemptd.socket", "%d sockets, and the daemon serves on one", len(files))
	}
	const stream = "gpreemptd.socket has to say ListenStream= with an absolute path, and not Accept=yes"
	switch kind, err := socketKind(files[0]); {
	case err != nil:
		return nil, wrong(stream, "a descriptor that is no socket: %v", err)
	case kind != (socketFacts{syscall.AF_UNIX, syscall.SOCK_STREAM, 1}):
		return nil, wrong(stream, "%v, and the daemon serves on a unix stream socket that listens", kind)
	}
	l, err := net.FileListener(files[0])
	if err != nil {
		return nil, fmt.Errorf("socket passed by systemd: %w", err)
	}
	if at := l.Addr().String(); at != path {
		return nil, errors.Join(wrong("make ListenStream= in gpreemptd.socket and socket in the config file the same, then systemctl daemon-reload",
			"the socket %s, and the config file says %s", at, path), l.Close())
	}
	return l.(*net.UnixListener), nil
}

// socketFacts is what the kernel says of a socket: SO_DOMAIN, SO_TYPE, SO_ACCEPTCONN.
type socketFacts struct{ domain, kind, listens int }

// String names what a unit file asks for.
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

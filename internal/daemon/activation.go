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
	if !isListener(files[0]) {
		return nil, wrong("in gpreemptd.socket, set ListenStream= to an absolute path and do not set Accept=yes",
			"a descriptor that is not a listening unix stream socket")
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

// isListener reports whether a file is a listening unix stream socket.
func isListener(f *os.File) (is bool) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Control(func(fd uintptr) {
		is = true
		for option, want := range map[int]int{syscall.SO_DOMAIN: syscall.AF_UNIX, syscall.SO_TYPE: syscall.SOCK_STREAM, syscall.SO_ACCEPTCONN: 1} {
			got, err := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, option)
			is = is && err == nil && got == want
		}
	})
	return is && err == nil
}

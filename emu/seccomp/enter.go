package seccomp

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// Enter connects the calling thread, which must be locked, to the supervisor at socket
// (see Serve): it installs the filter, sends its listener, and returns when the supervisor
// has accepted it. Programs that the thread then executes are supervised.
//
// With ErrAlready nothing has changed. After any other error the thread may have a filter
// without a supervisor: it should end.
func Enter(socket string, filter []unix.SockFilter) error {
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("seccomp: connect to the supervisor: %w", err)
	}
	defer func() { _ = conn.Close() }()
	fd, err := Install(filter)
	if err != nil {
		return err
	}
	_, _, err = conn.WriteMsgUnix([]byte{protocol}, unix.UnixRights(fd), nil)
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return fmt.Errorf("seccomp: send the listener to %s: %w", socket, err)
	}
	message := make([]byte, 1+maxMessage)
	n, err := conn.Read(message)
	switch message = message[:n]; {
	case err != nil: // io.EOF: it has ended
		return fmt.Errorf("seccomp: the supervisor at %s does not answer: %w", socket, err)
	case n > 0 && message[0] == refused:
		return fmt.Errorf("seccomp: the supervisor at %s refuses: %s", socket, message[1:])
	case n != 1 || message[0] != accepted:
		return fmt.Errorf("seccomp: the supervisor at %s has another version: it answers %q", socket, message)
	}
	return nil
}

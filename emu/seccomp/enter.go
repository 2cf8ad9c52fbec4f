package seccomp

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Enter connects the calling thread, which must be locked, to the supervisor at socket
// (see Serve): it installs the filter, sends its listener, and when the supervisor has
// accepted it, enters the supervisor's mount namespace, if any, in the same working
// directory. Programs that the thread then executes are supervised.
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
	message, namespace, err := readMessage(conn)
	switch {
	case err != nil: // io.EOF: it has ended
		return fmt.Errorf("seccomp: the supervisor at %s does not answer: %w", socket, err)
	case len(message) > 0 && message[0] == refused:
		return fmt.Errorf("seccomp: the supervisor at %s refuses: %s", socket, message[1:])
	case len(message) != 1 || message[0] != accepted:
		return fmt.Errorf("seccomp: the supervisor at %s has another version: it answers %q", socket, message)
	case namespace < 0:
		return nil
	}
	return errors.Join(enterNamespace(namespace), unix.Close(namespace))
}

// enterNamespace moves the calling thread to a mount namespace, and to the directory with
// the same name there: setns moves a thread to the root.
func enterNamespace(fd int) error {
	dir, err := unix.Getwd()
	if err != nil {
		return fmt.Errorf("seccomp: find the working directory: %w", err)
	}
	// The kernel does not move a thread that shares its root and directory with others.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("seccomp: separate the thread's root and directory from the process's: %w", err)
	}
	if err := unix.Setns(fd, unix.CLONE_NEWNS); err != nil {
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("it needs CAP_SYS_ADMIN and CAP_SYS_CHROOT, user %d lacks one: %w", os.Geteuid(), err)
		}
		return fmt.Errorf("seccomp: enter the supervisor's mount namespace: %w", err)
	}
	if err := unix.Chdir(dir); err != nil {
		return fmt.Errorf("seccomp: the working directory %s cannot be entered in the supervisor's mount namespace: %w", dir, err)
	}
	return nil
}

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// socketMode is the mode of the socket: its owner and its group may connect. What they may do
// is decided by identity.
const socketMode = 0o660

// listen takes the instance lock at lockPath and returns the listener of a socket: the one
// that systemd passed, or if it passed none a new one at the path. The lock is held until
// release is called. The lock file is never deleted: after a deletion two daemons could
// hold a lock each.
func listen(ctx context.Context, socket, lockPath string, passed []*os.File) (listener *net.UnixListener, release func(), err error) {
	for _, dir := range []string{filepath.Dir(socket), filepath.Dir(lockPath)} {
		if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // G301: clients must reach the socket
			return nil, nil, fmt.Errorf("directory of the socket: %w", err)
		}
		if err := checkDirectory(dir); err != nil {
			return nil, nil, err
		}
	}
	lock, err := takeLock(lockPath)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			_ = lock.Close()
		}
	}()
	if len(passed) > 0 {
		listener, err = adopt(passed, socket)
	} else {
		listener, err = bind(ctx, socket)
	}
	if err != nil {
		return nil, nil, err
	}
	return listener, func() { _ = lock.Close() }, nil
}

// bind listens on a path that no other program uses.
func bind(ctx context.Context, socket string) (*net.UnixListener, error) {
	if err := clearStale(ctx, socket); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", socket, err)
	}
	if err := os.Chmod(socket, socketMode); err != nil {
		_ = listener.Close()
		return nil, fmt.Errorf("mode of %s: %w", socket, err)
	}
	return listener, nil
}

// checkDirectory rejects a directory in which every user may replace the socket: clients
// would connect to another program.
func checkDirectory(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("directory of the socket: %w", err)
	}
	if info.Mode().Perm()&0o002 == 0 || info.Mode()&fs.ModeSticky != 0 {
		return nil
	}
	return &gpreempt.Error{
		Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonOpenDirectory,
		Message: fmt.Sprintf("every user may write to %s, and replace the daemon's socket", dir),
		Next:    "chmod o-w " + dir + ", or choose another path for socket in the config file",
	}
}

// takeLock takes an exclusive lock on a file and writes the pid into it, for the message
// of a second daemon.
func takeLock(path string) (*os.File, error) {
	// A process that can open the file can lock it, and keep the daemon from starting.
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("instance lock: %w", err)
	}
	if err := file.Chmod(0o600); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("instance lock: %w", err)
	}
	// The kernel releases the lock when the last copy of the descriptor is closed, however
	// the process ends.
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		pid, _ := os.ReadFile(path)
		_ = file.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("instance lock %s: %w", path, err)
		}
		return nil, &gpreempt.Error{
			Code: gpreempt.CodeAlreadyExists, Reason: gpreempt.ReasonSecondDaemon,
			Message: fmt.Sprintf("another gpreemptd (pid %s) holds %s", cmp.Or(strings.TrimSpace(string(pid)), "unknown"), path),
			Next:    "one daemon serves a host; stop that one first, or use it: gpctl status",
		}
	}
	// The daemon starts even if the disk is full: the lock works without the pid, and
	// processes that an earlier daemon paused may have to be resumed.
	if file.Truncate(0) == nil {
		_, _ = file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return file, nil
}

// clearStale removes the socket of a daemon that died. It returns an error if a program
// listens on it, or if it is not a socket.
func clearStale(ctx context.Context, socket string) error {
	info, err := os.Lstat(socket)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("socket path: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return &gpreempt.Error{
			Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonSocketTaken,
			Message: fmt.Sprintf("%s exists and is not a socket", socket),
			Next:    "move it away, or choose another path for socket in the config file",
		}
	}
	dialer := net.Dialer{Timeout: time.Second}
	conn, err := dialer.DialContext(ctx, "unix", socket)
	switch {
	case err == nil:
		_ = conn.Close()
		return &gpreempt.Error{
			Code: gpreempt.CodeAlreadyExists, Reason: gpreempt.ReasonSocketTaken,
			Message: fmt.Sprintf("another program listens on %s", socket),
			Next:    "stop it, or choose another path for socket in the config file",
		}
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case !errors.Is(err, syscall.ECONNREFUSED):
		// Only ECONNREFUSED proves that no program listens: a program too busy to accept
		// and a socket of another type cause other errors.
		return &gpreempt.Error{
			Code: gpreempt.CodeAlreadyExists, Reason: gpreempt.ReasonSocketTaken,
			Message: fmt.Sprintf("%s may belong to another program: %v", socket, err),
			Next:    "stop that program or remove the socket, or choose another path for socket in the config file",
		}
	}
	if err := os.Remove(socket); err != nil {
		return fmt.Errorf("socket of a daemon that died: %w", err)
	}
	return nil
}

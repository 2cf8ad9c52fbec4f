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

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/peercred"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// socketMode lets the owner and the group of the socket in; rights inside are
// decided by identity.
const socketMode = 0o660

// listen takes the instance lock, and serves on the socket that systemd passed; when
// it passed none, it clears a socket a dead daemon left, and listens. The lock is held until release is called; a lock file is never
// deleted, since deleting it would let two daemons hold "the" lock.
func listen(ctx context.Context, socket, lockPath string, passed []*os.File) (listener *net.UnixListener, release func(), err error) {
	for _, dir := range []string{filepath.Dir(socket), filepath.Dir(lockPath)} {
		if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // G301: clients have to get through to the socket
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

// bind listens on a path that nobody else uses.
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

// identified returns the connections of a listener with who is at the other end. They
// may use three quarters of the file descriptors, two each: what the daemon does for
// itself, such as to let a process run again, must not fail for want of one.
func (d *daemon) identified(listener *net.UnixListener) (net.Listener, error) {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return nil, fmt.Errorf("limit of file descriptors: %w", err)
	}
	most := int(min(files.Cur, 1<<20)) * 3 / 8
	return acceptLog{peercred.NewListener(listener, peercred.AtMost(most), peercred.Admit(d.server.MayConnect), peercred.OnRefused(d.server.Refused)), d.log}, nil
}

// acceptLog tells that nobody can be let in; gRPC waits and tries again by itself.
type acceptLog struct {
	net.Listener
	log *zap.Logger
}

func (l acceptLog) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		l.log.Warn("no connection can be accepted; those there are go on", logkey.Err(err))
	}
	return conn, err
}

// checkDirectory refuses a directory in which anybody may replace what the daemon
// puts there: clients would be talking to whoever did.
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
		Message: fmt.Sprintf("everybody may write to %s, and so put another socket in the place of the daemon's", dir),
		Next:    "chmod o-w " + dir + ", or choose another path for socket in the config file",
	}
}

// takeLock holds an exclusive lock on a file; whoever holds it has written its
// pid there, if there was room, for the message of the one who comes second.
func takeLock(path string) (*os.File, error) {
	// Whoever can read the file can lock it, and would keep the daemon from starting.
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("instance lock: %w", err)
	}
	if err := file.Chmod(0o600); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("instance lock: %w", err)
	}
	if err := lockFile(file); err != nil {
		pid, _ := os.ReadFile(path)
		_ = file.Close()
		if !errors.Is(err, errLocked) {
			return nil, fmt.Errorf("instance lock %s: %w", path, err)
		}
		return nil, &gpreempt.Error{
			Code: gpreempt.CodeAlreadyExists, Reason: gpreempt.ReasonSecondDaemon,
			Message: fmt.Sprintf("another gpreemptd (pid %s) holds %s", cmp.Or(strings.TrimSpace(string(pid)), "unknown"), path),
			Next:    "one daemon serves a host; stop that one first, or talk to it with gpctl status",
		}
	}
	// A disk that is full is no reason not to start: the lock holds without the pid, and
	// an earlier daemon's pauses may have to be undone.
	if file.Truncate(0) == nil {
		_, _ = file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return file, nil
}

// clearStale removes the socket of a daemon that is dead. It removes nothing
// that answers and nothing that is not a socket.
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
		// Only a refused connection proves that nobody listens: a program too busy to
		// accept and one with a socket of another type give other errors.
		return &gpreempt.Error{
			Code: gpreempt.CodeAlreadyExists, Reason: gpreempt.ReasonSocketTaken,
			Message: fmt.Sprintf("%s may be another program's: %v", socket, err),
			Next:    "stop that program or remove the socket, or choose another path for socket in the config file",
		}
	}
	if err := os.Remove(socket); err != nil {
		return fmt.Errorf("socket left by a daemon that died: %w", err)
	}
	return nil
}

var errLocked = errors.New("locked by another process")

// lockFile takes a whole-file lock that the kernel drops when the last copy of
// the descriptor closes, however the process ends.
func lockFile(file *os.File) error {
	err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return errLocked
	}
	return err
}

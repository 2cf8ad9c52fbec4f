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

	"github.com/gpreempt/gpreempt/internal/safedir"
	"github.com/gpreempt/gpreempt/pkg/discovery"
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
	if err := makeDirectory(filepath.Dir(socket), "socket"); err != nil {
		return nil, nil, err
	}
	if err := makeDirectory(filepath.Dir(lockPath), "instance lock"); err != nil {
		return nil, nil, err
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

// makeDirectory makes the directory of a file of the daemon. It rejects one in which another
// user could replace the file: clients would connect to another program, and the daemon would
// write to a file of that user's choice.
func makeDirectory(dir, of string) error {
	err := safedir.Make(dir)
	if e, ok := errors.AsType[*safedir.Error](err); ok {
		return &gpreempt.Error{
			Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonOpenDirectory,
			Message: fmt.Sprintf("directory of the %s: %s %s", of, e.Path, e.Problem), Next: e.Remedy,
		}
	}
	if err != nil {
		return fmt.Errorf("directory of the %s: %w", of, err)
	}
	return nil
}

// takeLock takes an exclusive lock on a file and writes the pid into it, for the message
// of a second daemon.
func takeLock(path string) (*os.File, error) {
	// A process that can open the file can lock it, and keep the daemon from starting. In a
	// sticky directory it may be a file of another user, who can then open it, or a link.
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) {
		err = fmt.Errorf("%w: remove the symbolic link, and gpreemptd creates a file", err)
	}
	if err != nil {
		if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 {
			return nil, &gpreempt.Error{Code: gpreempt.CodePermissionDenied, Message: fmt.Sprintf("instance lock: %v", err), Next: "run gpreemptd as root"}
		}
		return nil, fmt.Errorf("instance lock: %w", err)
	}
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() || info.Sys().(*syscall.Stat_t).Uid != uint32(os.Geteuid()) {
		_ = file.Close()
		return nil, errors.Join(fmt.Errorf("instance lock: %s is not a file of user %d, the user of this program: remove it", path, os.Geteuid()), err)
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

// hostLock is in the directory /run of the first process, which is the host's for a daemon that
// sees the host's processes: containers have a /run of their own, and so have network
// namespaces abstract sockets. Only root can make or open files there, and nothing removes it.
const hostLock = "/proc/1/root/run/gpreemptd.lock"

// lockHost takes the lock of the host, where there is a driver whose jobs two daemons would
// contend for. The lock is held until release is called. warning says why it could not be tried.
func (h Host) lockHost() (release func(), warning, err error) {
	exists := func(path string) bool {
		_, err := fs.Stat(h.files(), path)
		return err == nil
	}
	if h.Lock == "" || h.Simulated != "" || discovery.Backend(h.files()) != "kfd" || !exists("sys/class/kfd") && !exists("proc/driver/nvidia") {
		return func() {}, nil, nil
	}
	lock, err := takeLock(h.Lock)
	if _, second := errors.AsType[*gpreempt.Error](err); second {
		return nil, nil, err
	}
	if err != nil {
		return func() {}, err, nil
	}
	return func() { _ = lock.Close() }, nil, nil
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

package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// place has the paths of a daemon that listens.
type place struct{ socket, lock string }

func newPlace(t *testing.T) place {
	t.Helper()
	dir := filepath.Join(testutil.TempSocketDir(t), "run")
	return place{filepath.Join(dir, "d.sock"), filepath.Join(dir, "d.lock")}
}

// listen succeeds; close ends it as a daemon does.
func (p place) listen(t *testing.T) (closeAll func()) {
	t.Helper()
	l, release, err := listen(t.Context(), p.socket, p.lock, nil)
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		l.Close()
		release()
	}
}

// refused checks that listening fails for a reason, and returns the error.
func (p place) refused(t *testing.T, reason gpreempt.Reason) *gpreempt.Error {
	t.Helper()
	_, _, err := listen(t.Context(), p.socket, p.lock, nil)
	e, ok := errors.AsType[*gpreempt.Error](err)
	if !ok || e.Reason != reason || e.Next == "" {
		t.Fatalf("got %v, want an error for %s with a next step", err, reason)
	}
	return e
}

func TestSecondDaemonIsRefusedWithThePidOfTheFirst(t *testing.T) {
	p := newPlace(t)
	closeFirst := p.listen(t)
	want := "another gpreemptd (pid " + strconv.Itoa(os.Getpid()) + ") holds " + p.lock
	if e := p.refused(t, gpreempt.ReasonSecondDaemon); e.Message != want {
		t.Errorf("it says %q, want %q", e.Message, want)
	}
	// The same lock under another socket is the same host.
	other := place{p.socket + "2", p.lock}
	other.refused(t, gpreempt.ReasonSecondDaemon)
	if conn, err := net.Dial("unix", p.socket); err != nil {
		t.Errorf("the first daemon's socket is gone: %v", err)
	} else {
		conn.Close()
	}
	closeFirst()
	p.listen(t)()
}

func TestHostHasOneDaemonWhateverItsDirectories(t *testing.T) {
	driver := fstest.MapFS{"sys/class/kfd/kfd/dev": {}}
	lock := filepath.Join(t.TempDir(), "lock")
	first := Host{Lock: lock, RunDir: "/run/a", Files: driver}
	release, warning, err := first.lockHost()
	if warning != nil || err != nil {
		t.Fatal(warning, err)
	}
	second := Host{Lock: lock, RunDir: "/run/b", Files: fstest.MapFS{"proc/driver/nvidia/version": {}}}
	_, _, err = second.lockHost()
	e, ok := errors.AsType[*gpreempt.Error](err)
	if want := "another gpreemptd (pid " + strconv.Itoa(os.Getpid()) + ") holds " + lock; !ok || e.Reason != gpreempt.ReasonSecondDaemon || e.Message != want {
		t.Errorf("the second daemon: %v, want %q", err, want)
	}
	for name, h := range map[string]Host{
		"of a simulation":  {Lock: lock, Simulated: "mi300x", Files: driver},
		"of an emulation":  {Lock: lock, Files: fstest.MapFS{"sys/class/kfd/kfd/dev": {}, discovery.EmulatedFile: {Data: []byte("mi300x\n")}}},
		"without a driver": {Lock: lock, Files: fstest.MapFS{"proc/1/stat": {}}},
	} {
		if release, warning, err := h.lockHost(); warning != nil || err != nil {
			t.Errorf("a daemon %s: %v, %v", name, warning, err)
		} else {
			release()
		}
	}
	// The daemon starts where the file cannot be opened, and says so.
	if release, warning, err := (Host{Lock: lock + "/none", Files: driver}).lockHost(); warning == nil || err != nil {
		t.Errorf("%v, %v", warning, err)
	} else {
		release()
	}
	release()
	if release, warning, err = second.lockHost(); warning != nil || err != nil {
		t.Fatal(warning, err)
	}
	release()
}

func TestFailedStartReleasesTheLock(t *testing.T) {
	p := newPlace(t)
	if err := os.MkdirAll(p.socket, 0o755); err != nil { // a directory at the path of the socket
		t.Fatal(err)
	}
	p.refused(t, gpreempt.ReasonSocketTaken)
	if err := os.Remove(p.socket); err != nil {
		t.Fatal(err)
	}
	p.listen(t)()
}

func TestLockFileHoldsTheLastPidOnly(t *testing.T) {
	p := newPlace(t)
	if err := os.MkdirAll(filepath.Dir(p.lock), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.lock, []byte("12345678901234\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	defer p.listen(t)()
	text, err := os.ReadFile(p.lock)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strconv.Itoa(os.Getpid())+"\n", string(text)); diff != "" {
		t.Error(diff)
	}
}

func TestSocketIsForOwnerAndGroup(t *testing.T) {
	p := newPlace(t)
	defer p.listen(t)()
	info, err := os.Stat(p.socket)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := info.Mode(), os.ModeSocket|0o660; got != want {
		t.Errorf("mode %v, want %v", got, want)
	}
}

func TestSocketOfADeadDaemonIsReplaced(t *testing.T) {
	p := newPlace(t)
	l, release, err := listen(t.Context(), p.socket, p.lock, nil)
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	release()
	if _, err := os.Lstat(p.socket); err != nil {
		t.Fatalf("the socket does not exist: %v", err)
	}
	closeNew := p.listen(t)
	defer closeNew()
	conn, err := net.Dial("unix", p.socket)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestPathOfAnotherProgramIsLeftAlone(t *testing.T) {
	for name, occupy := range map[string]func(t *testing.T, path string){
		"a program that listens": func(t *testing.T, path string) {
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
		},
		"a program that takes datagrams": func(t *testing.T, path string) {
			c, err := net.ListenPacket("unixgram", path)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		},
		"a program too busy to accept": busyListener,
		"a file": func(t *testing.T, path string) {
			if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"a directory": func(t *testing.T, path string) {
			if err := os.Mkdir(path, 0o755); err != nil {
				t.Fatal(err)
			}
		},
		"a link to a missing file": func(t *testing.T, path string) {
			if err := os.Symlink(path+".missing", path); err != nil {
				t.Fatal(err)
			}
		},
		"a link": func(t *testing.T, path string) {
			if err := os.Symlink("/dev/null", path); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			if err := os.MkdirAll(filepath.Dir(p.socket), 0o755); err != nil {
				t.Fatal(err)
			}
			occupy(t, p.socket)
			before, err := os.Lstat(p.socket)
			if err != nil {
				t.Fatal(err)
			}
			e := p.refused(t, gpreempt.ReasonSocketTaken)
			if !strings.Contains(e.Message, p.socket) {
				t.Errorf("it does not name the path: %v", e)
			}
			after, err := os.Lstat(p.socket)
			if err != nil || !os.SameFile(before, after) {
				t.Errorf("the path was replaced or removed: %v", err)
			}
		})
	}
}

// busyListener listens and lets its backlog fill up.
func busyListener(t *testing.T, path string) {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	for {
		conn, err := net.Dial("unix", path)
		if errors.Is(err, syscall.EAGAIN) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
	}
}

// A process that can open the file can hold the lock.
func TestLockFileIsForItsOwnerAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	if err := os.WriteFile(path, nil, 0o644); err != nil { // of an earlier version
		t.Fatal(err)
	}
	lock, err := takeLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	info, err := lock.Stat()
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

// In a directory of another user, links of that user led the daemon to truncate a file of root,
// and to change its group.
func TestLinksAreNotFollowed(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	precious := filepath.Join(dir, "precious")
	if err := os.WriteFile(precious, []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"lock", "socket"} {
		if err := os.Symlink("precious", filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	lock := filepath.Join(dir, "lock")
	if _, err := takeLock(lock); !errors.Is(err, syscall.ELOOP) || !strings.Contains(err.Error(), "remove the symbolic link") || !strings.Contains(err.Error(), lock) {
		t.Errorf("the lock: %v", err)
	}
	if os.Geteuid() == 0 {
		d := &daemon{}
		d.setAccess(&auth.Policy{OnlineGIDs: []uint32{4711}}, nil, filepath.Join(dir, "socket"))
	}
	info, err := os.Stat(precious)
	if err != nil {
		t.Fatal(err)
	}
	if stat := info.Sys().(*syscall.Stat_t); stat.Size != 4 || info.Mode() != 0o644 || stat.Gid == 4711 {
		t.Errorf("the file has %d bytes, mode %v and group %d", stat.Size, info.Mode(), stat.Gid)
	}
}

func TestLockFileOfAnotherUserOrKindIsRefused(t *testing.T) {
	dir := t.TempDir()
	paths := map[string]func(path string) error{"a FIFO": func(path string) error { return syscall.Mkfifo(path, 0o600) }}
	if os.Geteuid() == 0 {
		paths["a file of another user"] = func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o666), os.Chown(path, 4711, 4711))
		}
	}
	for name, occupy := range paths {
		path := filepath.Join(dir, name)
		if err := occupy(path); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("instance lock: %s is not a file of user %d, the user of this program: remove it", path, os.Geteuid())
		if _, err := takeLock(path); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
}

func TestDirectoryOfAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to change the owner of a directory")
	}
	p := newPlace(t)
	dir := filepath.Dir(p.socket)
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chown(dir, 4711, 4711)); err != nil {
		t.Fatal(err)
	}
	want := gpreempt.Error{
		Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonOpenDirectory,
		Message: "directory of the socket: " + dir + " belongs to user 4711",
		Next:    "chown it to root, or choose another path: user 4711 can replace everything below it",
	}
	if diff := cmp.Diff(want, *p.refused(t, gpreempt.ReasonOpenDirectory)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	lockElsewhere := place{filepath.Join(testutil.TempSocketDir(t), "s"), p.lock}
	lockElsewhere.refused(t, gpreempt.ReasonOpenDirectory)
}

func TestDirectoryThatEveryUserCanWriteIsRefused(t *testing.T) {
	p := newPlace(t)
	dir := filepath.Dir(p.socket)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if e := p.refused(t, gpreempt.ReasonOpenDirectory); !strings.Contains(e.Next, dir) {
		t.Errorf("it does not name the directory: %v", e)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("the directory has %v, %v; want nothing", left, err)
	}
	if err := os.Chmod(dir, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	p.listen(t)()
}

package dumps

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// hanging is a file system whose files are opened when release is closed. opening is called before.
type hanging struct {
	fs.FS
	opening func()
	release chan struct{}
}

func (h hanging) Open(name string) (fs.File, error) {
	h.opening()
	<-h.release
	return h.FS.Open(name)
}

// readerOf returns a reader whose helpers are goroutines that read root, and how many were started. The threads of
// processes are those below a directory.
// A helper is killed once killable is closed; nil is at once.
func readerOf(t *testing.T, dir string, root fs.FS, killable <-chan struct{}) (r *Reader, started *int) {
	started = new(int)
	return newReader(os.DirFS(dir), func(pid int32) bool { return pid == 50 }, func() (*child.Process[string, answer], error) {
		*started++
		daemon, socket, err := child.Pair()
		if err != nil {
			return nil, err
		}
		over := make(chan struct{})
		go func() {
			defer close(over)
			defer socket.Close()
			if err := serve(socket, root); err != nil {
				t.Error(err)
			}
		}()
		p := child.New[string](daemon, 77, func() {
			if killable != nil {
				<-killable
			}
			if c, err := daemon.SyscallConn(); err == nil {
				_ = c.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
			}
		}, func() { <-over }, func(answer) {}, zaptest.NewLogger(t))
		t.Cleanup(func() { testutil.Receive(t, p.Ended, "the end of a helper") })
		return p, nil
	}), started
}

func TestFilesAreReadByAHelper(t *testing.T) {
	long := strings.Repeat("0123456789abcdef", 1<<16)
	r, started := readerOf(t, t.TempDir(), fstest.MapFS{debugfs.MQDs: {Data: []byte(long)}}, nil)
	text, err := r.Read(debugfs.MQDs)
	if string(text) != long || err != nil {
		t.Errorf("%d bytes, %v", len(text), err)
	}
	if _, err := r.Read(debugfs.HQDs); err == nil || !strings.Contains(err.Error(), "sys/kernel/debug/kfd/hqds") {
		t.Errorf("a missing file: %v", err)
	}
	r, _ = readerOf(t, t.TempDir(), os.DirFS(t.TempDir()), nil)
	if _, err := r.Read(debugfs.HQDs); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file on the disk: %v", err)
	}
	if *started != 2 {
		t.Errorf("%d helpers, want 2", *started)
	}
}

func TestReadThatHangsIsAbandonedWithItsHelper(t *testing.T) {
	release, opening := make(chan struct{}), make(chan struct{})
	// A helper that is killed before it reads does not hang.
	r, started := readerOf(t, t.TempDir(), hanging{fstest.MapFS{debugfs.MQDs: {Data: []byte("x")}}, sync.OnceFunc(func() { close(opening) }), release}, opening)
	r.limit = time.Nanosecond
	for range 3 {
		if _, err := r.Read(debugfs.MQDs); !errors.Is(err, inventory.ErrHangs) {
			t.Errorf("error %v, want ErrHangs", err)
		}
	}
	if *started != 1 {
		t.Errorf("%d helpers were started while one hung, want 1", *started)
	}
	hung := r.hangs[debugfs.MQDs]
	close(release)
	testutil.Receive(t, hung.Ended, "the end of the helper")
	r.limit = testutil.WaitTime
	if text, err := r.Read(debugfs.MQDs); string(text) != "x" || err != nil {
		t.Errorf("after that: %q, %v", text, err)
	}
}

func TestMQDsAreNotReadWhileAProcessIsInACallOfTheDriver(t *testing.T) {
	const (
		trap   = "16 0x3 0xc0204b26 0x7f00 0x0 0x0 0x0 0x7ffd 0x7f12\n"
		events = "16 0x3 0xc0184b0c 0x7f00 0x0 0x0 0x0 0x7ffd 0x7f12\n"
	)
	for _, tc := range []struct {
		name    string
		threads map[string]string // PID/TID: syscall
		want    int32
	}{
		{"none", nil, 0},
		{"one that runs, one in another call, one that waits for events", map[string]string{"7/7": "running\n", "7/8": "202 0x1 0x80 0x0\n", "7/9": events}, 0},
		{"an ioctl of another driver", map[string]string{"7/7": "16 0x3 0xc0106444 0x7f00\n"}, 0},
		{"a thread in a call", map[string]string{"7/7": "running\n", "9/9": events, "9/10": trap}, 9},
		{"a helper, and the process for which it waits", map[string]string{"50/51": trap, "9/9": trap}, 9},
		{"a thread that may not be looked at", map[string]string{"9/9": events}, 9},
		{"a helper", map[string]string{"50/51": trap, "9/9": events}, 50},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			for thread, call := range tc.threads {
				pid, tid, _ := strings.Cut(thread, "/")
				task := filepath.Join(dir, "proc", pid, "task", tid)
				if err := errors.Join(os.MkdirAll(task, 0o700), os.MkdirAll(filepath.Join(dir, "sys/class/kfd/kfd/proc", pid), 0o700),
					os.WriteFile(filepath.Join(task, "syscall"), []byte(call), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			if tc.name == "a thread that may not be looked at" {
				// A directory cannot be read, as what is denied.
				path := filepath.Join(dir, "proc/9/task/9/syscall")
				if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o700)); err != nil {
					t.Fatal(err)
				}
			}
			r, _ := readerOf(t, dir, fstest.MapFS{debugfs.MQDs: {}, debugfs.HQDs: {}}, nil)
			_, err := r.Read(debugfs.MQDs)
			var got int32
			if busy, ok := errors.AsType[*inventory.BusyError](err); ok {
				got = busy.PID
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("process (-want +got):\n%s", diff)
			}
			if _, err := r.Read(debugfs.HQDs); err != nil { // takes no lock of a process
				t.Error(err)
			}
		})
	}
}

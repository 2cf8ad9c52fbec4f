package regular

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// made makes one path of each kind.
func made(t *testing.T) (dir string) {
	t.Helper()
	dir = testutil.TempSocketDir(t)
	at := func(name string) string { return filepath.Join(dir, name) }
	l, err := net.Listen("unix", at("socket"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	for _, err := range []error{
		os.WriteFile(at("file"), []byte("text"), 0o600), os.WriteFile(at("empty"), nil, 0o600), os.WriteFile(at("large"), nil, 0o600),
		os.Truncate(at("large"), 2<<30), // which takes no space
		syscall.Mkfifo(at("fifo"), 0o600), os.Mkdir(at("dir"), 0o700), os.Symlink("fifo", at("link")), os.Symlink("file", at("good link")),
		os.Symlink("/dev/zero", at("zero")), os.Symlink("loop", at("loop")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestOnlyRegularFilesOfBoundedSizeAreRead(t *testing.T) {
	dir := made(t)
	for name, want := range map[string]string{
		"file": "text", "good link": "text", "empty": "",
		"fifo": "error: open DIR/fifo: it is not a regular file: a FIFO", "link": "error: open DIR/link: it is not a regular file: a FIFO",
		"dir": "error: open DIR/dir: it is not a regular file: a directory", "socket": "error: open DIR/socket: it is not a regular file: a socket",
		"zero": "error: open DIR/zero: it is not a regular file: a device", "large": "error: read DIR/large: it is too large: it has more than 4 bytes",
		"none": "error: open DIR/none: no such file or directory", "loop": "error: open DIR/loop: too many levels of symbolic links",
	} {
		for how, read := range map[string]func() ([]byte, error){
			"Read":     func() ([]byte, error) { return Read(filepath.Join(dir, name), 4) },
			"ReadSoon": func() ([]byte, error) { return ReadSoon(filepath.Join(dir, name), 4) },
		} {
			data, err := read()
			got := string(data)
			if err != nil {
				got = "error: " + strings.ReplaceAll(err.Error(), dir, "DIR")
				if len(data) > 0 {
					t.Errorf("%s of %s: %q beside %v", how, name, data, err)
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s of %s (-want +got):\n%s", how, name, diff)
			}
			if kind, size := errors.Is(err, ErrKind), errors.Is(err, ErrSize); kind != strings.Contains(want, "regular") || size != strings.Contains(want, "large:") {
				t.Errorf("%s of %s: kind %v, size %v", how, name, kind, size)
			}
		}
	}
	// Files that say that they are empty, as those of procfs do.
	if _, err := Read("/proc/self/maps", 4); !errors.Is(err, ErrSize) {
		t.Errorf("error %v", err)
	}
	// A read that would wait is an error: /proc/kmsg is a regular file.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := syscall.SetNonblock(int(r.Fd()), true); err != nil {
		t.Fatal(err)
	}
	f := &File{f: r, path: "/proc/kmsg", left: 4, most: 4}
	defer f.Close()
	if n, err := f.Read(make([]byte, 4)); n != 0 || !errors.Is(err, ErrKind) {
		t.Errorf("%d bytes, error %v", n, err)
	}
}

// A file system that hangs costs one goroutine, whatever is asked of it.
func TestFileThatHangsIsAnErrorAndReadAgainLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		reads := 0
		read := func(string, int64) ([]byte, error) {
			reads++
			<-release
			return []byte("text"), nil
		}
		try := func() string {
			data, err := soon("/mnt/config", 4, readTime, read)
			return fmt.Sprintf("%s %v", data, errors.Is(err, os.ErrDeadlineExceeded))
		}
		start := time.Now()
		got := []string{try(), try(), try()}
		took := time.Since(start)
		close(release)
		synctest.Wait()
		got = append(got, try())
		if diff := cmp.Diff([]string{" true", " true", " true", "text false"}, got); diff != "" || took != readTime || reads != 2 {
			t.Errorf("%d reads, %v (-want +got):\n%s", reads, took, diff)
		}
	})
}

// The certificate of an admin is read for each host of a fleet at the same time.
func TestFileIsReadByManyAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		read := func(string, int64) ([]byte, error) {
			<-release
			return []byte("text"), nil
		}
		got := make([]string, 3)
		var readers sync.WaitGroup
		for i := range got {
			readers.Go(func() {
				data, err := soon("/etc/cert.pem", 4, readTime, read)
				got[i] = fmt.Sprintf("%s %v", data, err)
			})
		}
		synctest.Wait()
		close(release)
		readers.Wait()
		if diff := cmp.Diff([]string{"text <nil>", "text <nil>", "text <nil>"}, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

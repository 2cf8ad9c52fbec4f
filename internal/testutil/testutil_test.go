package testutil

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMain(m *testing.M) { os.Exit(VerifyMain(m)) }

// run is a fake test run.
type run func() int

func (r run) Run() int { return r() }

func TestCleanRunPasses(t *testing.T) {
	var stderr bytes.Buffer
	code := verifyMain(run(func() int {
		done := make(chan struct{})
		go close(done)
		<-done
		return 0
	}), &stderr, 0)
	if code != 0 || stderr.Len() > 0 {
		t.Errorf("code %d, message %q; want 0 and none", code, stderr.String())
	}
}

func TestLeakedDescriptorFailsTheRunAndIsNamed(t *testing.T) {
	leak := filepath.Join(t.TempDir(), "leaked")
	var file *os.File
	var stderr bytes.Buffer
	code := verifyMain(run(func() int {
		var err error
		if file, err = os.Create(leak); err != nil {
			t.Error(err)
		}
		return 0
	}), &stderr, 0)
	defer file.Close()
	if code != 1 || !strings.Contains(stderr.String(), leak) {
		t.Errorf("code %d, message %q; want 1 and the path %s", code, stderr.String(), leak)
	}
}

func TestLeakedGoroutineFailsTheRunAndIsNamed(t *testing.T) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	var stderr bytes.Buffer
	code := verifyMain(run(func() int {
		go leakUntil(stop, stopped)
		return 0
	}), &stderr, 0)
	close(stop)
	<-stopped
	if code != 1 || !strings.Contains(stderr.String(), "leakUntil") {
		t.Errorf("code %d, message %q; want 1 and the name of the goroutine's function", code, stderr.String())
	}
}

func leakUntil(stop <-chan struct{}, stopped chan<- struct{}) {
	defer close(stopped)
	<-stop
}

func TestFailedRunKeepsItsCode(t *testing.T) {
	var stderr bytes.Buffer
	if code := verifyMain(run(func() int { return 3 }), &stderr, 0); code != 3 {
		t.Errorf("code %d, want 3", code)
	}
}

func TestLeakedFDs(t *testing.T) {
	const poll, event = "anon_inode:[eventpoll]", "anon_inode:[eventfd]"
	for _, tc := range []struct {
		name          string
		before, after map[int]string
		want          []string
	}{
		{
			name:   "nothing new",
			before: map[int]string{0: "/dev/null"},
			after:  map[int]string{0: "/dev/null"},
		},
		{
			name:   "the runtime begins to poll",
			before: map[int]string{},
			after:  map[int]string{3: poll, 4: event},
		},
		{
			name:   "a second epoll is not the runtime's",
			before: map[int]string{3: poll},
			after:  map[int]string{3: poll, 5: poll},
			want:   []string{"fd 5 -> anon_inode:[eventpoll]"},
		},
		{
			name:   "a number used again for something else",
			before: map[int]string{3: "/a"},
			after:  map[int]string{3: "/b"},
			want:   []string{"fd 3 -> /b"},
		},
		{
			name:   "several, in order",
			before: map[int]string{},
			after:  map[int]string{9: "socket:[2]", 8: "socket:[1]"},
			want:   []string{"fd 8 -> socket:[1]", "fd 9 -> socket:[2]"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, leakedFDs(tc.before, tc.after)); diff != "" {
				t.Errorf("leaked (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSocketsFitInTempSocketDirWhateverTMPDIRIs(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(os.TempDir(), strings.Repeat("long", 30)))
	dir := TempSocketDir(t)
	l, err := net.Listen("unix", filepath.Join(dir, "gpreemptd.sock"))
	if err != nil {
		t.Fatalf("listening in %s: %v", dir, err)
	}
	l.Close()
}

package daemon

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// fileOf returns a copy of the descriptor of a socket, as systemd passes it.
func fileOf(t *testing.T, open interface{ File() (*os.File, error) }) *os.File {
	t.Helper()
	f, err := open.File()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// systemdListens listens on a path like systemd, which keeps its own descriptor.
func systemdListens(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestPassedSocketIsServedAndOutlivesTheDaemon(t *testing.T) {
	path := filepath.Join(testutil.TempSocketDir(t), "d.sock")
	owned := systemdListens(t, path)
	lock := path + ".lock"
	for _, round := range []string{"the first daemon", "the next one"} {
		waiting, err := net.Dial("unix", path) // while no daemon runs
		if err != nil {
			t.Fatalf("before %s: %v", round, err)
		}
		l, release, err := listen(t.Context(), path, lock, []*os.File{fileOf(t, owned)})
		if err != nil {
			t.Fatal(err)
		}
		served, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		served.Close()
		waiting.Close()
		l.Close()
		release()
	}
}

func TestPassedSocketThatDoesNotFitIsRefusedWithTheUnitToChange(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	path := filepath.Join(dir, "d.sock")
	other := filepath.Join(dir, "other.sock")
	for name, passed := range map[string]func(t *testing.T) []*os.File{
		"2 sockets": func(t *testing.T) []*os.File {
			l := systemdListens(t, path)
			return []*os.File{fileOf(t, l), fileOf(t, l)}
		},
		"the socket " + other + "; the config file has " + path: func(t *testing.T) []*os.File {
			return []*os.File{fileOf(t, systemdListens(t, other))}
		},
		"a datagram socket": func(t *testing.T) []*os.File {
			c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "datagrams"), Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			return []*os.File{fileOf(t, c)}
		},
		"a seqpacket socket": func(t *testing.T) []*os.File {
			l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: other, Net: "unixpacket"})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			return []*os.File{fileOf(t, l)}
		},
		"a TCP socket": func(t *testing.T) []*os.File {
			l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			return []*os.File{fileOf(t, l)}
		},
		"a socket that does not listen": func(t *testing.T) []*os.File { // Accept=yes
			pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { syscall.Close(pair[1]) })
			return []*os.File{os.NewFile(uintptr(pair[0]), "pair")}
		},
		"no socket": func(t *testing.T) []*os.File {
			f, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			return []*os.File{f}
		},
	} {
		want := "a descriptor that is not a listening unix stream socket"
		if strings.Contains(name, "sockets") || strings.Contains(name, "config file") {
			want = name
		}
		t.Run(name, func(t *testing.T) {
			_, _, err := listen(t.Context(), path, path+".lock", passed(t))
			if gpreempt.ReasonOf(err) != gpreempt.ReasonSocketPassed || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "gpreemptd.socket") {
				t.Errorf("got %v", err)
			}
		})
	}
}

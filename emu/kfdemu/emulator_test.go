package kfdemu

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/seccomp"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// start returns a machine in this process, and what happens on it.
func start(t *testing.T, cfg Config) (*Emulator, func() []string) {
	t.Helper()
	if err := seccomp.Supported(); err != nil {
		t.Skip("no emulated machine here: ", err)
	}
	var (
		mu     sync.Mutex
		events []string
	)
	if cfg.Machine == "" {
		cfg.Machine = "mi210"
	}
	cfg.Event = func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, strings.TrimSpace(strings.Join([]string{string(e.Kind), e.Op, e.Errno, e.Text}, " ")))
	}
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string(nil), events...)
	}
}

// here runs f on a thread of this process that is on the machine: files of /sys are the
// host's, and other threads answer its calls.
func here(t testing.TB, e *Emulator, f func()) {
	t.Helper()
	var listener *seccomp.Listener
	var err error
	seccomp.OwnThread(func() {
		var fd int
		if fd, err = seccomp.Install(seccomp.Filter(ioctlTypes...)); err == nil {
			listener = seccomp.NewListener(fd, e.call)
			f()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestProfileDecidesTheVersion(t *testing.T) {
	for profile, want := range map[string]kfd.Version{
		"6.5": {Major: 1, Minor: 13}, "6.12": {Major: 1, Minor: 17}, "7.2": {Major: 1, Minor: 23},
	} {
		e, _ := start(t, Config{Profile: profile})
		here(t, e, func() {
			d, err := kfd.Open()
			if err != nil {
				t.Errorf("%s: %v", profile, err)
				return
			}
			if got := d.Version(); got != want {
				t.Errorf("%s: %v, want %v", profile, got, want)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestOnlyTheDevicesAreEmulated(t *testing.T) {
	e, _ := start(t, Config{})
	file := filepath.Join(t.TempDir(), "kfd")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := map[string]error{}
	here(t, e, func() {
		for _, name := range []string{"/dev/kfd", "/dev/../dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129", file, "/dev/kfd2", kfdabi.KmapPath} {
			fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0)
			got[name] = err
			if err == nil {
				var st unix.Stat_t
				if err := errors.Join(unix.Fstat(fd, &st), unix.Close(fd)); err != nil {
					t.Error(err)
				}
				if device := st.Mode&unix.S_IFMT == unix.S_IFCHR; device != (name != file) {
					t.Errorf("%s is of mode %#o", name, st.Mode)
				}
			}
		}
	})
	want := map[string]error{
		"/dev/kfd": nil, "/dev/../dev/kfd": nil, "/dev/dri/renderD128": nil, file: nil,
		"/dev/dri/renderD129": unix.ENOENT, "/dev/kfd2": unix.ENOENT, kfdabi.KmapPath: unix.ENOENT,
	}
	same := cmp.Comparer(func(a, b error) bool { return errors.Is(a, b) || errors.Is(b, a) })
	if diff := cmp.Diff(want, got, same); diff != "" {
		t.Error(diff)
	}
}

func TestEmulatedFileCannotBeMadeShorter(t *testing.T) {
	e, _ := start(t, Config{})
	here(t, e, func() {
		fd, err := unix.Open("/dev/kfd", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		if err := unix.Ftruncate(fd, 0); !errors.Is(err, unix.EPERM) {
			t.Errorf("ftruncate: %v, want EPERM", err)
		}
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	})
}

func TestFaultsOfOpenReachTheProgram(t *testing.T) {
	e, events := start(t, Config{})
	fault := e.Inject(Fault{Op: "open", Nth: 1, Errno: unix.EINVAL})
	here(t, e, func() {
		if _, err := unix.Open("/dev/kfd", unix.O_RDWR, 0); !errors.Is(err, unix.EINVAL) {
			t.Errorf("open: %v, want EINVAL", err)
		}
		fd, err := unix.Open("/dev/kfd", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Close(fd)
		}
		if err != nil {
			t.Errorf("the second open: %v", err)
		}
	})
	if fault.Hits() != 1 {
		t.Errorf("it struck %d times", fault.Hits())
	}
	want := []string{"fault open EINVAL", "call open EINVAL /dev/kfd", "process", "call open  /dev/kfd"}
	if diff := cmp.Diff(want, events()); diff != "" {
		t.Error(diff)
	}
}

func TestMachineThatCannotBeIsRefused(t *testing.T) {
	for want, cfg := range map[string]Config{
		"there is no simulated GPU \"mi1\"": {Machine: "mi1"},
		"no driver profile \"5.0\"":         {Machine: "mi210", Profile: "5.0"},
		"GPUs":                              {Machine: "mi210", GPUs: 1000},
	} {
		e, err := New(cfg)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want it to say %q", cfg, err, want)
		}
		if e != nil {
			t.Errorf("%+v gave a machine: %v", cfg, e.Close())
		}
	}
}

// BenchmarkOpenElsewhere is what a program pays that opens a file for writing on the
// machine, next to one that is not on it.
func BenchmarkOpenElsewhere(b *testing.B) {
	e, err := New(Config{Machine: "mi210"})
	if err != nil {
		b.Skip(err)
	}
	defer e.Close()
	name := filepath.Join(b.TempDir(), "file")
	open := func(b *testing.B) {
		for b.Loop() {
			fd, err := unix.Open(name, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
			if err != nil {
				b.Fatal(err)
			}
			if err := unix.Close(fd); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("native", open)
	b.Run("emulated", func(b *testing.B) {
		here(b, e, func() { open(b) })
	})
}

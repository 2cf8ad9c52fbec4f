package criu

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// sleeper starts a real process that waits for the end of its input, with file as
// descriptor 3.
func sleeper(t *testing.T, file *os.File) (gpreempt.ProcessKey, *exec.Cmd) {
	t.Helper()
	// The signal comes when the thread ends that started it: not one that a tracer
	// may get, which ends with the trace.
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	cmd := exec.CommandContext(context.Background(), "cat")
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	cmd.ExtraFiles = []*os.File{file}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Skipf("needs the program cat: %v", err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: int32(cmd.Process.Pid)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	return p.Key(), cmd
}

func openFile(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// /dev/zero stands for the driver's device here, so that what was taken shows.
func TestDescriptorsAreTakenFromARealProcess(t *testing.T) {
	target, cmd := sleeper(t, openFile(t, "/dev/zero"))
	p, err := machine{"/dev/zero"}.Open(target)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	fd, err := p.Take(3)
	if errors.Is(err, unix.EPERM) {
		t.Skipf("needs the right to trace processes: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	taken := os.NewFile(uintptr(fd), "taken")
	defer taken.Close()
	got := []byte("not zero")
	if _, err := io.ReadFull(taken, got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(make([]byte, 8), got); diff != "" {
		t.Error(diff)
	}
	if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, error %v: children would inherit it", flags, err)
	}
	if _, err := p.Take(99); !errors.Is(err, unix.EBADF) {
		t.Errorf("error %v, want %v", err, unix.EBADF)
	}
	if tracer, _, err := p.Tracer(); tracer != "" || err != nil {
		t.Errorf("%q, error %v", tracer, err)
	}

	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	for name, call := range map[string]func() error{
		"Take":        func() error { _, err := p.Take(3); return err },
		"Descriptors": func() error { _, err := p.Descriptors(); return err },
		"Tracer":      func() error { _, _, err := p.Tracer(); return err },
		"Open":        func() error { _, err := machine{}.Open(target); return err },
	} {
		if err := call(); !errors.Is(err, mechanism.ErrGone) {
			t.Errorf("%s after the exit: error %v, want %v", name, err, mechanism.ErrGone)
		}
	}
}

func TestOtherProcessWithThePidIsNotOpened(t *testing.T) {
	target, _ := sleeper(t, openFile(t, os.DevNull))
	target.Start--
	if _, err := (machine{}).Open(target); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("error %v, want %v", err, mechanism.ErrGone)
	}
}

// /dev/null stands for the driver's device here.
func TestTheDriverIsFoundByItsDeviceNumber(t *testing.T) {
	name := "/dev/gpreempt-test-" + strconv.Itoa(os.Getpid())
	var null unix.Stat_t
	if err := unix.Stat(os.DevNull, &null); err != nil {
		t.Fatal(err)
	}
	alias := os.DevNull
	if err := unix.Mknod(name, unix.S_IFCHR|0o600, int(null.Rdev)); err != nil {
		t.Logf("the device number is left out: making a device file: %v", err)
	} else {
		t.Cleanup(func() { _ = os.Remove(name) })
		if f, err := os.OpenFile(name, os.O_RDWR, 0); err != nil {
			t.Logf("the device number is left out: opening a device file: %v", err)
		} else {
			_ = f.Close()
			alias = name
		}
	}
	target, _ := sleeper(t, openFile(t, alias))
	p, err := machine{os.DevNull}.Open(target)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	got, err := p.Descriptors()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(got, 3) || slices.Contains(got, 0) { // 0 is a pipe
		t.Errorf("descriptors %v, want 3 among them and not 0", got)
	}
}

// A process can give any file the name of the driver, and reuse a number for another
// file after the number was read.
func TestOtherFilesByTheNameOfTheDriverAreNotTaken(t *testing.T) {
	name := "/dev/gpreempt-test-file-" + strconv.Itoa(os.Getpid())
	file, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Skipf("needs to make a file in /dev: %v", err)
	}
	defer file.Close()
	t.Cleanup(func() { _ = os.Remove(name) })
	for what, c := range map[string]struct {
		file   *os.File
		device string
		want   error
	}{
		"regular file":         {file, os.DevNull, unix.EBADF},
		"another device":       {openFile(t, "/dev/zero"), "/dev/full", unix.EBADF},
		"no driver here":       {openFile(t, "/dev/zero"), "/dev/gpreempt-none", unix.ENOENT},
		"driver is no device":  {file, name, nil},
		"descriptor not there": {nil, os.DevNull, unix.EBADF},
	} {
		t.Run(what, func(t *testing.T) {
			target, _ := sleeper(t, c.file)
			p, err := machine{c.device}.Open(target)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			before := descriptors(t)
			fd, err := p.Take(3)
			if errors.Is(err, unix.EPERM) {
				t.Skipf("needs the right to trace processes: %v", err)
			}
			if err == nil || c.want != nil && !errors.Is(err, c.want) || errors.Is(err, unix.EBADF) != errors.Is(c.want, unix.EBADF) {
				t.Errorf("descriptor %d, error %v, want %v", fd, err, c.want)
			}
			if diff := cmp.Diff(before, descriptors(t)); diff != "" {
				t.Errorf("descriptors of this program (-before +after):\n%s", diff)
			}
			if got, _ := p.Descriptors(); slices.Contains(got, 3) {
				t.Errorf("descriptors %v, want 3 not among them", got)
			}
		})
	}
}

// descriptors returns what this program has open.
func descriptors(t *testing.T) map[string]string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	open := map[string]string{}
	for _, e := range entries {
		// That of the directory has been closed again.
		if link, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			open[e.Name()] = link
		}
	}
	return open
}

func TestCapabilitiesAreThoseOfThisProgram(t *testing.T) {
	got, err := machine{}.Capabilities()
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 && got == 0 {
		t.Error("root has none")
	}
}

// With the real tracer and the real kernel, on a process that does not use a GPU.
func TestRealProcessWithoutTheDriverIsRefused(t *testing.T) {
	target, _ := sleeper(t, openFile(t, os.DevNull))
	m := New(Config{
		Sys: kfd.Kernel(), Journal: memory{}, Log: zap.NewNop(),
		Host: machine{"/dev/full"}, // stands for a driver that it does not use
		Attach: func(ctx context.Context, pid int32, start uint64) (Thread, error) {
			return proc.Trace(ctx, pid, start)
		},
	})
	_, err := m.Attach(t.Context(), target)
	if _, denied := errors.AsType[*proc.DeniedError](err); denied {
		t.Skipf("needs the right to trace processes: %v", err)
	}
	if !errors.Is(err, errNoContext) {
		t.Errorf("error %v, want %v", err, errNoContext)
	}
	if m.Probe(t.Context(), target).Usable() {
		t.Error("the probe reports that it is usable")
	}
	p, err := machine{}.Open(target)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if tracer, _, err := p.Tracer(); tracer != "" || err != nil {
		t.Errorf("%q, error %v", tracer, err)
	}
}

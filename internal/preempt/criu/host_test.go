package criu

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/preempt"
	"github.com/gpreempt/gpreempt/internal/tracer"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// sleeper starts a real process that waits for the end of its input, with file as
// descriptor 3.
func sleeper(t *testing.T, file *os.File) (gpreempt.ProcessKey, *exec.Cmd) {
	t.Helper()
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
	text, err := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	stat, err := discovery.ParseProcStat(text)
	if err != nil {
		t.Fatal(err)
	}
	return gpreempt.ProcessKey{PID: stat.PID, Start: stat.Start}, cmd
}

func openFile(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestDescriptorsAreTakenFromARealProcess(t *testing.T) {
	file := openFile(t, t.TempDir()+"/file", os.O_RDWR|os.O_CREATE)
	target, cmd := sleeper(t, file)
	p, err := machine{kfd.DevicePath}.Open(target)
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
	if _, err := taken.WriteString("by us"); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(openFile(t, file.Name(), os.O_RDONLY))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff("by us", string(got)); diff != "" {
		t.Error(diff)
	}
	if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, error %v: children would inherit it", flags, err)
	}
	if _, err := p.Take(99); !errors.Is(err, unix.EBADF) {
		t.Errorf("error %v, want %v", err, unix.EBADF)
	}
	if tracing, err := p.Tracer(); tracing != 0 || err != nil {
		t.Errorf("traced by %d, error %v", tracing, err)
	}

	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	for name, call := range map[string]func() error{
		"Take":        func() error { _, err := p.Take(3); return err },
		"Descriptors": func() error { _, err := p.Descriptors(); return err },
		"Tracer":      func() error { _, err := p.Tracer(); return err },
		"Open":        func() error { _, err := machine{}.Open(target); return err },
	} {
		if err := call(); !errors.Is(err, preempt.ErrGone) {
			t.Errorf("%s after the exit: error %v, want %v", name, err, preempt.ErrGone)
		}
	}
}

func TestOtherProcessWithThePidIsNotOpened(t *testing.T) {
	target, _ := sleeper(t, openFile(t, os.DevNull, os.O_RDWR))
	target.Start--
	if _, err := (machine{}).Open(target); !errors.Is(err, preempt.ErrGone) {
		t.Errorf("error %v, want %v", err, preempt.ErrGone)
	}
}

// /dev/null stands for the driver's device here.
func TestTheDriverIsFoundByNameAndByDeviceNumber(t *testing.T) {
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
	target, _ := sleeper(t, openFile(t, alias, os.O_RDWR))
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
	target, _ := sleeper(t, openFile(t, os.DevNull, os.O_RDWR))
	m := New(Config{
		Sys: kfd.Kernel(), Journal: memory{}, Log: zap.NewNop(),
		Attach: func(ctx context.Context, pid int32, start uint64) (Thread, error) {
			return tracer.Attach(ctx, pid, start)
		},
	})
	_, err := m.Attach(t.Context(), target)
	if _, denied := errors.AsType[*tracer.DeniedError](err); denied {
		t.Skipf("needs the right to trace processes: %v", err)
	}
	if !errors.Is(err, errNoContext) {
		t.Errorf("error %v, want %v", err, errNoContext)
	}
	if m.Probe(t.Context(), target).Usable() {
		t.Error("the probe says that it can be used")
	}
	p, err := machine{}.Open(target)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if tracing, err := p.Tracer(); tracing != 0 || err != nil {
		t.Errorf("it is still traced, by %d, error %v", tracing, err)
	}
}

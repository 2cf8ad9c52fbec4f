package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/criu"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// job is a process that has opened the driver, and has a descriptor of NVIDIA's device: with O_PATH,
// because the guest has no driver for it.
func job() int {
	driver, err := os.OpenFile(kfd.DevicePath, os.O_RDWR, 0)
	if err == nil {
		_, err = unix.Open(nvrm.ControlPath, unix.O_PATH, 0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM)
	<-ended
	_ = driver.Close() // nothing was done with it
	return 0
}

// sandboxed does in the sandbox of the service what the mechanisms do, with the real
// driver and the processes whose ids are the arguments, a job first, and what nobody
// may. It prints what goes wrong.
func sandboxed(pids []string) int {
	var wrong []error
	check := func(what string, err error) {
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", what, err))
		}
	}
	for i, pid := range pids {
		key, err := keyOf(pid)
		check("/proc of "+pid, err)
		check("dbgtrap on "+pid, holdByDebugger(key))
		if i == 0 { // the other has not opened the driver
			check("criu on "+pid, holdByCheckpoint(key))
			check("nvchannels on "+pid, copyOfControl(key))
		}
		_, err = os.ReadFile("/proc/" + pid + "/maps")
		check("maps of "+pid, err)
	}
	for name, flags := range map[string]int{
		"/dev/kmsg": os.O_RDONLY | syscall.O_NONBLOCK, "/sys/kernel/debug/kfd/rls": os.O_RDONLY,
		"/sys/fs/cgroup/system.slice/job.service/cgroup.freeze": os.O_WRONLY,
	} {
		f, err := os.OpenFile(name, flags, 0)
		check("open", err)
		_ = f.Close() // nil when there was none
	}
	if _, err := unix.Open(nvrm.ControlPath, unix.O_RDWR, 0); !errors.Is(err, unix.ENXIO) { // EPERM without the right
		wrong = append(wrong, fmt.Errorf("open %s: %w, want ENXIO: the guest has no driver for it", nvrm.ControlPath, err))
	}
	for _, name := range []string{"/etc/motd", "/sys/kernel/debug/kfd/hang_hws", "/proc/sys/kernel/sysrq", "/dev/vda", "/dev/ttyS0"} {
		f, err := os.OpenFile(name, os.O_WRONLY, 0)
		if err == nil {
			_ = f.Close()
			wrong = append(wrong, fmt.Errorf("%s can be written", name))
		}
	}
	if err := syscall.Mount("none", "/mnt", "tmpfs", 0, ""); err == nil {
		wrong = append(wrong, errors.New("it can mount"))
	}
	if err := syscall.Sethostname([]byte("x")); err == nil {
		wrong = append(wrong, errors.New("it can name the host"))
	}
	if err := errors.Join(wrong...); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func keyOf(pid string) (gpreempt.ProcessKey, error) {
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return gpreempt.ProcessKey{}, err
	}
	stat, err := discovery.ParseProcStat(text)
	return gpreempt.ProcessKey{PID: stat.PID, Start: stat.Start}, err
}

func holdByDebugger(key gpreempt.ProcessKey) error {
	device, err := kfd.Open()
	if err != nil {
		return err
	}
	m := dbgtrap.New(dbgtrap.Config{
		Device: device, Log: zap.NewNop(),
		Attach: func(ctx context.Context, pid int32, start uint64) (dbgtrap.Thread, error) {
			t, err := proc.Trace(ctx, pid, start)
			if err != nil {
				return nil, err
			}
			return t, nil
		},
	})
	return errors.Join(hold(m, key), device.Close())
}

func holdByCheckpoint(key gpreempt.ProcessKey) error {
	j, err := mechanism.OpenJournal("/tmp/journal")
	if err != nil {
		return err
	}
	m := criu.New(criu.Config{
		Sys: kfd.Kernel(), Journal: j, Log: zap.NewNop(),
		Attach: func(ctx context.Context, pid int32, start uint64) (criu.Thread, error) {
			t, err := proc.Trace(ctx, pid, start)
			if err != nil {
				return nil, err
			}
			return t, nil
		},
	})
	err = hold(m, key)
	if errors.Is(err, syscall.ENODEV) { // the driver's word for a process without a GPU, after it has looked at its rights
		err = nil
	}
	return errors.Join(err, j.Close())
}

// copyOfControl copies the descriptor of NVIDIA's device from a process, as each call of nvchannels does.
func copyOfControl(key gpreempt.ProcessKey) error {
	p, err := nvrm.Kernel().Open(key)
	if err != nil {
		return err
	}
	defer p.Close()
	fds, err := p.Files()
	if err != nil {
		return err
	}
	if len(fds) != 1 {
		return fmt.Errorf("%d descriptors of %s, want 1", len(fds), nvrm.ControlPath)
	}
	f, err := p.Copy(fds[0])
	if err != nil {
		return err
	}
	return f.Close()
}

func hold(m mechanism.Mechanism, key gpreempt.ProcessKey) error {
	ctx, cancel := context.WithTimeout(context.Background(), guestTimeout)
	defer cancel()
	s, err := m.Attach(ctx, key)
	if err != nil {
		return err
	}
	return errors.Join(s.Suspend(ctx, nil), s.Resume(ctx), s.Close())
}

func TestGuestSandboxLetsTheMechanismsWorkAndLittleElse(t *testing.T) {
	inGuest(t)
	loadDriver(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	must(t, "mknod", nvrm.ControlPath, "c", "195", "255")
	must(t, "systemd-run", "--unit=job", "--setenv="+roleEnv+"=job", self)
	must(t, "systemd-run", "--unit=other", "-p", "User=nobody", "sleep", "infinity")
	var pids []string
	for _, unit := range []string{"job.service", "other.service"} {
		pids = append(pids, strings.TrimSpace(must(t, "systemctl", "show", "--value", "-p", "MainPID", unit)))
	}
	eventually(t, "the job has opened the devices", nowAndThen, func() bool {
		key, err := keyOf(pids[0])
		return err == nil && copyOfControl(key) == nil
	})
	shipped, err := os.ReadFile("/usr/lib/systemd/system/" + service)
	if err != nil {
		t.Fatal(err)
	}
	unit := "[Service]\nType=oneshot\nStandardOutput=file:/run/sandbox.out\nEnvironment=" + roleEnv + "=sandboxed\nExecStart=" + self + " " + strings.Join(pids, " ") + "\n"
	_, hardening, found := strings.Cut(string(shipped), "# --- Rights.")
	if !found {
		t.Fatal("the unit has no section of rights")
	}
	hardening, _, _ = strings.Cut(hardening, "[Install]")
	unit += "#" + hardening + "DeviceAllow=" + nvrm.ControlPath + " rw\n" // docs/nvidia.md
	write(t, "/run/systemd/system/sandbox.service", unit)
	must(t, "systemctl", "daemon-reload")
	began := time.Now()
	status, _ := command(t, "systemctl", "start", "sandbox.service")
	if out, err := os.ReadFile("/run/sandbox.out"); status != 0 || err != nil {
		_, said := command(t, "journalctl", "--no-pager", "-n", "30", "-u", "sandbox.service")
		t.Errorf("status %d: %s\n%v\n%s", status, out, err, said)
	}
	t.Logf("sandboxed for %.2f s", time.Since(began).Seconds())
	must(t, "systemctl", "stop", "job.service", "other.service")
}

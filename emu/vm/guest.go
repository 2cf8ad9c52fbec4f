package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// output is the serial port the host reads; the kernel writes to the first.
const output = "/dev/ttyS1"

// inGuest runs this program as part of a guest, and reports whether it is one: as the
// first process it does what the manifest says and powers the machine off, as the child
// of that process it runs the tests.
func inGuest() bool {
	switch {
	case os.Getpid() == 1:
		err := first()
		unix.Sync()
		fmt.Fprintln(os.Stderr, "init: power off:", errors.Join(err, unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)))
	case os.Getppid() == 1 && len(os.Args) == 2 && os.Args[1] == StewardArg:
		if err := steward(); err != nil {
			fmt.Fprintln(os.Stderr, "init: steward:", err)
			os.Exit(1)
		}
	default:
		return false
	}
	return true
}

// first is the first process: it prepares the machine and reaps its children until
// the steward has ended.
func first() error {
	m, err := readManifest() // without one, the machine is left unchanged
	if err != nil {
		return err
	}
	if err := mounts(); err != nil {
		return err
	}
	out, err := openOutput()
	if err != nil {
		return err
	}
	time.AfterFunc(m.Limit, func() {
		fmt.Fprintln(os.Stderr, "init: time limit reached:", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
	})
	if err := raw(out); err != nil {
		return err
	}
	if err := prepare(m); err != nil {
		return errors.Join(err, m.WriteFailure(out, err))
	}
	if m.Root != "" {
		err := handOver(m.Root)
		return errors.Join(err, m.WriteFailure(out, err))
	}
	steward, err := os.StartProcess("/init", []string{"/init", StewardArg}, &os.ProcAttr{
		Dir: "/", Files: []*os.File{nil, os.Stderr, os.Stderr}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return err
	}
	for {
		pid, err := unix.Wait4(-1, nil, 0, nil)
		if pid == steward.Pid {
			return steward.Release()
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for the steward: %w", err)
		}
	}
}

func readManifest() (Manifest, error) {
	var m Manifest
	text, err := os.ReadFile(ManifestPath)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("%s: %w", ManifestPath, err)
	}
	return m, nil
}

func openOutput() (*os.File, error) { return os.OpenFile(output, os.O_RDWR|unix.O_NOCTTY, 0) }

// raw turns off output processing and echo on the port.
func raw(port *os.File) error {
	t, err := unix.IoctlGetTermios(int(port.Fd()), unix.TCGETS)
	if err != nil {
		return fmt.Errorf("%s: %w", output, err)
	}
	t.Oflag &^= unix.OPOST
	t.Lflag &^= unix.ECHO | unix.ICANON
	return unix.IoctlSetTermios(int(port.Fd()), unix.TCSETS, t)
}

func mounts() error {
	for _, m := range []struct{ dir, kind string }{
		{"/proc", "proc"},
		{"/sys", "sysfs"},
		{"/dev", "devtmpfs"},
		{"/sys/kernel/debug", "debugfs"},
		{"/tmp", "tmpfs"},
		{"/run", "tmpfs"},
		{"/sys/fs/cgroup", "cgroup2"},
	} {
		if err := os.MkdirAll(m.dir, 0o755); err != nil { //nolint:gosec // mount points, as everywhere
			return err
		}
		if err := unix.Mount(m.kind, m.dir, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.dir, err)
		}
	}
	return nil
}

func prepare(m Manifest) error {
	for _, module := range m.Modules {
		f, err := os.Open(module.Path)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), module.Params, 0)
		_ = f.Close() // read only
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", module.Path, err)
		}
		// Free its memory: it is part of the initramfs.
		if err := os.Remove(module.Path); err != nil {
			return err
		}
	}
	for _, path := range m.Need {
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("with the modules loaded: %w", err)
		}
	}
	return nil
}

// steward runs the programs one after the other, each in its own process group. The
// kernel treats children of the first process as orphaned process groups and ignores
// terminal stop signals for them; children of the steward behave as on any machine.
func steward() error {
	m, err := readManifest()
	if err != nil {
		return err
	}
	out, err := openOutput()
	if err != nil {
		return err
	}
	if err := raw(out); err != nil { // systemd has changed the port's settings
		return err
	}
	for i, p := range m.Programs {
		cmd := exec.Command(p.Path, p.Args...) //nolint:gosec,noctx // the host says what runs; the machine ends with the init
		cmd.Dir, cmd.Env = p.Dir, p.Env
		cmd.Stdout, cmd.Stderr = out, out
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			return errors.Join(err, m.WriteFailure(out, err))
		}
		if err := m.WriteResult(out, i, cmd.ProcessState.ExitCode()); err != nil {
			return err
		}
	}
	return m.WriteEnd(out)
}

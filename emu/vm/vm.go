package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"time"
)

// MissingError names what the host lacks to boot a guest: a reason to skip, not a
// failure.
type MissingError struct {
	What   string // what was looked for
	Remedy string // what to do about it
}

// Error says what is missing and what to do.
func (e *MissingError) Error() string { return e.What + ": " + e.Remedy }

const qemu = "qemu-system-x86_64"

// Guest is one boot of a machine with one CPU, no disk and no network.
type Guest struct {
	Kernel    string        // path of the kernel image
	Initramfs string        // path of the initramfs
	Append    string        // kernel command line after the console's part
	MemoryMiB int           // at least 512
	Timeout   time.Duration // when the guest is ended from outside
	Console   string        // path the kernel's own messages are written to
	Args      []string      // more arguments for QEMU, such as disks
}

// Run boots the guest and copies its second serial port to out until it powers off.
// QEMU's exit status does not depend on the programs in the guest; their results are
// in out. An error means that the guest did not boot or did not power off.
func (g Guest) Run(ctx context.Context, out io.Writer) error {
	if err := CheckHost(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, g.Timeout, fmt.Errorf("the guest did not finish within %v; its console is in %s", g.Timeout, g.Console))
	defer cancel()
	cmd := exec.CommandContext(ctx, qemu, g.args(accelerator())...) //nolint:gosec // the caller says what to boot
	cmd.Stdout = out
	var complaints strings.Builder
	cmd.Stderr = &complaints
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", qemu, err, complaints.String())
	}
	return nil
}

// args returns QEMU's command line. One CPU on q35 boots every time; with two the kernel's
// timer check panicked under load. It is left out with one, too: a stall of the host fails it.
func (g Guest) args(accel string) []string {
	return append([]string{
		"-machine", "q35", "-cpu", "max", "-smp", "1", "-m", fmt.Sprint(g.MemoryMiB), "-accel", accel,
		"-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot",
		"-serial", "file:" + g.Console, "-serial", "stdio",
		"-kernel", g.Kernel, "-initrd", g.Initramfs,
		"-append", strings.TrimSpace("console=ttyS0 quiet panic=-1 no_timer_check " + g.Append),
	}, g.Args...)
}

// CheckHost returns a *MissingError that names what this host lacks to boot a guest.
func CheckHost() error {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return &MissingError{What: "this host is " + runtime.GOOS + "/" + runtime.GOARCH, Remedy: "the guest is amd64; run it on linux/amd64"}
	}
	if _, err := exec.LookPath(qemu); err != nil {
		return &MissingError{What: "no " + qemu, Remedy: "apt-get install qemu-system-x86"}
	}
	return nil
}

var virtualisation = regexp.MustCompile(`(?m)^flags\b.*\b(vmx|svm)\b`)

// accelerator picks hardware virtualisation only where the CPU has it: /dev/kvm
// also exists where it works for a few special kernels only.
func accelerator() string {
	const emulated = "tcg,thread=single"
	cpu, err := os.ReadFile("/proc/cpuinfo")
	if err != nil || !virtualisation.Match(cpu) {
		return emulated
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return emulated
	}
	_ = f.Close() // nothing was written
	return "kvm"
}

// errNoTrailer is an infrastructure error: the guest ended before its init reported
// that all programs had run.
var errNoTrailer = errors.New("the guest ended before its tests were complete")

// mark starts each line that the init writes. The nonce after it distinguishes these
// lines from what programs print.
const mark = "gpreempt-vm"

// Results are the exit statuses of the programs of a Manifest, in order; -1 for a
// program that a signal ended.
type Results []int

// Run boots the guest with m for its init, and copies the output of the programs
// to out. An error means that not every program's result is known.
func (m Manifest) Run(ctx context.Context, g Guest, out io.Writer) (Results, error) {
	r, w := io.Pipe()
	booted := make(chan error, 1)
	go func() {
		err := g.Run(ctx, w)
		booted <- err
		_ = w.Close() // never fails
	}()
	results, ended, readErr := m.read(r, out)
	_ = r.CloseWithError(readErr)
	if err := <-booted; err != nil {
		return nil, err
	}
	if readErr != nil {
		return nil, readErr
	}
	return results, m.whole(results, ended, g.Console)
}

// whole returns nil if every program's result is known and the init wrote its end.
func (m Manifest) whole(results Results, ended bool, console string) error {
	if ended && len(results) == len(m.Programs) {
		return nil
	}
	return fmt.Errorf("%w: %d of %d ended; its console is in %s", errNoTrailer, len(results), len(m.Programs), console)
}

// read separates the init's lines from the output of programs.
func (m Manifest) read(r io.Reader, out io.Writer) (results Results, ended bool, err error) {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		text := strings.TrimRight(line, "\r\n")
		if own, ok := strings.CutPrefix(text, mark+" "+m.Nonce+" "); ok {
			var number, status int
			switch n, _ := fmt.Sscanf(own, "program %d status %d", &number, &status); {
			case own == "end":
				ended = true
			case n == 2 && number == len(results):
				results = append(results, status)
			default:
				return results, false, fmt.Errorf("the guest's init reports: %s", own)
			}
		} else if text != "" || err == nil {
			if _, err := fmt.Fprintln(out, text); err != nil {
				return results, false, err
			}
		}
		if errors.Is(err, io.EOF) {
			return results, ended, nil
		}
		if err != nil {
			return results, ended, err
		}
	}
}

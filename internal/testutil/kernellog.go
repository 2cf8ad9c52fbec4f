package testutil

import (
	"errors"
	"io"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// KernelLog is the log of the kernel from its opening on.
type KernelLog struct {
	t    testing.TB
	kmsg *os.File
}

// OpenKernelLog opens /dev/kmsg, until the end of the test.
func OpenKernelLog(t testing.TB) KernelLog {
	t.Helper()
	kmsg, err := os.OpenFile("/dev/kmsg", os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kmsg.Close() }) // read only
	if _, err := kmsg.Seek(0, io.SeekEnd); err != nil {
		t.Fatal(err)
	}
	return KernelLog{t, kmsg}
}

// Lines returns the lines since the last call that a pattern matches.
func (l KernelLog) Lines(pattern *regexp.Regexp) (lines []string) {
	l.t.Helper()
	raw, err := l.kmsg.SyscallConn()
	if err != nil {
		l.t.Fatal(err)
	}
	b := make([]byte, 8192) // a record (CONSOLE_EXT_LOG_MAX, printk.c)
	for {
		var n int
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			n, failed = syscall.Read(int(fd), b)
			return true // do not wait for more
		})
		switch err := errors.Join(err, failed); {
		case errors.Is(err, syscall.EAGAIN):
			return lines
		case errors.Is(err, syscall.EPIPE): // older messages were overwritten
			continue
		case err != nil:
			l.t.Fatal(err)
		}
		_, text, _ := strings.Cut(string(b[:n]), ";")
		line, _, _ := strings.Cut(text, "\n")
		if pattern.MatchString(line) {
			lines = append(lines, line)
		}
	}
}

package safety

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// machine has two whole GPUs and one in two partitions.
func machine() []gpreempt.GPU {
	return []gpreempt.GPU{
		{ID: 11, BDF: "0000:03:00.0"},
		{ID: 12, BDF: "0000:c5:00.0"},
		{ID: 21, BDF: "0001:03:00.0"},
		{ID: 22, BDF: "0001:03:00.1"},
	}
}

// alarms returns the alarms that a watcher raises for the records.
func alarms(records ...Record) []string {
	var got []string
	w := newWatcher("", machine, func(a Alarm) { got = append(got, fmt.Sprintf("%s %s", a.GPU, a.Pattern)) })
	for _, r := range records {
		w.check(r)
	}
	return got
}

func TestAlarmsGoToTheGPUsAtTheAddress(t *testing.T) {
	const reset = ": amdgpu: GPU reset begin!"
	tests := []struct {
		name   string
		record Record
		want   []string
	}{
		{"a whole GPU", Record{Text: "amdgpu 0000:c5:00.0" + reset}, []string{"12 gpu-reset"}},
		{"partitions", Record{Text: "amdgpu 0001:03:00.0" + reset}, []string{"21 gpu-reset", "22 gpu-reset"}},
		{"no address", Record{Text: "amdgpu: Failed to quiesce KFD"}, []string{"0 quiesce"}},
		{"KFD's own device", Record{Text: "kfd kfd: amdgpu: failed to execute runlist", Device: "c237:0"}, []string{"0 runlist"}},
		{"an unknown GPU", Record{Text: "amdgpu 0000:04:00.0" + reset}, nil},
		{"the device beside the text", Record{Text: "amdgpu: Failed to evict process queues", Device: "+pci:0000:03:00.0"}, []string{"11 evict"}},
		{"a program", Record{Facility: 1, Text: "amdgpu 0000:c5:00.0" + reset}, nil},
	}
	for _, tt := range tests {
		if diff := cmp.Diff(tt.want, alarms(tt.record)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestAnAlarmSaysWhatWasSeen(t *testing.T) {
	const text = "amdgpu 0000:c5:00.0: amdgpu: MES failed to respond to msg=REMOVE_QUEUE"
	var got []Alarm
	newWatcher("", machine, func(a Alarm) { got = append(got, a) }).check(Record{Text: text})
	want := []Alarm{{GPU: 12, Pattern: "mes-no-answer", Line: text, Issue: "ROCm/legacy-rocm-build#6273"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("alarms (-want +got):\n%s", diff)
	}
}

func TestAlarmsOfADriverWithFalseReportsAreDoubted(t *testing.T) {
	const (
		errors = "amdgpu 0000:c5:00.0: {5}socket: 0, die: 1, 2 new uncorrectable hardware errors detected in umc block"
		fatal  = "amdgpu 0000:c5:00.0: {5}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!"
		report = "ROCm/device-metrics-exporter#506"
	)
	for _, tt := range []struct{ driver, line, want string }{
		{"6.16.13.30300100", errors, report},
		{"6.16.13", errors, report},
		{"6.16.13", fatal, ""}, // a reset follows it
		{"6.16.6.30200000", errors, ""},
		{"6.19.4", errors, ""},
		{"", errors, ""}, // the kernel's own driver
	} {
		var got []string
		newWatcher(tt.driver, machine, func(a Alarm) { got = append(got, a.Doubt) }).check(Record{Text: tt.line})
		if diff := cmp.Diff([]string{tt.want}, got); diff != "" {
			t.Errorf("driver %q: %s: the reports that raise doubt (-want +got):\n%s", tt.driver, tt.line, diff)
		}
	}
}

func TestAnAlarmIsRaisedAtMostOnceASecond(t *testing.T) {
	at := func(d time.Duration, gpu, text string) Record {
		return Record{Time: d, Text: "amdgpu " + gpu + ": amdgpu: " + text}
	}
	const a, b, reset = "0000:03:00.0", "0000:c5:00.0", "GPU reset begin!"
	got := alarms(
		at(10*time.Second, a, reset),
		at(10*time.Second, a, "MES ring buffer is full."), // another pattern
		at(10*time.Second, b, reset),                      // another GPU
		at(10*time.Second+999*time.Millisecond, a, reset),
		at(9999*time.Millisecond, a, reset), // the clock of another CPU
		at(11*time.Second, a, reset),        // a second after the first, not after the last
		at(11*time.Second, a, "Failed to evict queue 1"),
		at(11*time.Second, a, "Failed to evict queue 2"),
	)
	want := []string{"11 gpu-reset", "11 mes-ring-full", "12 gpu-reset", "11 gpu-reset", "11 evict"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("alarms (-want +got):\n%s", diff)
	}
}

// scripted returns reads of a log: a string is a record, an error is one. Its end follows.
func scripted(script ...any) func([]byte) (int, error) {
	return func(b []byte) (int, error) {
		if len(script) == 0 {
			return -1, syscall.EAGAIN
		}
		next := script[0]
		script = script[1:]
		if err, ok := next.(error); ok {
			return -1, err
		}
		return copy(b, next.(string)), nil
	}
}

func record(seq int) string { return fmt.Sprintf("3,%d,0,-;x\n", seq) }

func TestOverwrittenRecordsAndSignalsAreSkipped(t *testing.T) {
	var got []uint64
	err := readAll(scripted(record(1), syscall.EPIPE, record(5), syscall.EINTR, syscall.EPIPE, syscall.EPIPE, record(9)),
		make([]byte, maxRecord), func(r Record) { got = append(got, r.Seq) })
	if diff := cmp.Diff([]uint64{1, 5, 9}, got); diff != "" || err != nil {
		t.Errorf("%v, records (-want +got):\n%s", err, diff)
	}
}

func TestAnErrorOfTheLogIsReturned(t *testing.T) {
	for _, last := range []any{syscall.EIO, "nonsense"} {
		n := 0
		err := readAll(scripted(record(1), last), make([]byte, maxRecord), func(Record) { n++ })
		if err == nil || n != 1 {
			t.Errorf("%v: %v after %d records", last, err, n)
		}
		if errno, ok := last.(syscall.Errno); ok && !errors.Is(err, errno) {
			t.Errorf("%v does not show %v", err, errno)
		}
	}
}

// logSocket returns a log and its kernel. A socket separates records as the device does, and can
// be waited for as that.
func logSocket(t *testing.T) (log, kernel *os.File) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	log, kernel = os.NewFile(uintptr(fds[0]), "log"), os.NewFile(uintptr(fds[1]), "kernel")
	t.Cleanup(func() { _ = kernel.Close() }) // a test may have closed it
	return log, kernel
}

func TestFollowEndsWithTheContextOrTheLog(t *testing.T) {
	for _, byContext := range []bool{true, false} {
		log, kernel := logSocket(t)
		ctx, cancel := context.WithCancel(t.Context())
		seen, done := make(chan string), make(chan error, 1)
		l := NewKernelLog("", machine, func(a Alarm) { seen <- a.Line })
		go func() { done <- l.follow(ctx, log) }()
		for pid := range 3 {
			line := fmt.Sprintf("amdgpu 0000:c5:00.0: queue id 0x0 at pasid %d is reset", 1+pid)
			if _, err := kernel.WriteString("3,1,0,-;" + line + "\n"); err != nil {
				t.Fatal(err)
			}
			if got := <-seen; got != line {
				t.Errorf("%q, want %q", got, line)
			}
		}
		if byContext {
			cancel()
		} else {
			kernel.Close()
		}
		if err := <-done; (err == nil) != byContext {
			t.Errorf("by the context %v: %v", byContext, err)
		}
		if _, err := log.Stat(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("the log is still open: %v", err)
		}
		l.CatchUp() // it has nothing to read
		cancel()
	}
}

// What the driver prints in a call is in the log when the call returns, and an alarm when
// CatchUp has returned, whichever goroutine read it.
func TestCatchUpReturnsAfterTheAlarmsOfAllLines(t *testing.T) {
	log, kernel := logSocket(t)
	alarms := 0
	l := NewKernelLog("", machine, func(Alarm) { alarms++ })
	done := make(chan error, 1)
	go func() { done <- l.follow(t.Context(), log) }()
	for l.file.Load() == nil {
		runtime.Gosched()
	}
	for n := range 1000 {
		if _, err := fmt.Fprintf(kernel, "3,1,%d,-;amdgpu 0000:c5:00.0: GPU reset begin!\n", int64(n)*2e6); err != nil {
			t.Fatal(err)
		}
		l.CatchUp()
		if alarms != n+1 {
			t.Fatalf("%d alarms after %d lines", alarms, n+1)
		}
	}
	kernel.Close()
	<-done
}

func TestALogThatCannotBeOpenedIsAnErrorWithARemedy(t *testing.T) {
	dir := t.TempDir()
	regular, fifo := filepath.Join(dir, "regular"), filepath.Join(dir, "fifo")
	if err := os.WriteFile(regular, []byte(record(1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	for path, want := range map[string]error{
		filepath.Join(dir, "none"): fs.ErrNotExist,
		regular:                    os.ErrNoDeadline,
		fifo:                       syscall.ESPIPE,
	} {
		err := NewKernelLog(path, machine, func(Alarm) {}).Watch(t.Context(), "")
		if !errors.Is(err, want) || !strings.Contains(err.Error(), "CAP_SYSLOG") || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// realLog returns the kernel's log, and a way to write a line to it as a program does.
func realLog(t *testing.T) (path string, write func(string)) {
	t.Helper()
	path = "/dev/kmsg"
	out, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Skipf("needs root and %s, to write lines to it: %v", path, err)
	}
	t.Cleanup(func() { _ = out.Close() })
	return path, func(line string) {
		if _, err := out.WriteString(line); err != nil {
			t.Errorf("write to %s: %v", path, err)
		}
	}
}

// A line of a program raises no alarm, even if the program asks for the kernel's facility.
// Lines from before the log was opened are not read.
func TestAProgramCannotOpenABreakerThroughTheRealLog(t *testing.T) {
	path, write := realLog(t)
	line := func(n int) string {
		return fmt.Sprintf("amdgpu 0000:c5:00.0: amdgpu: GPU reset begin! (a test of gpreempt, pid %d, line %d; nothing is wrong)", os.Getpid(), n)
	}
	write("<6>" + line(1) + "\n")
	log, err := openKernelLog(path)
	if err != nil {
		t.Skipf("needs CAP_SYSLOG, to read %s: %v", path, err)
	}
	defer log.Close()
	write("<6>" + line(2) + "\n")
	var mine []Record
	w := newWatcher("", machine, func(a Alarm) {
		if strings.Contains(a.Line, "a test of gpreempt") {
			t.Errorf("an alarm: %+v", a)
		}
	})
	conn, err := log.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var reading error
	err = conn.Control(func(fd uintptr) {
		reading = readAll(func(b []byte) (int, error) { return syscall.Read(int(fd), b) }, make([]byte, maxRecord), func(r Record) {
			w.check(r)
			if r.Text == line(1) || r.Text == line(2) {
				mine = append(mine, r)
			}
		})
	})
	if err := errors.Join(err, reading); err != nil {
		t.Fatal(err)
	}
	if len(mine) != 1 || mine[0].Facility != 1 || mine[0].Text != line(2) {
		t.Fatalf("records %+v, want the line that was written after the log was opened", mine)
	}
	fromKernel := mine[0]
	fromKernel.Facility = 0
	if diff := cmp.Diff([]string{"12 gpu-reset"}, alarms(fromKernel)); diff != "" {
		t.Errorf("the same line from the kernel (-want +got):\n%s", diff)
	}
}

func TestWatchOfTheRealLogEndsWithTheContext(t *testing.T) {
	path, _ := realLog(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := NewKernelLog(path, machine, func(Alarm) {}).Watch(ctx, ""); errors.Is(err, fs.ErrPermission) {
		t.Skipf("needs CAP_SYSLOG, to read %s: %v", path, err)
	} else if err != nil {
		t.Error(err)
	}
}

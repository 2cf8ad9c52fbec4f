package e2e

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// says checks that a refusal holds every part of what a person needs.
func says(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("it does not say %q:\n%s", part, text)
		}
	}
}

// names lists a directory.
func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func TestStartIsRefusedForAMalformedConfig(t *testing.T) {
	t.Parallel()
	dir := testutil.TempSocketDir(t)
	text := refused(t, dir, "policy:\n  preset: strict\n bad: [\n")
	says(t, text, filepath.Join(dir, "gpreemptd.yaml")+":2", "not valid YAML", "check indentation")
	text = refused(t, dir, "policy:\n  preset: strikt\nlimits:\n  leases_per_user: 0\n")
	says(t, text, filepath.Join(dir, "gpreemptd.yaml")+":2", "policy.preset", "strikt", "strict",
		filepath.Join(dir, "gpreemptd.yaml")+":4", "limits.leases_per_user", "1 to 100000")
	if diff := cmp.Diff([]string{"gpreemptd.yaml"}, names(t, dir)); diff != "" {
		t.Errorf("not removed: %s", diff)
	}
}

func TestStartIsRefusedForAMachineThatCannotBe(t *testing.T) {
	t.Parallel()
	dir := testutil.TempSocketDir(t)
	for _, tc := range []struct {
		args  []string
		wants []string
	}{
		{[]string{"--machine", "h100"}, []string{"h100", "mi300x", "mi210"}},
		{[]string{"--gpus", "65"}, []string{"65", "1 to "}},
		{[]string{"--gpus", "-1"}, []string{"-1", "1 to "}},
		{[]string{"--gpus", "many"}, []string{"--gpus", "many"}},
		{[]string{"--job", "train"}, []string{"train", "train:10:25ms"}},
	} {
		d := launch(t, dir, "# defaults\n", tc.args...)
		d.checkExit(125)
		says(t, d.log.String(), tc.wants...)
	}
	if diff := cmp.Diff([]string{"gpreemptd.yaml"}, names(t, dir)); diff != "" {
		t.Errorf("not removed: %s", diff)
	}
}

func TestStartIsRefusedForASecondDaemon(t *testing.T) {
	t.Parallel()
	dir := testutil.TempSocketDir(t)
	first := startIn(t, dir, atOnce)
	pid := first.startOffline()
	lease := first.announce(t.Context())
	says(t, refused(t, dir, atOnce), "another gpreemptd (pid ", first.socket+".lock", "try: ", "stop that one first", "gpctl status")
	first.checkFrozen(pid)
	since := first.revision()
	first.complete(lease.GetLeaseId())
	first.awaitTarget(pid, since, running)
	if conn, err := net.Dial("unix", first.socket); err != nil {
		t.Errorf("the first daemon's socket is gone: %v", err)
	} else {
		conn.Close()
	}
	first.stopJob(pid)
}

func TestStartIsRefusedWhereAnotherProgramListens(t *testing.T) {
	t.Parallel()
	dir := testutil.TempSocketDir(t)
	other, err := net.Listen("unix", filepath.Join(dir, "gpreemptd.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	says(t, refused(t, dir, atOnce), "another program listens on "+other.Addr().String(), "try: ", "choose another path")
	conn, err := net.Dial("unix", other.Addr().String())
	if err != nil {
		t.Fatalf("the other program's socket is gone: %v", err)
	}
	conn.Close()
}

func TestStartIsRefusedWhenAFileOccupiesTheSocketPath(t *testing.T) {
	t.Parallel()
	dir := testutil.TempSocketDir(t)
	file := filepath.Join(dir, "gpreemptd.sock")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	says(t, refused(t, dir, atOnce), file+" exists and is not a socket", "try: ", "move it away")
	if text, err := os.ReadFile(file); err != nil || string(text) != "precious" {
		t.Errorf("the file holds %q, %v", text, err)
	}
	if err := os.Remove(file); err != nil { // startIn's stop looks for it
		t.Fatal(err)
	}
}

func TestStartAfterACrashTakesTheSocketOver(t *testing.T) {
	t.Parallel()
	dir := testutil.TempSocketDir(t)
	crashed := startIn(t, dir, atOnce)
	crashed.startOffline()
	crashed.kill()
	if _, err := os.Lstat(crashed.socket); err != nil {
		t.Fatalf("a crash leaves no socket: %v", err)
	}
	d := startIn(t, dir, atOnce)
	pid := d.startOffline()
	d.announce(t.Context())
	d.checkFrozen(pid)
}

// The shipped daemon is for the hardware of the host. It holds the host's one instance
// lock.
func TestDaemonWithoutKFDServesAndReportsIt(t *testing.T) {
	if _, err := os.Stat("/sys/class/kfd"); !errors.Is(err, fs.ErrNotExist) {
		t.Skip("this host has a KFD")
	}
	const lock = "/run/gpreempt/gpreemptd.lock"
	clean := canLock(t, lock)
	defer clean()
	dir := testutil.TempSocketDir(t)
	d := startIn(t, dir, atOnce, onHost)
	r := d.ctl("status")
	says(t, r.Out, "on kfd", "2 errors", "error NO_KFD: ", "error NO_MECHANISM: ", "try: load amdgpu", "kfdemu demo")
	d.check(0, "No process has GPU queues", "target", "list")
	d.check(8, "", "lease", "create", "--gpu", "1", "--ttl", "1s")
	// One daemon for each host, whatever its socket.
	says(t, refused(t, testutil.TempSocketDir(t), atOnce, onHost), "another gpreemptd (pid ", lock)
	d.stop()
}

// canLock skips the test when a daemon of the host holds the lock or the lock
// cannot be made. clean removes what was not there before.
func canLock(t *testing.T, lock string) (clean func()) {
	t.Helper()
	dir := filepath.Dir(lock)
	_, err := os.Stat(dir)
	made := errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Skipf("the host's instance lock cannot be used: %v", err)
	}
	file, err := os.OpenFile(lock, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		t.Skipf("the host's instance lock cannot be used: %v", err)
	}
	defer file.Close()
	if !tryLock(file) {
		t.Skip("a gpreemptd runs on this host")
	}
	return func() {
		if made {
			_ = os.Remove(lock)
			_ = os.Remove(dir)
		}
	}
}

// The reader of the daemon's log can stop reading. Offline work must not stay suspended
// because of that.
func TestUnreadLogBlocksNothing(t *testing.T) {
	t.Parallel()
	d := prepare(t, testutil.TempSocketDir(t), atOnce+"log:\n  level: debug\n")
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	d.process.Stderr = writer
	read := make(chan struct{})
	t.Cleanup(func() { <-read }) // after the daemon's end
	d.run()
	writer.Close()
	readAll := sync.OnceFunc(func() {
		go func() {
			defer close(read)
			defer reader.Close()
			_, _ = io.Copy(d.log, reader)
		}()
	})
	t.Cleanup(readAll) // before it, also when the test fails
	d.awaitServing()
	d.events = watchEvents(t, d.admin)
	pid := d.startOffline()
	// A pipe holds 64 KiB; each round is logged in more than ten lines.
	for range 200 {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		lease := d.announce(ctx)
		cancel()
		d.complete(lease.GetLeaseId())
	}
	d.checkRuns(pid)
	d.stopJob(pid)
	readAll()
	// The end of the log may be missing: the time to write it is bounded.
	d.signal(syscall.SIGINT)
	d.checkExit(0)
	<-read
}

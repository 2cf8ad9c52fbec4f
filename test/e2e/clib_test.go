package e2e

import (
	"bufio"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// clibSource is the C library.
const clibSource = "../../bindings/c"

// cOnline is a config for the C library, whose calls a slow machine must not refuse.
const cOnline = atOnce + `
limits:
  requests_per_user: 1000000
`

// clibNeeds are the files with which the library is built, by package.
var clibNeeds = map[string]string{
	"cc": "gcc", "make": "make", "pkg-config": "pkg-config", "protoc": "protobuf-compiler", "nanopb_generator.py": "nanopb",
	"/usr/include/pb.h": "libnanopb-dev", "/usr/include/nghttp2/nghttp2.h": "libnghttp2-dev",
	"/usr/include/google/protobuf/duration.proto": "libprotobuf-dev",
}

// buildCLibrary builds the library and the program of its tests once, with all warnings
// as errors, and returns their directory.
var buildCLibrary = sync.OnceValues(func() (string, error) {
	return filepath.Join(filepath.Dir(gpreemptd), "clib"), buildCLibraryIn(filepath.Join(filepath.Dir(gpreemptd), "clib"), "-O2")
})

func buildCLibraryIn(dir string, flags ...string) error {
	if out, err := exec.Command("make", "-C", clibSource, "BUILD="+dir, "CFLAGS=-g "+strings.Join(flags, " ")).CombinedOutput(); err != nil {
		return fmt.Errorf("make: %w\n%s", err, out)
	}
	args := append([]string{
		"-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-o", filepath.Join(dir, "driver"),
		filepath.Join(clibSource, "test", "driver.c"), "-L" + dir, "-lgpreempt", "-pthread", "-Wl,-rpath," + dir,
	}, flags...)
	if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("cc: %w\n%s", err, out)
	}
	return nil
}

// missing returns the packages of which a program or file is absent.
func missing(packages map[string]string) (absent []string) {
	for path, name := range packages {
		if !filepath.IsAbs(path) {
			if _, err := exec.LookPath(path); err == nil {
				continue
			}
		} else if _, err := os.Stat(path); err == nil {
			continue
		}
		absent = append(absent, name)
	}
	slices.Sort(absent)
	return absent
}

// clib returns the directory of the built library.
func clib(t *testing.T) string {
	t.Helper()
	if absent := missing(clibNeeds); len(absent) > 0 {
		t.Skip("the C library is not built without the packages ", strings.Join(absent, ", "))
	}
	dir, err := buildCLibrary()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// cProgram is the program of the library's tests. It runs a call for each line.
type cProgram struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// runC runs a test with the program, alone and under valgrind.
func runC(t *testing.T, test func(t *testing.T, program func(t *testing.T, socket string) *cProgram)) {
	t.Helper()
	dir := clib(t)
	for _, tool := range [][]string{nil, {"valgrind", "-q", "--leak-check=full", "--error-exitcode=99"}} {
		name := "plain"
		if tool != nil {
			name = tool[0]
		}
		t.Run(name, func(t *testing.T) {
			if absent := missing(map[string]string{"valgrind": "valgrind"}); tool != nil && len(absent) > 0 {
				t.Skip("the package valgrind is missing")
			}
			test(t, func(t *testing.T, socket string) *cProgram {
				t.Helper()
				args := append(slices.Clone(tool), filepath.Join(dir, "driver"))
				return startC(t, exec.Command(args[0], args[1:]...), socket)
			})
		})
	}
}

// startC starts the program. The test ends with its orderly end.
func startC(t *testing.T, cmd *exec.Cmd, socket string, env ...string) *cProgram {
	t.Helper()
	p := &cProgram{t: t, cmd: cmd}
	errs := &lines{}
	cmd.Env, cmd.Stderr = environment(append(env, "GPREEMPT_SOCKET="+socket)...), errs
	out, err := cmd.StdoutPipe()
	if err == nil {
		p.in, err = cmd.StdinPipe()
	}
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewScanner(out)
	// A call that blocks for longer than its bound by far ends the test.
	late := time.AfterFunc(10*timeout, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() {
		_ = p.in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the program of the C library: %v\n%s", err, errs)
		}
		late.Stop()
	})
	return p
}

// do runs a call and returns what the program writes about it.
func (p *cProgram) do(format string, args ...any) string {
	p.t.Helper()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		p.t.Fatal(err)
	}
	if !p.out.Scan() {
		p.t.Fatalf("the program ended during "+format, args...)
	}
	return p.out.Text()
}

// check runs calls, each with what the program must write.
func (p *cProgram) check(calls [][2]string) {
	p.t.Helper()
	for _, c := range calls {
		if got := p.do("%s", c[0]); got != c[1] {
			p.t.Errorf("%s: %q (%s), want %q", c[0], got, p.do("error"), c[1])
		}
	}
}

// eventually repeats a call until the program writes want.
func (p *cProgram) eventually(d *daemon, want, format string, args ...any) {
	p.t.Helper()
	d.eventually(fmt.Sprintf(format, args...)+": "+want, func() bool { return p.do(format, args...) == want })
}

func TestCLibraryAnnouncesRenewsAndCompletes(t *testing.T) {
	runC(t, func(t *testing.T, program func(*testing.T, string) *cProgram) {
		d := start(t, cOnline)
		job := d.startOffline()
		p := program(t, d.socket)
		p.check([][2]string{
			{"init", "ok"},
			{"complete", "ok"}, // an empty lease
			{"renew 1000000", "ESTALE"},
			{"online chat 10000", "ok quiet=1 suspended=1"},
		})
		d.checkFrozen(job)
		lease := d.lease(p.do("lease"))
		if lease.GetLabel() != "chat" || lease.GetClientPid() != int32(p.cmd.Process.Pid) {
			t.Errorf("the daemon has the lease %v, want that of pid %d", lease, p.cmd.Process.Pid)
		}
		p.check([][2]string{
			{"renew 20000000", "ok"},
			{"renew 20000001", "EINVAL"},
			{"complete", "ok"},
			{"complete", "ok"},
			{"renew 1000000", "ESTALE"},
			{"online chat 10001", "EINVAL quiet=0 suspended=0"},
			{"online " + strings.Repeat("x", 129) + " 0", "EINVAL quiet=0 suspended=0"},
		})
		d.checkRuns(job)
		p.check([][2]string{{"online chat 10000", "ok quiet=1 suspended=1"}, {"cleanup", "ok"}, {"renew 0", "ESTALE"}, {"complete", "ok"}})
		d.checkRuns(job) // its lease ended with the connection
	})
}

func TestCLibraryListsQueuesAndSuspendsWholeProcesses(t *testing.T) {
	runC(t, func(t *testing.T, program func(*testing.T, string) *cProgram) {
		d := start(t, strings.Replace(cOnline, "preset: strict", "preset: strict\n  max_wait: 10s", 1))
		one, two := d.startOffline(), d.mustAsk("start trainer:3:1ms").PID
		other := d.startJob("serving")
		d.eventually("the jobs and their queues are known", func() bool {
			return d.target(one).GetQueueCount() == 2 && d.target(two).GetQueueCount() == 3 && d.target(two).GetMechanism() != "" &&
				d.target(other).GetQueueCount() == 2
		})
		p := program(t, d.socket)
		queues := func(pid int32, state string, n int, comm string) (text string) {
			for i := range n {
				text += fmt.Sprintf(" %d:%d:%s:%s:", pid, i, state, comm)
			}
			return text
		}
		p.check([][2]string{
			{"all", "ok" + queues(one, "active", 2, "trainer") + queues(two, "active", 3, "trainer") + queues(other, "active", 2, "serving")},
			{"priority 7 15", "ok" + queues(other, "active", 2, "serving")},
			{"priority 8 7", "ok"},
			{fmt.Sprintf("process %d", two), "ok" + queues(two, "active", 3, "trainer")},
			{"process 999", "ESRCH"},
			{"process 0", "EINVAL"},
			{"tag OFFLINE_AI", "ok"},
			{fmt.Sprintf("status %d 1", one), "ok active=1"},
			{fmt.Sprintf("status %d 2", one), "ENOENT active=0"},

			// By process.
			{fmt.Sprintf("suspend-process 20000000 %d", one), "ok"},
			{fmt.Sprintf("suspend-process 0 %d", one), "ok"}, // again
			{fmt.Sprintf("status %d 1", one), "ok active=0"},
			{"all", "ok" + queues(one, "inactive", 2, "trainer") + queues(two, "active", 3, "trainer") + queues(other, "active", 2, "serving")},
		})
		d.checkFrozen(one)
		d.checkRuns(two)
		p.check([][2]string{
			{fmt.Sprintf("resume-process 0 %d", one), "ok"},
			{fmt.Sprintf("resume-process 0 %d", one), "ok"}, // again
			{fmt.Sprintf("suspend-process -1 %d", one), "EINVAL"},
			{fmt.Sprintf("suspend-process 999000000 %d", one), "EINVAL"}, // above the policy's max_suspend
			{fmt.Sprintf("suspend-process 0 %d", other), "EOPNOTSUPP"},   // it is not offline
			{"suspend-process 0 999", "ESRCH"},
			{"suspend-process 0 0", "EINVAL"},

			// By ids of a process: all or nothing.
			{fmt.Sprintf("suspend-ids 0 %d", one), "EOPNOTSUPP"},
			{fmt.Sprintf("suspend-ids 0,5 %d", one), "ENOENT"},
			{fmt.Sprintf("suspend-ids , %d", one), "EINVAL"},
			{"suspend-ids 0 999", "ESRCH"},
			{fmt.Sprintf("status %d 0", one), "ok active=1"},
			{fmt.Sprintf("suspend-ids 1,0,1 %d", one), "ok"},
			{fmt.Sprintf("status %d 0", one), "ok active=0"},
			{fmt.Sprintf("resume-ids 0,1 %d", one), "ok"},

			// By ids only.
			{"suspend 0,1", "ENOTUNIQ"},
			{"suspend 7", "ENOENT"},
			{"suspend 2", "EOPNOTSUPP"},
			{"suspend ,", "EINVAL"},
			{"suspend 2,1,0", "ok"},
			{fmt.Sprintf("status %d 2", two), "ok active=0"},
			{fmt.Sprintf("status %d 0", one), "ok active=1"},
			{"resume 0,1,2", "ok"},
			{fmt.Sprintf("status %d 2", two), "ok active=1"},

			{"reserve 10 80", "EOPNOTSUPP"},
			{"reserve 50 51", "EINVAL"},
		})

		// While a lease covers its GPU, a target stays suspended.
		lease := d.announce(t.Context())
		p.check([][2]string{{fmt.Sprintf("resume-process 0 %d", one), "EBUSY"}})
		d.complete(lease.GetLeaseId())

		if _, err := d.admin.SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{Drain: true}); err != nil {
			t.Fatal(err)
		}
		p.check([][2]string{{fmt.Sprintf("suspend-process 0 %d", one), "EAGAIN"}})
	})
}

func TestCLibraryIsUsedByManyThreads(t *testing.T) {
	runC(t, func(t *testing.T, program func(*testing.T, string) *cProgram) {
		d := start(t, cOnline)
		d.startOffline()
		p := program(t, d.socket)
		before := d.fds()
		p.check([][2]string{{"threads 8", "0"}})
		if after := d.fds(); after > before+2 { // a socket and a pidfd
			t.Errorf("the daemon has %d files more, want those of one connection", after-before)
		}
		if leases, err := d.admin.ListLeases(t.Context(), &gpreemptv1.ListLeasesRequest{}); err != nil || len(leases.GetLeases()) > 0 {
			t.Errorf("leases remain: %v, %v", leases, err)
		}
	})
}

func TestCLibraryHasNoDataRace(t *testing.T) {
	clib(t)
	dir := t.TempDir()
	if err := buildCLibraryIn(dir, "-O1", "-fno-analyzer", "-fsanitize=thread", "-Wl,-z,undefs"); err != nil {
		if strings.Contains(err.Error(), "tsan") {
			t.Skip("the thread sanitizer of the compiler is missing: ", err)
		}
		t.Fatal(err)
	}
	d := start(t, cOnline)
	d.startOffline()
	// The sanitizer of gcc 12 needs the addresses that programs have without randomization. A race
	// is exit status 66, which ends the test.
	p := startC(t, exec.Command("setarch", "-R", filepath.Join(dir, "driver")), d.socket)
	p.check([][2]string{{"threads 8", "0"}, {"cleanup", "ok"}, {"threads 8", "0"}})
}

func TestCLibraryAfterForkLeavesTheLeaseOfTheParent(t *testing.T) {
	runC(t, func(t *testing.T, program func(*testing.T, string) *cProgram) {
		d := start(t, cOnline)
		d.startOffline()
		p := program(t, d.socket)
		p.check([][2]string{{"online parent 10000", "ok quiet=1 suspended=1"}})
		id := p.do("lease")
		p.check([][2]string{{"fork", "EPERM ok ok ended"}, {"clone", "EPERM ok ok ended"}})
		if lease := d.lease(id); lease.GetClientPid() != int32(p.cmd.Process.Pid) {
			t.Errorf("after the end of the child the lease is %v, want that of pid %d", lease, p.cmd.Process.Pid)
		}
		p.check([][2]string{{"renew 20000000", "ok"}, {"complete", "ok"}})
	})
}

func TestCLibraryWithoutADaemon(t *testing.T) {
	runC(t, func(t *testing.T, program func(*testing.T, string) *cProgram) {
		d := start(t, cOnline)
		d.startOffline()
		p := program(t, d.socket)
		p.check([][2]string{{"online a 10000", "ok quiet=1 suspended=1"}})
		d.kill()
		p.check([][2]string{{"renew 0", "ESTALE"}, {"complete", "ok"}}) // the lease ended with the connection
		for _, refused := range [][2]string{{"init", "ECONNREFUSED"}, {"online a 10000", "ECONNREFUSED quiet=0 suspended=0"}, {"all", "ECONNREFUSED"}} {
			p.check([][2]string{refused})
		}
		again := startIn(t, filepath.Dir(d.socket), cOnline)
		again.startOffline()
		p.check([][2]string{{"online b 10000", "ok quiet=1 suspended=1"}, {"complete", "ok"}})
		p.check([][2]string{{"socket " + d.socket + "x", "ok"}, {"init", "ECONNREFUSED"}, {"socket /" + strings.Repeat("x", 107), "ok"}, {"init", "EINVAL"}})
	})
}

func TestCLibraryReturnsAtOnceWhileTheDaemonDoesNotAnswer(t *testing.T) {
	runC(t, func(t *testing.T, program func(*testing.T, string) *cProgram) {
		d := start(t, cOnline)
		d.startOffline()
		p := program(t, d.socket)
		p.check([][2]string{{"online a 10000", "ok quiet=1 suspended=1"}})
		d.signal(syscall.SIGSTOP)
		stopped := true
		defer func() {
			if stopped {
				d.signal(syscall.SIGCONT)
			}
		}()
		// The pause grows with each call that waits, so that some call finds it.
		d.eventually("a call does not wait", func() bool {
			return p.do("online b 1") == "ETIMEDOUT quiet=0 suspended=0" && strings.Contains(p.do("error"), "a moment ago")
		})
		p.check([][2]string{{"complete-once", "ETIMEDOUT"}}) // but this one does
		if text := p.do("error"); !strings.Contains(text, "within 1000000 us") {
			t.Errorf("complete while calls do not wait: %q, want that the daemon did not answer within a second", text)
		}
		d.signal(syscall.SIGCONT)
		stopped = false
		p.check([][2]string{{"complete", "ok"}})
		p.eventually(d, "ok quiet=1 suspended=1", "online c 10000")
		p.check([][2]string{{"complete", "ok"}})
	})
}

func TestCLibraryWithoutRights(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("running the library as another user needs root")
	}
	dir := clib(t)
	d := start(t, cOnline)
	cmd := exec.Command(filepath.Join(dir, "driver"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stranger, Gid: stranger}}
	p := startC(t, cmd, d.socket)
	p.check([][2]string{{"online a 10000", "EACCES quiet=0 suspended=0"}})
	for path, mode := range map[string]os.FileMode{d.socket: 0o666, filepath.Dir(d.socket): 0o755} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	p.eventually(d, "EACCES quiet=0 suspended=0", "online a 10000")
	if reason, _, _ := strings.Cut(p.do("error"), ":"); reason != "ONLINE_RIGHT_MISSING" {
		t.Errorf("the reason of the daemon is %q, want ONLINE_RIGHT_MISSING", reason)
	}
}

func TestCLibraryChangesNoSignalHandler(t *testing.T) {
	dir := clib(t)
	d := start(t, cOnline)
	p := startC(t, exec.Command(filepath.Join(dir, "driver")), d.socket)
	before := p.do("signals")
	p.check([][2]string{{"online a 10000", "ok quiet=1 suspended=0"}, {"complete", "ok"}, {"threads 4", "0"}, {"signals", before}})
}

func TestCLibraryExportsItsFunctionsOnly(t *testing.T) {
	f, err := elf.Open(filepath.Join(clib(t), "libgpreempt.so"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	soname, err := f.DynString(elf.DT_SONAME)
	if diff := cmp.Diff([]string{"libgpreempt.so.0"}, soname); diff != "" || err != nil {
		t.Errorf("soname (-want +got), %v:\n%s", err, diff)
	}
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var exported []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && elf.ST_TYPE(s.Info) == elf.STT_FUNC {
			exported = append(exported, s.Name)
		}
	}
	slices.Sort(exported)
	var declared []string
	for line := range strings.Lines(readText(t, clibSource+"/gpreempt.h") + readText(t, clibSource+"/gpreempt_poc.h")) {
		if before, _, ok := strings.Cut(line, "("); ok && strings.HasSuffix(strings.TrimSpace(line), ");") {
			fields := strings.FieldsFunc(before, func(r rune) bool { return r == ' ' || r == '*' })
			if name := fields[len(fields)-1]; strings.HasPrefix(name, "gpreempt_") && !strings.HasPrefix(line, "\t") && !strings.HasPrefix(line, " ") {
				declared = append(declared, name)
			}
		}
	}
	slices.Sort(declared)
	if diff := cmp.Diff(declared, exported); diff != "" {
		t.Errorf("exported functions (-declared +exported):\n%s", diff)
	}
}

func TestCLibraryFromPython(t *testing.T) {
	dir := clib(t)
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("the package python3 is missing")
	}
	d := start(t, cOnline)
	job := d.startOffline()
	cmd := exec.Command(python, "-B", filepath.Join(clibSource, "test", "test_gpreempt.py"))
	cmd.Env = environment("GPREEMPT_LIBRARY="+filepath.Join(dir, "libgpreempt.so"), "GPREEMPT_SOCKET="+d.socket, fmt.Sprint("GPREEMPT_TEST_PID=", job))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestCLibraryIsInstalledForPkgConfig(t *testing.T) {
	build, dir := clib(t), t.TempDir()
	if out, err := exec.Command("make", "-C", clibSource, "BUILD="+build, "PREFIX="+dir, "install").CombinedOutput(); err != nil {
		t.Fatalf("make install: %v\n%s", err, out)
	}
	cmd := exec.Command("pkg-config", "--cflags", "--libs", "gpreempt")
	cmd.Env = append(os.Environ(), "PKG_CONFIG_PATH="+filepath.Join(dir, "lib", "pkgconfig"))
	flags, err := cmd.Output()
	if err != nil {
		t.Fatalf("pkg-config: %v", err)
	}
	example := filepath.Join(dir, "inference")
	args := append([]string{"-std=gnu11", "-Wall", "-Werror", "../../examples/c/inference.c", "-o", example}, strings.Fields(string(flags))...)
	if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
		t.Fatalf("cc %v: %v\n%s", args, err, out)
	}
	d := start(t, cOnline)
	run := exec.Command(example)
	run.Env = environment("GPREEMPT_SOCKET="+d.socket, "LD_LIBRARY_PATH="+filepath.Join(dir, "lib"))
	out, err := run.CombinedOutput()
	if err != nil || strings.Count(string(out), "\n") < 10 {
		t.Errorf("the example: %v\n%s", err, out)
	}
}

package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// filesLimit sets how many descriptors the daemon may have, and returns what it was.
func (d *daemon) filesLimit(most uint64) (before uint64) {
	d.t.Helper()
	var limit unix.Rlimit
	err := unix.Prlimit(d.process.Process.Pid, unix.RLIMIT_NOFILE, nil, &limit)
	before, limit.Cur = limit.Cur, most
	if err == nil {
		err = unix.Prlimit(d.process.Process.Pid, unix.RLIMIT_NOFILE, &limit, nil)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	return before
}

// cpu is the processor time the daemon has used, in ticks of 10 ms.
func (d *daemon) cpu() (ticks int) {
	d.t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.process.Process.Pid))
	if err != nil {
		d.t.Fatal(err)
	}
	fields := strings.Fields(string(stat[strings.LastIndex(string(stat), ")")+1:]))
	var user, system int
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil { // fields 14 and 15
		d.t.Fatal(err)
	}
	return user + system
}

// procStatus returns a number of /proc/PID/status.
func (d *daemon) procStatus(key string) int {
	d.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.process.Process.Pid))
	if err != nil {
		d.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, key+":"); ok {
			n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
			if err != nil {
				d.t.Fatal(err)
			}
			return n
		}
	}
	d.t.Fatalf("/proc/PID/status has no %s", key)
	return 0
}

// Without a free descriptor the daemon resumes what is suspended and serves its
// connections; others wait, and the daemon neither spins nor fills its log.
func TestDaemonWithoutDescriptorsServesItsConnectionsAndResumes(t *testing.T) {
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	old := m.work("--queues", "2", "--duration", "500")
	d := m.start(atOnce + "mechanisms: [dbgtrap, freezer]\n")
	d.heldBy("dbgtrap", job, 2)
	d.heldBy("freezer", old, 2)
	lease := d.announce(t.Context())
	m.checkAway("dbgtrap", job, 2)
	m.checkAway("freezer", old, 2)

	logged := len(d.log.all())
	before := d.filesLimit(3)
	var waiting []net.Conn
	for range 50 {
		conn, err := net.Dial("unix", d.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		waiting = append(waiting, conn)
	}
	d.complete(lease.GetLeaseId())
	m.awaitEach(job, 2, onGPU)
	m.awaitProgress(job)
	m.awaitProgress(old)
	// What follows is answered, whatever can be suspended, and resumed.
	for range 5 {
		lease, _ := d.ask(time.Second)
		d.complete(lease)
	}
	m.awaitProgress(job)
	m.awaitProgress(old)
	const window = 2 * time.Second
	used := d.cpu()
	<-time.After(window)
	if used = d.cpu() - used; used > 50 {
		t.Errorf("idle, it used %d ms of processor time in %v", 10*used, window)
	}
	if logged = len(d.log.all()) - logged; logged > 50 {
		t.Errorf("it logged %d lines", logged)
	}
	t.Logf("without descriptors: %d ms of processor time in %v, %d lines of log", 10*used, window, logged)

	d.filesLimit(before)
	for _, conn := range waiting { // a server speaks first in HTTP/2
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			t.Errorf("a client that waited is not served: %v", err)
		}
		conn.Close()
	}
	fresh := m.work("--duration", "500", "--runtime")
	d.offlineTarget(fresh, 1)
	last, _ := d.ask(longest)
	m.awaitEach(fresh, 1, offGPU)
	d.complete(last)
	for _, w := range []*worker{fresh, job, old} {
		m.awaitProgress(w)
		w.stop()
	}
}

// The clients of a daemon with few descriptors get most of them, and not the last.
func TestConnectionsDoNotUseAllDescriptors(t *testing.T) {
	t.Parallel()
	const limit = 128
	const most = limit * 3 / 8
	d := prepare(t, testutil.TempSocketDir(t), atOnce)
	d.process.Path = "/bin/sh"
	d.process.Args = append([]string{"sh", "-c", fmt.Sprintf(`ulimit -n %d && exec "$0" "$@"`, limit), d.process.Args[0]}, d.process.Args[1:]...)
	d.run()
	d.awaitServing()
	d.events = watchEvents(t, d.admin)
	pid := d.startOffline()
	before, fds := d.status(), d.fds()
	var served []net.Conn
	for range 2 * limit {
		conn, err := net.Dial("unix", d.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if isServed(t, conn) {
			served = append(served, conn)
		}
	}
	if want := most - 1; len(served) != want { // one is the test's own
		t.Errorf("%d connections are served, want %d", len(served), want)
	}
	if got := d.fds(); got > limit-limit/10 {
		t.Errorf("%d of %d descriptors are used", got, limit)
	}
	d.eventually("the log says what to do", func() bool { return strings.Contains(d.log.String(), "LimitNOFILE") }) // it is written afterwards
	refusals := strings.Count(d.log.String(), "client connection refused")
	refused := 2*limit - len(served)
	if refusals == 0 || refusals > refused/2 {
		t.Errorf("%d of %d refusals are logged, want some and not each", refusals, refused)
	}
	d.eventually("each refusal is counted", func() bool { // after its connection is closed
		return d.refusals()[string(gpreempt.ReasonConnsTotal)] == uint64(refused)
	})
	lease := d.announce(t.Context())
	d.checkFrozen(pid)
	d.complete(lease.GetLeaseId())
	for _, conn := range served {
		conn.Close()
	}
	d.settled(before, fds)
	d.stopJob(pid)
}

// Many connections and streams of which nothing is read, and announcements as fast as
// they can be sent, under a limit of memory: once what is kept is full, more of it takes
// no more.
func TestMemoryStaysBoundedWithClientsThatReadNothing(t *testing.T) {
	t.Parallel()
	if racing() {
		t.Skip("the race detector's memory is not the daemon's: run without it")
	}
	const limit = 64 << 20
	d := prepare(t, testutil.TempSocketDir(t), atOnce+"limits:\n  requests_per_user: 1000000\n")
	d.process.Env = append(d.process.Env, fmt.Sprintf("GOMEMLIMIT=%d", limit))
	d.run()
	d.awaitServing()
	d.events = watchEvents(t, d.admin)
	pid := d.startOffline()
	fds := d.fds()
	var highs []int
	for range 4 {
		d.crowd(100)
		d.eventually("the clients are gone", func() bool { return d.fds() <= fds }) // a scan may have had files open before
		high := d.procStatus("VmHWM")
		highs = append(highs, high)
	}
	t.Logf("most resident memory after each round, limit %d KiB: %v KiB", limit>>10, highs)
	if highs[3] > highs[1]*5/4 || highs[3] > 2*limit>>10 {
		t.Errorf("most resident memory after each round: %v KiB, want it to stay", highs)
	}
	d.checkRuns(pid)
	d.stopJob(pid)
}

// crowd has so many clients connect, some of them watch all there is and read none of
// it, and the test announce and complete as fast as it can.
func (d *daemon) crowd(clients int) {
	d.t.Helper()
	ctx, cancel := context.WithCancel(d.t.Context())
	defer cancel()
	const watching = 12 // a process may have 16 streams
	for n := range clients {
		conn, err := connect(d.socket)
		if err != nil {
			d.t.Fatal(err)
		}
		defer conn.Close()
		admin := gpreemptv1.NewAdminServiceClient(conn)
		if n < watching {
			_, err = admin.WatchEvents(ctx, &gpreemptv1.WatchEventsRequest{})
		} else {
			_, err = admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
		}
		if err != nil {
			d.t.Fatal(err)
		}
	}
	session, err := d.online.Session(ctx)
	if err != nil {
		d.t.Fatal(err)
	}
	const rounds = 10_000
	failed := make(chan error, 1)
	go func() {
		for tag := range uint64(rounds) {
			if err := session.Send(announceFrame(tag, announcement())); err != nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	for range rounds {
		resp, err := session.Recv()
		if err != nil {
			d.t.Fatal(err)
		}
		if lease := resp.GetAnnounced().GetLeaseId(); lease != "" {
			d.complete(lease)
		}
	}
	if err := <-failed; err != nil {
		d.t.Error(err)
	}
}

// Calls whose answers cannot be sent, because the client has closed its window, on many
// connections: each is closed, the memory stays bounded, and others are served meanwhile.
func TestMemoryStaysBoundedWithCallsWhoseWindowIsClosed(t *testing.T) {
	t.Parallel()
	d := startForStrangers(t)
	fds, rss := d.fds(), d.kib("VmRSS")
	is := d.attack(attack{ZeroWindow: 100, Calls: 128})
	ended := make(chan struct{})
	var legitimate sync.WaitGroup
	var served []time.Duration
	legitimate.Go(func() { served = d.serveUntil(ended) })
	outcome := is()
	close(ended)
	legitimate.Wait()
	if outcome.Failure != "" {
		t.Error(outcome.Failure)
	}
	if len(served) == 0 {
		t.Error("nobody was served meanwhile")
	}
	if outcome.Accepted == 0 {
		t.Error("no connection got the beginning of an answer: the test shows nothing")
	}
	if n := d.refusals()[string(gpreempt.ReasonSlowReader)]; n != outcome.Accepted {
		t.Errorf("%d connections are closed because of their answers, want the %d that got some", n, outcome.Accepted)
	}
	d.eventually("the hostile connections leave no descriptor", func() bool { return d.fds() <= fds })
	peak := d.kib("VmHWM")
	t.Logf("RSS %d KiB before, %d KiB at most", rss, peak)
	if grown := peak - rss; grown > floodMemory && !racing() {
		t.Errorf("the daemon grew by %d KiB, want at most %d", grown, floodMemory)
	}
}

// processLimit moves the daemon to a cgroup of its own, and returns its file pids.max and how many
// threads are there.
func (d *daemon) processLimit() (file string, threads int) {
	d.t.Helper()
	dir := ""
	for _, at := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} { // of version 1, of version 2
		dir = filepath.Join(at, fmt.Sprintf("gpreempt-e2e-%d", d.process.Process.Pid))
		if err := os.Mkdir(dir, 0o755); err != nil {
			continue
		}
		d.t.Cleanup(func() { // before the daemon ends
			d.eventually("its cgroup is removed", func() bool {
				pids, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs")) // no file, no process
				for pid := range strings.FieldsSeq(string(pids)) {
					_ = os.WriteFile(filepath.Join(at, "cgroup.procs"), []byte(pid), 0) // it may have ended
				}
				return os.Remove(dir) == nil
			})
		})
		if _, err := os.Stat(filepath.Join(dir, "pids.max")); err == nil {
			break
		}
		dir = ""
	}
	if dir == "" {
		d.t.Skip("no cgroup with pids.max can be made here")
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(d.process.Process.Pid)), 0); err != nil {
		d.t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "pids.current"))
	if err == nil {
		threads, err = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	if err != nil {
		d.t.Fatal(err)
	}
	return filepath.Join(dir, "pids.max"), threads
}

// A daemon that can start no helpers says of each job that it cannot be suspended, and in every
// answer; when it can, it suspends them.
func TestDaemonWithoutProcessesSaysWhatCannotBeSuspended(t *testing.T) {
	const jobs = 4
	m := emulate(t, kfdemu.Config{})
	d := m.start(atOnce)
	file, threads := d.processLimit()
	limit := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0); err != nil {
			t.Fatal(err)
		}
	}
	limit(strconv.Itoa(threads + 4)) // for threads of its own, and less than a helper has
	for _, spare := range d.helpers() {
		if err := syscall.Kill(int(spare), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	var all []*worker
	for range jobs {
		all = append(all, m.work("--duration", "500", "--runtime"))
	}
	d.eventually("each attach was tried", func() bool { return d.status().GetCannotSuspendCount() == jobs })
	lease := d.announced()
	checkSaid(t, "without helpers", said{false, cannotSuspend, 0}, said{lease.GetQuiesced(), lease.GetReason(), lease.GetSuspendedTargets()})
	if n := lease.GetCannotSuspendTargets(); n != jobs {
		t.Errorf("the answer counts %d targets that cannot be suspended, want %d", n, jobs)
	}
	says(t, d.ctl("status").Out, "4 cannot be suspended", "CANNOT_SUSPEND: 4 targets: process ", "pids.max")
	d.complete(lease.GetLeaseId())

	began := time.Now()
	limit("max")
	for _, w := range all {
		d.offlineTarget(w, 1)
	}
	t.Logf("each job can be suspended %v after the limit was lifted", time.Since(began))
	lease = d.announced()
	checkSaid(t, "with helpers", said{true, done, jobs}, said{lease.GetQuiesced(), lease.GetReason(), lease.GetSuspendedTargets()})
	d.complete(lease.GetLeaseId())
	for _, w := range all {
		m.awaitProgress(w)
		w.stop()
	}
}

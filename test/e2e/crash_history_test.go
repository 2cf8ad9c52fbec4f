package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The environment of TestHistoryOfRandomFaults: how many faults, and the seed of a schedule
// to repeat.
const (
	historyFaultsEnv = "GPREEMPT_HISTORY_FAULTS"
	historySeedEnv   = "GPREEMPT_HISTORY_SEED"
	// shortHistory is how many there are without.
	shortHistory = 20
)

// faultKind is something that goes wrong. A fatal one leaves no daemon, or one that is to be
// replaced: it quarantines what failed for minutes.
type faultKind struct {
	name  string
	fatal bool
	// do makes it happen and removes its causes.
	do func(*historian)
}

var faultKinds = []faultKind{
	{"reload", false, func(h *historian) { h.reload() }},
	{"revoked leases", false, func(h *historian) { h.revoke() }},
	{"SIGSTOP", false, func(h *historian) { h.signal(syscall.SIGSTOP); h.rest(); h.signal(syscall.SIGCONT) }},
	{"full disk", false, func(h *historian) { h.fullDisk() }},
	{"slow driver", false, func(h *historian) {
		h.inject(kfdemu.Fault{Op: driver.TrapOp(kfd.TrapSuspendQueues), Delay: h.span(50 * time.Millisecond)})
	}},
	{"SIGKILL", true, func(h *historian) { h.signal(syscall.SIGKILL) }},
	{"SIGSTOP, then SIGKILL", true, func(h *historian) { h.signal(syscall.SIGSTOP); h.rest(); h.signal(syscall.SIGKILL) }},
	{"death of a helper", true, func(h *historian) { h.killHelper() }},
	{"death at a call", true, func(h *historian) {
		h.inject(kfdemu.Fault{Op: driver.TrapOp(h.anyOp()), Kill: kfdemu.KillCaller, After: h.r.IntN(2) == 0})
	}},
	{"error of a call", true, func(h *historian) { h.inject(kfdemu.Fault{Op: driver.TrapOp(h.anyOp()), Errno: syscall.EIO}) }},
	{"no memory", true, func(h *historian) { h.noMemory() }},
	{"other debugger", true, func(h *historian) { h.otherDebugger() }},
}

// clockJumps has the wall clock of the next daemon jump by years. It needs a daemon that is
// built for that, which takes minutes: the short form leaves it out.
var clockJumps = faultKind{"clock that jumps", true, func(h *historian) { h.signal(syscall.SIGKILL); h.jumping = true }}

// Random faults strike the daemon while clients announce and complete. What clients, faults
// and the emulated driver did is recorded, and checked by a function of the record. A long
// one ends before the -timeout, if there is one, with fewer faults.
func TestHistoryOfRandomFaults(t *testing.T) {
	faults, seed := shortHistory, uint64(time.Now().UnixNano())
	for env, set := range map[string]func(string) error{
		historyFaultsEnv: func(s string) (err error) { faults, err = strconv.Atoi(s); return err },
		historySeedEnv:   func(s string) (err error) { seed, err = strconv.ParseUint(s, 10, 64); return err },
	} {
		if text := os.Getenv(env); text != "" {
			if err := set(text); err != nil {
				t.Fatalf("%s: %v", env, err)
			}
		}
	}
	h := newHistorian(t, seed, faults > shortHistory)
	t.Logf("%d faults, seed %d: repeat them with %s=%d %s=%d", faults, seed, historyFaultsEnv, faults, historySeedEnv, seed)
	deadline, limited := t.Deadline()
	limited = limited && faults > shortHistory // a short one is never without faults
	for before := 0; h.struck() < faults && !t.Failed() && (!limited || time.Until(deadline) > 2*timeout); {
		h.round()
		if n := h.struck() / 200; n > before {
			before = n
			t.Logf("%d faults", h.struck())
		}
	}
	h.end()
}

// historian runs the load and the faults, and keeps the record.
type historian struct {
	*crashes
	// swinging is a daemon whose wall clock jumps; jumping: it is the next one.
	swinging string
	jumping  bool
	// outOfMemory counts the daemons that ended for lack of memory, before they were killed.
	outOfMemory int
	memory      string // a cgroup without memory, "" without
	kinds       []faultKind
	did         map[string]int

	mu      sync.Mutex // guards all below
	history history
	daemons *lines // what the daemons of the history wrote
	calls   int
	judged  int // entries that were judged and dropped
}

func newHistorian(t *testing.T, seed uint64, long bool) *historian {
	t.Helper()
	if reason := cannotEmulate(); reason != "" {
		t.Skip(reason)
	}
	memory := withoutMemory(t) // it is removed after the last daemon in it
	dir := testutil.TempSocketDir(t)
	mount(t, "none", dir, "tmpfs", 0, "size=1m,mode=755") // before there is a machine, whose mounts are its own
	profile := []string{"6.12", "7.2"}[seed%2]
	c := &crashes{
		t: t, m: emulate(t, kfdemu.Config{Machine: "mi300x", GPUs: 2, Profile: profile}), gpreemptd: withoutDetector(t),
		dir: dir, r: rand.New(rand.NewPCG(seed, 0)), died: map[stage]int{},
	}
	h := &historian{crashes: c, memory: memory, kinds: faultKinds, did: map[string]int{}, daemons: &lines{}}
	c.wrote = h.daemons
	if long {
		h.swinging, h.kinds = swinging(t), append(slices.Clone(faultKinds), clockJumps)
	} else {
		t.Logf("SKIP %s: make history has it", clockJumps.name)
	}
	h.configure(0)
	load := []string{"--runtime", "--duration", "700", "--occupancy", "300000", "--rate", "100"}
	c.jobs = []*worker{
		c.m.work(append(load, "--queues", "2")...),
		c.m.work(append(load, "--queues", "1", "--sdma", "--wait", "poll")...),
	}
	c.all = append(slices.Clone(c.jobs), c.m.serve(append(load, "--queues", "1")...))
	h.history = history{Jobs: []int32{c.jobs[0].PID, c.jobs[1].PID}, Online: c.all[2].PID}
	c.launch(nil)
	return h
}

func (h *historian) configure(n uint64) {
	h.t.Helper()
	// No room on a full disk: the daemon reads half a file then, which it refuses.
	err := os.WriteFile(filepath.Join(h.dir, "gpreemptd.yaml"), []byte(soakConfig(n)+everyGPU), 0o600)
	if err != nil && !errors.Is(err, syscall.ENOSPC) {
		h.t.Fatal(err)
	}
}

// add records an entry, and returns its place.
func (h *historian) add(e entry) int {
	e.At = time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.history.Entries = append(h.history.Entries, e)
	return len(h.history.Entries) - 1
}

// look records what the driver has of each process.
func (h *historian) look(what happening) entry {
	h.mu.Lock()
	began := len(h.history.Entries)
	h.mu.Unlock()
	e := entry{What: what, Began: began}
	for _, p := range h.m.Driver().Processes() {
		if !slices.ContainsFunc(h.all, func(w *worker) bool { return w.PID == p.PID }) {
			continue
		}
		if slices.ContainsFunc(p.Queues, func(q driver.QueueState) bool { return q.Running }) {
			e.Running = append(e.Running, p.PID)
		}
		if slices.ContainsFunc(p.Queues, func(q driver.QueueState) bool { return q.Suspended }) {
			e.Suspended = append(e.Suspended, p.PID)
		}
	}
	if what == driverLooked {
		h.add(e)
	}
	return e
}

func (h *historian) struck() (n int) {
	for _, count := range h.did {
		n += count
	}
	return n
}

// round has one to three faults strike under load, the last of which may be fatal, and
// waits until nothing is left of them.
func (h *historian) round() {
	h.t.Helper()
	h.m.log.forgetEvents()
	if !h.takeOver(false) {
		h.t.Fatalf("gpreemptd ended without a fault: %v", h.reign.ProcessState)
	}
	h.add(entry{What: daemonHolds})
	done := make(chan struct{})
	var clients sync.WaitGroup
	for range 2 {
		client, seed := h.reign, h.r.Uint64()
		clients.Go(func() { h.client(client, rand.New(rand.NewPCG(seed, 1)), done) })
	}
	fatal := false
	for n := 1 + h.r.IntN(3); n > 0 && !fatal; n-- {
		k := h.kinds[h.r.IntN(len(h.kinds))]
		h.rest()
		h.did[k.name]++
		h.add(entry{What: faultBegins, Fault: k.name})
		k.do(h)
		h.rest()
		if fatal = k.fatal; fatal {
			h.replace()
		}
		h.add(entry{What: faultEnds, Fault: k.name})
	}
	if !fatal {
		h.rest()
	}
	close(done)
	clients.Wait()
	h.settle()
}

// replace starts the next daemon.
func (h *historian) replace() {
	h.t.Helper()
	_ = h.reign.Process.Kill() // it may be dead
	h.buried("a fatal fault")
	was := h.gpreemptd
	if h.jumping {
		h.gpreemptd, h.jumping = h.swinging, false
	}
	h.launch(nil)
	h.gpreemptd = was
}

// settle waits until nothing is suspended, and records what the driver has then.
func (h *historian) settle() {
	h.t.Helper()
	late := time.Now().Add(timeout)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	e := h.look(leasesOver)
	for len(e.Suspended) > 0 && time.Now().Before(late) {
		<-tick.C
		e = h.look(leasesOver)
	}
	h.add(e)
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(e.Suspended) > 0 || len(h.history.Entries) > 10_000 {
		h.judgeLocked()
	}
}

// client announces and completes until it is done or its daemon is.
func (h *historian) client(d *reign, r *rand.Rand, done <-chan struct{}) {
	for {
		select {
		case <-done:
			return
		default:
		}
		h.mu.Lock()
		h.calls++
		call := h.calls
		h.mu.Unlock()
		h.add(entry{What: callAnnounced, Call: call})
		lease, err := d.online.NotifyOnline(d.exited, announcement(), grpc.WaitForReady(true))
		if err != nil {
			h.add(entry{What: callFailed, Call: call, Reason: err.Error()})
			return
		}
		h.add(entry{What: callAnswered, Call: call, Quiet: lease.GetQuiesced(), Reason: lease.GetReason().String()})
		for range 1 + r.IntN(3) {
			h.look(driverLooked)
		}
		h.add(entry{What: callCompleting, Call: call})
		if _, err := d.online.Complete(d.exited, &gpreemptv1.CompleteRequest{LeaseId: lease.GetLeaseId()}); err != nil {
			return
		}
	}
}

// end ends the processes, which prove their packets, and checks the history.
func (h *historian) end() {
	h.t.Helper()
	h.stop()
	for _, w := range h.all {
		w.tell("stop")
		done := w.await("done")
		w.awaitEnd()
		h.add(entry{What: packetsProved, PID: w.PID, OK: done.OK && w.cmd.ProcessState.Success()})
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.judgeLocked()
	h.t.Logf("%d faults %v, %d daemons out of memory, %d calls, %d entries", h.struck(), h.did, h.outOfMemory, h.calls, h.judged)
}

// judgeLocked checks the history so far and drops it. Proofs come at the end: until then
// they are given. mu is held.
func (h *historian) judgeLocked() {
	h.t.Helper()
	part := h.history
	part.Entries = slices.Clone(part.Entries)
	for _, w := range h.all {
		if !slices.ContainsFunc(part.Entries, func(e entry) bool { return e.What == packetsProved && e.PID == w.PID }) {
			part.Entries = append(part.Entries, entry{What: packetsProved, PID: w.PID, OK: true})
		}
	}
	problems := judge(part)
	h.judged += len(h.history.Entries)
	h.history.Entries = nil
	wrote := h.daemons.take()
	if len(problems) == 0 {
		return
	}
	file := filepath.Join(os.TempDir(), fmt.Sprintf("gpreempt-history-%d", os.Getpid()))
	text, err := json.MarshalIndent(part, "", " ")
	if err == nil {
		err = errors.Join(os.WriteFile(file+".json", text, 0o600), os.WriteFile(file+".log", wrote, 0o600))
	}
	h.t.Errorf("%d problems, the first %q; the history is in %s.json, what the daemons wrote in .log (%v)", len(problems), problems[:min(len(problems), 10)], file, err)
}

// The faults.

func (h *historian) span(most time.Duration) time.Duration { return between(h.r, 0, most) }

// rest waits for a random time.
func (h *historian) rest() {
	timer := time.NewTimer(h.span(20 * time.Millisecond))
	defer timer.Stop()
	<-timer.C
}

func (h *historian) signal(s syscall.Signal) {
	h.t.Helper()
	if err := h.reign.Process.Signal(s); err != nil {
		h.t.Fatalf("signal %v: %v", s, err)
	}
}

func (h *historian) reload() {
	h.configure(h.r.Uint64N(10))
	h.signal(syscall.SIGHUP)
	h.rest()
}

// revoke releases every lease, as an admin does.
func (h *historian) revoke() {
	h.t.Helper()
	admin := gpreemptv1.NewAdminServiceClient(h.reign.conn)
	list, err := admin.ListLeases(h.reign.exited, &gpreemptv1.ListLeasesRequest{})
	if err != nil {
		h.t.Errorf("list leases: %v", err)
	}
	for _, l := range list.GetLeases() {
		_, _ = admin.ReleaseLease(h.reign.exited, &gpreemptv1.ReleaseLeaseRequest{LeaseId: l.GetLeaseId()}) // it may have ended
	}
}

func (h *historian) fullDisk() {
	h.t.Helper()
	ballast := fill(h.t, h.dir)
	h.reload()
	if err := os.Remove(ballast); err != nil && !errors.Is(err, fs.ErrNotExist) {
		h.t.Fatal(err)
	}
	h.reload()
}

// inject has a fault strike one call of the daemon.
func (h *historian) inject(f kfdemu.Fault) {
	f.Caller = int32(h.reign.Process.Pid)
	i := h.m.Inject(f)
	h.rest()
	h.rest()
	i.Remove()
}

// anyOp returns an operation that a daemon uses during leases.
func (h *historian) anyOp() kfd.TrapOp {
	return []kfd.TrapOp{kfd.TrapSuspendQueues, kfd.TrapResumeQueues, kfd.TrapGetQueueSnapshot}[h.r.IntN(3)]
}

// noMemory refuses the daemon all further memory: by a cgroup, whose OOM killer ends it at
// the next page, and else by a limit of its address space, which it may not reach.
func (h *historian) noMemory() {
	h.t.Helper()
	pid := h.reign.Process.Pid
	if h.memory != "" {
		if err := os.WriteFile(filepath.Join(h.memory, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o600); err != nil {
			h.t.Fatal(err)
		}
	} else if err := unix.Prlimit(pid, unix.RLIMIT_AS, &unix.Rlimit{Cur: 1, Max: unix.RLIM_INFINITY}, nil); err != nil {
		h.t.Fatal(err)
	}
	select {
	case <-h.reign.exited.Done():
		h.outOfMemory++
	case <-time.After(100 * time.Millisecond):
	}
}

// withoutMemory makes a cgroup in which a process gets no page, and returns its directory;
// "" where that is not possible.
func withoutMemory(t *testing.T) string {
	t.Helper()
	for root, limit := range map[string]string{"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"} {
		dir, err := os.MkdirTemp(root, "gpreempt-history-") //nolint:usetesting // a cgroup, which TempDir does not make
		if err != nil {
			continue
		}
		t.Cleanup(func() {
			if err := syscall.Rmdir(dir); err != nil {
				t.Errorf("remove %s: %v", dir, err)
			}
		})
		file, err := os.OpenFile(filepath.Join(dir, limit), os.O_WRONLY, 0) // not made: then it is no cgroup
		if err != nil {
			continue
		}
		_, err = file.WriteString("4096")
		if err := errors.Join(err, file.Close()); err == nil {
			return dir
		}
	}
	return ""
}

// killHelper kills one of the daemon's helper processes, if there is one now. The daemon
// quarantines its job.
func (h *historian) killHelper() {
	h.t.Helper()
	if helpers := helpersOf(h.t, int32(h.reign.Process.Pid)); len(helpers) > 0 {
		_ = syscall.Kill(int(helpers[h.r.IntN(len(helpers))]), syscall.SIGKILL) // it may have ended
	}
}

// otherDebugger attaches a debugger to a job and ends it.
func (h *historian) otherDebugger() {
	job := h.jobs[h.r.IntN(len(h.jobs))]
	p := h.m.debug()
	defer p.end()
	if p.do("seize %d", job.PID) != "ok" {
		return // the daemon traces it
	}
	p.do("enable %d", job.PID) // it is refused, and takes the right to debug
	h.rest()
	p.do("disable %d", job.PID)
	p.do("leave")
}

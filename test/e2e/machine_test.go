package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/emu/seccomp"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// emulated is a machine with an emulated /dev/kfd and what the test runs on it.
type emulated struct {
	*kfdemu.Emulator
	t   *testing.T
	log eventsOfMachine
	// gpreemptd is the path of the daemon that is started on the machine.
	gpreemptd string
}

// eventsOfMachine is what happened on the machine: the oracle of the tests.
type eventsOfMachine struct {
	mu   sync.Mutex // guards all below
	all  []kfdemu.Event
	next chan struct{} // closed at the next event
}

func (l *eventsOfMachine) add(e kfdemu.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, e)
	close(l.next)
	l.next = make(chan struct{})
}

// since returns the events from an index on, the index after them, and what is closed
// at the next one.
func (l *eventsOfMachine) since(i int) ([]kfdemu.Event, int, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all[i:len(l.all):len(l.all)], len(l.all), l.next
}

// emulate starts a machine. The test skips where the kernel or the rights for one are
// missing.
func emulate(t *testing.T, cfg kfdemu.Config) *emulated {
	t.Helper()
	if reason := cannotEmulate(); reason != "" {
		t.Skip(reason)
	}
	m := &emulated{t: t, gpreemptd: busyHostDaemon}
	m.log.next = make(chan struct{})
	if cfg.Machine == "" && cfg.Spec.Name == "" {
		cfg.Machine = "mi300x"
	}
	cfg.Shim, cfg.Event, cfg.Dir = kfdemuBinary, m.log.add, testutil.TempSocketDir(t)
	var err error
	if m.Emulator, err = kfdemu.New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("end the emulated machine: %v", err)
		}
		for _, e := range m.events(func(e kfdemu.Event) bool { return e.Kind == kfdemu.EventTrouble || e.Kind == kfdemu.EventGPUFault }) {
			t.Errorf("the emulator had trouble: %+v", e)
		}
		if t.Failed() {
			m.dump()
		}
	})
	return m
}

// events returns those that match so far.
func (m *emulated) events(match func(kfdemu.Event) bool) (matching []kfdemu.Event) {
	all, _, _ := m.log.since(0)
	for _, e := range all {
		if match(e) {
			matching = append(matching, e)
		}
	}
	return matching
}

// await waits for an event that matches, from index on.
func (m *emulated) await(what string, from int, match func(kfdemu.Event) bool) {
	m.t.Helper()
	late := time.After(timeout)
	for {
		all, end, next := m.log.since(from)
		if slices.ContainsFunc(all, match) {
			return
		}
		from = end
		select {
		case <-next:
		case <-late:
			m.t.Fatalf("%s: not within %v", what, timeout)
		}
	}
}

// now is the index of the next event.
func (m *emulated) now() int {
	_, end, _ := m.log.since(0)
	return end
}

// dump shows the last events, without the waiting of workers.
func (m *emulated) dump() {
	all := m.events(func(e kfdemu.Event) bool { return e.Op != "WAIT_EVENTS" })
	const most = 150
	if len(all) > most {
		all = all[len(all)-most:]
	}
	var b strings.Builder
	for _, e := range all {
		line, err := json.Marshal(e)
		if err != nil {
			m.t.Error(err)
		}
		fmt.Fprintf(&b, "%s\n", line)
	}
	m.t.Logf("the last events of the emulated machine:\n%s", b.String())
}

// start runs a daemon on the machine and waits until it serves.
func (m *emulated) start(config string) *daemon {
	m.t.Helper()
	return m.startIn(testutil.TempSocketDir(m.t), config)
}

// startIn is start with the directory for config and socket given.
func (m *emulated) startIn(dir, config string) *daemon {
	m.t.Helper()
	d := m.launch(dir, config)
	d.awaitServing()
	d.events = watchEvents(m.t, d.admin)
	return d
}

// launch runs a daemon on the machine and waits for nothing.
func (m *emulated) launch(dir, config string) *daemon {
	m.t.Helper()
	return m.launchWith(dir, dir, config)
}

// launchWith is launch with a state directory of its own.
func (m *emulated) launchWith(dir, state, config string) *daemon {
	m.t.Helper()
	d := prepare(m.t, dir, config, onHost)
	d.busyHost = m.gpreemptd != gpreemptd // changed starts from it, too
	d.process = m.Command(context.Background(), m.gpreemptd, "serve", "--socket", d.socket, "--config", d.config)
	d.process.Env = environment("RUNTIME_DIRECTORY=" + state)
	d.process.Stderr = d.log
	d.run()
	return d
}

// worker is a client of the GPU: a process of kfdemu work, or of the C program that
// speaks the same.
type worker struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	log *lines
	// PID is the process's.
	PID int32

	mu     sync.Mutex // guards all below
	said   []report
	next   chan struct{}
	ended  bool
	waited chan struct{}
}

// queueReport is one of a worker's queues.
type queueReport struct {
	ID    uint32 `json:"id"`
	GPU   uint32 `json:"gpu"`
	Kind  string `json:"kind"`
	Count uint64 `json:"count"`
	Read  uint64 `json:"read"`
	Write uint64 `json:"write"`
}

// report is a line a worker says.
type report struct {
	Event   string        `json:"event"`
	PID     int32         `json:"pid"`
	Queues  []queueReport `json:"queues"`
	Packets uint64        `json:"packets"`
	Count   uint64        `json:"count"`
	Hash    string        `json:"hash"`
	OK      bool          `json:"ok"`
	P50     float64       `json:"p50_us"`
	P99     float64       `json:"p99_us"`
	Errno   int           `json:"errno"`
	What    string        `json:"what"`
	Line    string        `json:"-"`
}

// work starts a worker of the Go client as an offline job: its name begins with train.
func (m *emulated) work(args ...string) *worker {
	m.t.Helper()
	return m.workAs(trainBinary, append([]string{"work"}, args...)...)
}

// serve starts one that no rule makes offline.
func (m *emulated) serve(args ...string) *worker {
	m.t.Helper()
	return m.workAs(kfdemuBinary, append([]string{"work"}, args...)...)
}

// workAs starts a program as a worker and waits until it is ready.
func (m *emulated) workAs(program string, args ...string) *worker {
	m.t.Helper()
	w := m.spawn(m.Command(context.Background(), program, args...))
	w.await("ready")
	return w
}

// spawn starts a command as a worker and waits for nothing.
func (m *emulated) spawn(cmd *exec.Cmd) *worker {
	m.t.Helper()
	return spawn(m.t, cmd)
}

// spawn starts a command as a worker and waits for nothing.
func spawn(t *testing.T, cmd *exec.Cmd) *worker {
	t.Helper()
	w := &worker{t: t, cmd: cmd, log: &lines{}, next: make(chan struct{}), waited: make(chan struct{})}
	cmd.Env = environment(cmd.Env...)
	cmd.Stderr = w.log
	var err error
	if w.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.PID = int32(cmd.Process.Pid)
	go w.listen(out)
	t.Cleanup(func() {
		w.kill()
		if t.Failed() {
			t.Logf("what worker %d wrote:\n%s\n%s", w.PID, w.lines(), w.log)
		}
	})
	return w
}

func (w *worker) listen(out io.Reader) {
	scanner := bufio.NewScanner(out)
	for scanner.Scan() {
		r := report{Line: scanner.Text()}
		if err := json.Unmarshal(scanner.Bytes(), &r); err != nil {
			r.Event, r.What = "garbled", err.Error()
		}
		w.mu.Lock()
		w.said = append(w.said, r)
		close(w.next)
		w.next = make(chan struct{})
		w.mu.Unlock()
	}
	_ = w.cmd.Wait() // its end is checked by ProcessState
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	close(w.next)
	w.next = make(chan struct{})
	close(w.waited)
}

func (w *worker) lines() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var b strings.Builder
	for _, r := range w.said {
		fmt.Fprintln(&b, r.Line)
	}
	return b.String()
}

// await waits for the next report of a kind that has not been waited for.
func (w *worker) await(event string) report {
	w.t.Helper()
	late := time.After(timeout)
	for {
		w.mu.Lock()
		for i, r := range w.said {
			if r.Event == event {
				w.said = append(w.said[:i:i], w.said[i+1:]...)
				w.mu.Unlock()
				return r
			}
		}
		next, ended := w.next, w.ended
		w.mu.Unlock()
		if ended {
			w.t.Fatalf("worker %d ended (%v) without %q; it said:\n%s%s", w.PID, w.cmd.ProcessState, event, w.lines(), w.log)
		}
		select {
		case <-next:
		case <-late:
			w.t.Fatalf("worker %d did not say %q within %v; it said:\n%s%s", w.PID, event, timeout, w.lines(), w.log)
		}
	}
}

// tell returns a worker a command.
func (w *worker) tell(format string, args ...any) {
	w.t.Helper()
	if _, err := fmt.Fprintf(w.in, format+"\n", args...); err != nil {
		w.t.Fatalf("tell worker %d: %v", w.PID, err)
	}
}

// stop has a worker finish, and checks that each of its packets ran exactly once and
// that it ends well.
func (w *worker) stop() {
	w.t.Helper()
	w.tell("stop")
	w.finish()
}

// finish is stop for a worker that stops by itself, and returns what it says at its end.
func (w *worker) finish() report {
	w.t.Helper()
	done := w.await("done")
	w.awaitEnd()
	if !done.OK || !w.cmd.ProcessState.Success() {
		w.t.Errorf("worker %d: %s, %v", w.PID, done.Line, w.cmd.ProcessState)
	}
	return done
}

// awaitEnd waits until the process has ended.
func (w *worker) awaitEnd() {
	w.t.Helper()
	select {
	case <-w.waited:
	case <-time.After(timeout):
		w.t.Fatalf("worker %d did not end within %v", w.PID, timeout)
	}
}

// kill ends a worker as SIGKILL does, and waits for it.
func (w *worker) kill() {
	_ = w.cmd.Process.Kill() // it may have ended
	<-w.waited
}

// count returns how many packets a worker has seen done so far.
func (w *worker) count() uint64 {
	w.t.Helper()
	w.tell("report")
	return w.await("report").Count
}

// checkFrozen checks that nothing of a worker runs: its queues are off the GPU by the
// driver's own account.
func (m *emulated) checkFrozen(w *worker) {
	m.t.Helper()
	for _, p := range m.Driver().Processes() {
		if p.PID != w.PID {
			continue
		}
		for _, q := range p.Queues {
			if q.Running || !q.Suspended {
				m.t.Errorf("queue %d of %d runs: %+v", q.ID, w.PID, q)
			}
		}
	}
}

// checkRuns checks that all queues of a worker are on the GPU.
func (m *emulated) checkRuns(w *worker) {
	m.t.Helper()
	for _, p := range m.Driver().Processes() {
		if p.PID != w.PID {
			continue
		}
		for _, q := range p.Queues {
			if !q.Running || q.Suspended {
				m.t.Errorf("queue %d of %d does not run: %+v", q.ID, w.PID, q)
			}
		}
	}
}

// signal sends a worker a signal.
func (w *worker) signal(s syscall.Signal) {
	w.t.Helper()
	if err := w.cmd.Process.Signal(s); err != nil {
		w.t.Fatalf("signal %v: %v", s, err)
	}
}

// offlineTarget waits until the daemon knows the worker as a job it can suspend.
func (d *daemon) offlineTarget(w *worker, queues int) {
	d.t.Helper()
	d.eventually(fmt.Sprintf("job %d with %d queues can be suspended", w.PID, queues), func() bool {
		t := d.target(w.PID)
		return t != nil && t.GetClass() == gpreemptv1.Class_CLASS_OFFLINE && t.GetMechanism() == "dbgtrap" && int(t.GetQueueCount()) == queues
	})
}

// cannotEmulate says why no machine can be emulated here, "" if it can. A machine
// that should and cannot is found by the other way round: CI looks for this text.
func cannotEmulate() string {
	if raceDetector {
		return "the emulated machine is part of the test process, and ten times slower with the race detector: make e2e has it in the daemon only"
	}
	if err := seccomp.Supported(); err != nil {
		return "no emulated machine here: " + err.Error()
	}
	if os.Geteuid() != 0 {
		return "no emulated machine here: programs that join it from outside need root"
	}
	return ""
}

package inventory_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// lastPID is the pid that the kernel assigned last in this pid namespace; the next one is
// the one after it (pid_ns_ctl_handler).
const lastPID = "/proc/sys/kernel/ns_last_pid"

// startChildAs starts a child, if possible with the pid of a process that has ended:
// other processes start meanwhile and may take the pid.
func startChildAs(t *testing.T, former gpreempt.ProcessKey, tag string) *child {
	t.Helper()
	// Two processes with the same pid that start in the same tick are indistinguishable.
	// Normally a pid is not used again so soon.
	for ticks := uint64(0); ticks <= former.Start+1; {
		b, err := os.ReadFile("/proc/uptime")
		if err != nil {
			t.Fatal(err)
		}
		seconds, err := strconv.ParseFloat(strings.Fields(string(b))[0], 64)
		if err != nil {
			t.Fatal(err)
		}
		ticks = uint64(seconds * 100)
	}
	for range 5 {
		err := os.WriteFile(lastPID, []byte(strconv.Itoa(int(former.PID)-1)), 0)
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EROFS) {
			t.Skipf("choosing a pid needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE, and CONFIG_CHECKPOINT_RESTORE: %v", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		if c := startChildIf(t, tag, func(pid int32) bool { return pid == former.PID }); c != nil {
			return c
		}
	}
	return startChild(t, tag)
}

// One process after another has the same pid, each time between two scans. None is taken
// for the one before or has facts of it, also for a concurrent scan.
func TestPidUsedAgainIsGoneAndBorn(t *testing.T) {
	w := newWorld(t)
	queue := func(key gpreempt.ProcessKey, round int) gpreempt.Queue {
		return gpreempt.Queue{Process: key, ID: 0, GPU: 63420, Type: gpreempt.QueueCompute, RingBytes: uint64(4096 * (round + 1))}
	}
	v, files := inventory.New(64), w.files()

	var mu sync.Mutex // guards tags and scans
	tags := map[gpreempt.ProcessKey]string{}
	scans := 0
	more := sync.NewCond(&mu)
	ctx, stop := context.WithCancel(t.Context())
	var beside sync.WaitGroup
	defer beside.Wait()
	defer stop()
	beside.Go(func() {
		files := w.files()
		for ctx.Err() == nil {
			s, err := files.Scan()
			mu.Lock()
			if err != nil {
				t.Error(err)
			}
			for _, p := range s.Processes {
				if tag := tags[p.Key]; tag == "" || !tagged(p.Process, tag) {
					t.Errorf("process %v of %q is shown with %q and %v", p.Key, tag, p.Cmdline, p.Env)
				}
			}
			scans++
			more.Broadcast()
			mu.Unlock()
		}
	})

	now := startChild(t, "round0")
	defer func() { now.end() }()
	reused := 0
	for round := 0; reused < 5 && round < 50; round++ {
		if round > 0 {
			former := now.key
			now.end()
			// KFD may forget a process after its pid has gone to another one.
			if round%2 == 0 {
				w.remove(w.process(former.PID))
			}
			now = startChildAs(t, former, "round"+strconv.Itoa(round))
			if round%2 != 0 {
				w.remove(w.process(former.PID))
			}
			if now.key.PID == former.PID {
				reused++
			}
		}
		mu.Lock()
		tags[now.key] = now.tag
		mu.Unlock()
		w.addProcess(now.key.PID)
		q := queue(now.key, round)
		w.addQueue(q)

		before, _ := v.Queues()
		d := v.Apply(at(round), scanned(t, files))
		p, found := v.Process(now.key)
		for found && !whole(p.Process) { // reading its memory takes time
			v.Apply(at(round), scanned(t, files))
			p, found = v.Process(now.key)
		}
		p.Incarnations, p.InOrder = nil, false
		p.Ancestors = nil // those of the test; package discovery tests them
		if diff := cmp.Diff(discovery.Proc{Process: now.process(t), Queues: []gpreempt.Queue{q}}, p); diff != "" {
			t.Fatalf("round %d (-want +got):\n%s", round, diff)
		}
		var gone, born []gpreempt.ProcessKey
		for _, p := range d.Born {
			born = append(born, p.Key)
		}
		var kinds []inventory.ChangeKind
		for _, c := range d.Queues {
			kinds = append(kinds, c.Kind)
		}
		wantKinds := []inventory.ChangeKind{inventory.Added}
		if round > 0 {
			gone = []gpreempt.ProcessKey{before[0].Process}
			wantKinds = []inventory.ChangeKind{inventory.Removed, inventory.Added}
		}
		if diff := cmp.Diff(gone, d.Gone); diff != "" {
			t.Errorf("round %d: gone (-want +got):\n%s", round, diff)
		}
		if diff := cmp.Diff([]gpreempt.ProcessKey{now.key}, born); diff != "" {
			t.Errorf("round %d: born (-want +got):\n%s", round, diff)
		}
		if diff := cmp.Diff(wantKinds, kinds); diff != "" {
			t.Errorf("round %d: changes of queues (-want +got):\n%s", round, diff)
		}
		mu.Lock()
		for began := scans; scans < began+2 && !t.Failed(); { // one that began now has ended
			more.Wait()
		}
		mu.Unlock()
		// The info of a queue does not reach the successor.
		v.SetInfos(time.Now(), p, []gpreempt.QueueInfo{{RingBase: 1}})
	}
	if reused == 0 {
		t.Skip("no child got the same pid in 50 attempts: other processes start all the time")
	}
	t.Logf("a pid was used again %d times", reused)
}

func scanned(t *testing.T, files *discovery.FS) discovery.Snapshot {
	t.Helper()
	s, err := files.Scan()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

package inventory_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// soakEnv returns the duration of TestSoak, which is a few seconds without.
const soakEnv = "GPREEMPT_SOAK"

// The pauses of the scanner, those of the daemon by default.
const shortest, longest = 50 * time.Millisecond, time.Second

// scanner keeps an inventory up to date, as the daemon does.
type scanner struct {
	files *discovery.FS
	v     *inventory.Inventory

	mu   sync.Mutex // guards all below
	more *sync.Cond // broadcast after each scan
	// begun counts the scans that began, applied those that the inventory has.
	begun, applied int
	// intervals are the times from one scan's end to the next one's.
	intervals []time.Duration
	// born and gone are which scan found that something began or ended, and when.
	born, gone map[any]finding
	warnings   []string
	err        error
}

type finding struct {
	scan int
	at   time.Time
}

// run scans until ctx ends.
func (s *scanner) run(ctx context.Context) {
	pace := discovery.NewPace(shortest, longest)
	tick := time.NewTicker(shortest)
	defer tick.Stop()
	last := time.Now()
	for next := last; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		changed, err := s.files.Changed()
		if err == nil && !changed && time.Now().Before(next) {
			continue
		}
		s.mu.Lock()
		s.begun++
		s.mu.Unlock()
		began := time.Now()
		found, err := s.files.Scan()
		d := s.v.Apply(time.Now(), found)
		now := time.Now()
		s.mu.Lock()
		s.note(d, now)
		s.intervals = append(s.intervals, now.Sub(last))
		s.warnings = found.Warnings
		if err != nil {
			s.err = err
		}
		s.applied++
		s.more.Broadcast()
		s.mu.Unlock()
		last, next = now, now.Add(pace.Next(!d.Empty(), now.Sub(began)))
	}
}

// note records what a scan found. Each process has another key and each queue another
// ring size.
func (s *scanner) note(d inventory.Diff, now time.Time) {
	f := finding{s.begun, now}
	for _, key := range d.Gone {
		s.gone[key] = f
	}
	for _, p := range d.Born {
		s.born[p.Key] = f
	}
	for _, c := range d.Queues {
		switch c.Kind {
		case inventory.Added:
			s.born[c.Queue.RingBytes] = f
		case inventory.Removed:
			s.gone[c.Queue.RingBytes] = f
		}
	}
}

func (s *scanner) counts() (begun, applied int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun, s.applied
}

// event is the beginning or the end of a process or queue.
type event struct {
	what any
	at   time.Time
	// before is how many scans had begun by then: the next one must find it.
	before int
	// until is how many scans had ended when it ended, -1 while it exists: a scan that
	// overlaps the end need not find it.
	until int
}

// soak is the state of the world, and what the scanner should find of it.
type soak struct {
	*world
	*scanner
	r         *rand.Rand
	children  map[int32]*child
	queues    map[int32]map[uint32]gpreempt.Queue
	born      map[any]*event
	gone      []*event
	rings     uint64
	lags      []time.Duration
	did       map[string]int
	revision  uint64
	followers map[uint64]gpreempt.QueueEntry // by ring size, as the changes describe them
}

// Real processes and queues in a simulated sysfs begin and end at random. While nothing
// changes, the next scan makes the inventory equal to the world; and each change is in
// the first scan that begins after it.
func TestSoak(t *testing.T) {
	length := 3 * time.Second
	if text := os.Getenv(soakEnv); text != "" {
		var err error
		if length, err = time.ParseDuration(text); err != nil {
			t.Fatalf("%s: %v", soakEnv, err)
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	w := newWorld(t)
	sc := &scanner{files: w.files(), v: inventory.New(1 << 14), born: map[any]finding{}, gone: map[any]finding{}}
	sc.more = sync.NewCond(&sc.mu)
	s := &soak{
		world: w, scanner: sc, r: rand.New(rand.NewPCG(seed, 0)), children: map[int32]*child{}, queues: map[int32]map[uint32]gpreempt.Queue{},
		born: map[any]*event{}, did: map[string]int{}, followers: map[uint64]gpreempt.QueueEntry{},
	}
	ctx, stop := context.WithCancel(t.Context())
	var scanning sync.WaitGroup
	scanning.Go(func() { sc.run(ctx) })
	defer func() {
		for _, c := range s.children {
			c.end()
		}
	}()
	defer scanning.Wait()
	defer stop()

	for end := time.Now().Add(length); time.Now().Before(end) && !t.Failed(); {
		// A burst, at a pace of its own, and now and then a rest in which the scanner
		// slows down.
		pause := time.Duration(s.r.IntN(10)) * time.Millisecond
		for range 1 + s.r.IntN(60) {
			s.step()
			s.wait(time.Duration(s.r.Int64N(int64(pause) + 1)))
		}
		s.wait(time.Duration(s.r.Int64N(int64([]time.Duration{time.Millisecond, shortest, shortest, 2 * longest}[s.r.IntN(4)]))))
		s.checkpoint()
	}
	s.report()
}

// wait lets a time pass in which nothing happens in the world.
func (s *soak) wait(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.t.Context().Done():
	}
}

// step does one thing.
func (s *soak) step() {
	pids := slices.Sorted(maps.Keys(s.children))
	if len(pids) == 0 || s.r.IntN(12) == 0 && len(pids) < 10 {
		s.birth()
		return
	}
	pid := pids[s.r.IntN(len(pids))]
	if s.r.IntN(16) == 0 {
		s.death(pid)
		return
	}
	id := uint32(s.r.IntN(8))
	if q, lives := s.queues[pid][id]; lives {
		s.destroy(q)
		if s.r.IntN(2) == 0 {
			return
		}
	}
	s.create(s.children[pid].key, id)
}

func (s *soak) happened(what string) { s.did[what]++ }

// begins records that something has begun.
func (s *soak) begins(what any) {
	begun, _ := s.counts()
	s.born[what] = &event{what: what, at: time.Now(), before: begun, until: -1}
}

// ends notes that something will go, before it does.
func (s *soak) ends(what any) {
	if e := s.born[what]; e != nil { // otherwise a checkpoint has handled it
		_, e.until = s.counts()
	}
}

// ended records that something has ended.
func (s *soak) ended(what any) {
	begun, _ := s.counts()
	s.gone = append(s.gone, &event{what: what, at: time.Now(), before: begun, until: -1})
}

func (s *soak) birth() {
	c := startChild(s.t, fmt.Sprintf("child%d", s.did["processes born"]))
	s.addProcess(c.key.PID)
	s.children[c.key.PID], s.queues[c.key.PID] = c, map[uint32]gpreempt.Queue{}
	s.begins(c.key)
	s.happened("processes born")
}

func (s *soak) death(pid int32) {
	c := s.children[pid]
	delete(s.children, pid)
	s.ends(c.key)
	for _, q := range s.queues[pid] {
		s.ends(q.RingBytes)
	}
	// KFD forgets a process some time after it died, and never before.
	c.end()
	s.ended(c.key)
	for _, q := range s.queues[pid] {
		s.ended(q.RingBytes)
	}
	delete(s.queues, pid)
	s.wait(time.Duration(s.r.Int64N(int64(2*shortest))) * time.Duration(s.r.IntN(2)))
	s.remove(s.process(pid))
	s.happened("processes died")
}

func (s *soak) create(owner gpreempt.ProcessKey, id uint32) {
	s.rings++
	q := gpreempt.Queue{
		Process: owner, ID: id, GPU: gpreempt.GPUID(1 + s.r.IntN(8)), Type: gpreempt.QueueCompute, RingBytes: s.rings << 12,
	}
	s.addQueue(q)
	s.queues[owner.PID][id] = q
	s.begins(q.RingBytes)
	s.happened("queues born")
}

func (s *soak) destroy(q gpreempt.Queue) {
	s.ends(q.RingBytes)
	delete(s.queues[q.Process.PID], q.ID)
	s.remove(s.queueDir(q))
	s.ended(q.RingBytes)
	s.happened("queues destroyed")
}

// checkpoint waits for a scan of the world as it stands and compares.
func (s *soak) checkpoint() {
	s.t.Helper()
	s.happened("checkpoints")
	s.nextScan()
	s.compareQueues()
	s.compareProcesses()
	s.follow()

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil || len(s.warnings) > 0 {
		s.t.Errorf("a scan returns %v and warns %q", s.err, s.warnings)
	}
	for what, e := range s.born {
		found, seen := s.scanner.born[what]
		switch {
		case seen && found.scan > e.before+1:
			s.t.Errorf("%v began after %d scans had begun, and scan %d found it", what, e.before, found.scan)
		case !seen && (e.until < 0 || e.until > e.before):
			s.t.Errorf("%v began after %d scans had begun, existed until %d had ended, and none found it", what, e.before, e.until)
		case seen:
			s.lags = append(s.lags, max(found.at.Sub(e.at), 0))
		}
	}
	for _, e := range s.gone {
		_, seen := s.scanner.born[e.what]
		found, known := s.scanner.gone[e.what]
		if seen && (!known || found.scan > e.before+1) {
			s.t.Errorf("%v ended after %d scans had begun, and scan %d found that (0: no scan)", e.what, e.before, found.scan)
		}
		if seen && known {
			s.lags = append(s.lags, max(found.at.Sub(e.at), 0))
		}
		delete(s.scanner.born, e.what)
	}
	clear(s.born)
	s.gone = nil
	clear(s.scanner.gone)
}

// nextScan waits until a scan that begins now or later has ended.
func (s *soak) nextScan() {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.begun + 1
	for s.applied < next {
		s.more.Wait()
	}
}

// compareQueues compares the queues: the world has not changed since the scan began.
func (s *soak) compareQueues() {
	s.t.Helper()
	var want []gpreempt.Queue
	for _, pid := range slices.Sorted(maps.Keys(s.queues)) {
		for _, id := range slices.Sorted(maps.Keys(s.queues[pid])) {
			want = append(want, s.queues[pid][id])
		}
	}
	all, _ := s.v.Queues()
	var got []gpreempt.Queue
	for _, q := range all {
		got = append(got, q.Queue)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		s.t.Fatalf("queues (-want +got):\n%s", diff)
	}
}

// compareProcesses has some patience with what is read beside the scan.
func (s *soak) compareProcesses() {
	s.t.Helper()
	var want []gpreempt.Process
	for _, pid := range slices.Sorted(maps.Keys(s.children)) {
		want = append(want, s.children[pid].process(s.t))
	}
	for scans := 0; ; scans++ {
		var got []gpreempt.Process
		all := true
		for _, p := range s.v.Processes() {
			got = append(got, p.Process)
			all = all && whole(p.Process)
			got[len(got)-1].Ancestors = nil // those of the test; package discovery tests them
		}
		if all || scans == 100 {
			if diff := cmp.Diff(want, got); diff != "" {
				s.t.Fatalf("processes (-want +got):\n%s", diff)
			}
			return
		}
		s.happened("scans waited for facts")
		s.nextScan()
	}
}

// follow folds the changes since the last checkpoint.
func (s *soak) follow() {
	s.t.Helper()
	all, now := s.v.Queues()
	for s.revision < now {
		changes, err := s.v.Read(s.revision, nil)
		if err != nil {
			s.t.Fatal(err)
		}
		for _, c := range changes {
			if c.Kind == inventory.Removed {
				delete(s.followers, c.Queue.RingBytes)
			} else {
				s.followers[c.Queue.RingBytes] = c.Queue
			}
		}
		s.revision = changes[len(changes)-1].Revision
	}
	want := map[uint64]gpreempt.QueueEntry{}
	for _, q := range all {
		want[q.RingBytes] = q
	}
	if diff := cmp.Diff(want, s.followers); diff != "" {
		s.t.Fatalf("the changes up to revision %d (-queues +folded):\n%s", now, diff)
	}
}

func (s *soak) report() {
	s.mu.Lock()
	defer s.mu.Unlock()
	quantile := func(all []time.Duration, q float64) time.Duration {
		if len(all) == 0 {
			return 0
		}
		slices.Sort(all)
		return all[int(q*float64(len(all)-1))].Round(10 * time.Microsecond)
	}
	s.t.Logf("did %v in %d scans", s.did, s.applied)
	s.t.Logf("lag of %d births and deaths: p50 %v, p99 %v; time from scan to scan: p50 %v, p99 %v, longest %v", len(s.lags),
		quantile(s.lags, 0.5), quantile(s.lags, 0.99), quantile(s.intervals, 0.5), quantile(s.intervals, 0.99), quantile(s.intervals, 1))
}

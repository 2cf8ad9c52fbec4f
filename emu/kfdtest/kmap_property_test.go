package kfdtest_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// limits is a random history of limits, beside everything else that decides whether a queue is
// mapped. The limits are also kept here.
type limits struct {
	rt      *rapid.T
	m       *kfdtest.Machine
	jobs    []*actor
	dbg     *actor
	handles []*handle
	// wrong is a runlist with a held queue, "" for none.
	wrong string
}

// handle is a limiter, and what it should have done.
type handle struct {
	*kfdtest.Process
	k      kmap
	of     map[*actor]uint32
	ends   time.Time // of the lease
	lapses uint32
}

// step sees every runlist.
func (l *limits) step(s driver.Step) driver.Outcome {
	for _, q := range s.Queues {
		if q.Held || q.Evicted || q.Suspended {
			l.wrong = "a runlist has a queue that is kept out"
		}
	}
	return driver.Outcome{}
}

func (l *limits) must(err error) {
	if err != nil {
		l.fatalf("%v", err)
	}
}

// difference is what the test found: rapid's own panics have other types.
type difference string

func (l *limits) fatalf(format string, a ...any) { panic(difference(fmt.Sprintf(format, a...))) }

// job starts a program that is debugged.
func (l *limits) job() *actor {
	a := &actor{Process: l.m.Spawn()}
	var err error
	a.fd, err = a.Main().StartRuntime()
	l.must(err)
	l.must(l.dbg.Main().Seize(a.PID()))
	_, err = l.dbg.device.Enable(a.PID(), enabledMask, l.dbg.pipe)
	l.must(err)
	for range rapid.IntRange(0, 6).Draw(l.rt, "queues") {
		l.create(a)
	}
	return a
}

func (l *limits) limiter() *handle {
	h := &handle{Process: l.m.Spawn(), of: map[*actor]uint32{}}
	var err error
	h.k, err = openKmap(h.Main())
	l.must(err)
	return h
}

// owner returns the handle that limits a job, nil for none.
func (l *limits) owner(j *actor) *handle {
	for _, h := range l.handles {
		if _, is := h.of[j]; is {
			return h
		}
	}
	return nil
}

// call makes a call of a job that may wait in a new thread.
func (l *limits) call(j *actor, call func(t *kfdtest.Thread)) {
	t := j.NewThread()
	go call(t)
	synctest.Wait()
}

// create creates a queue, which can be suspended then.
func (l *limits) create(j *actor) {
	gpu := rapid.SampledFrom([]gpreempt.GPUID{gpuA, gpuA, gpuB}).Draw(l.rt, "gpu")
	kind := rapid.SampledFrom([]uint32{kfd.QueueTypeCompute, kfd.QueueTypeComputeAQL, kfd.QueueTypeComputeAQL, kfd.QueueTypeSDMA, kfd.QueueTypeSDMAXGMI}).Draw(l.rt, "type")
	args := kfdabi.CreateQueueArgs{
		RingBaseAddress: 1 << 20, RingSize: 4096, GPUID: uint32(gpu), QueueType: kind, QueuePercentage: 100, QueuePriority: l.priority(),
	}
	l.call(j, func(t *kfdtest.Thread) { _, _ = t.Ioctl(j.fd, kfdabi.ReqCreateQueue, kfd.PointerTo(&args)) })
	_, _ = l.dbg.device.Snapshot(j.PID(), kfd.ECQueueNew.Mask())
}

func (l *limits) priority() uint32 { return uint32(rapid.IntRange(6, 8).Draw(l.rt, "priority")) }

func (l *limits) actions() map[string]func(*rapid.T) {
	job := func() *actor { return rapid.SampledFrom(l.jobs).Draw(l.rt, "job") }
	id := func() uint32 { return uint32(rapid.IntRange(0, 5).Draw(l.rt, "queue")) }
	limiter := func() int { return rapid.IntRange(0, len(l.handles)-1).Draw(l.rt, "handle") }
	set := func(*rapid.T) { l.set(l.handles[limiter()]) }
	return map[string]func(*rapid.T){
		"create": func(*rapid.T) { l.create(job()) },
		"destroy": func(*rapid.T) {
			j, q := job(), id()
			l.call(j, func(t *kfdtest.Thread) { _ = t.DestroyQueue(j.fd, q) })
		},
		"update": func(*rapid.T) {
			j := job()
			args := kfdabi.UpdateQueueArgs{
				RingBaseAddress: 1 << 20, QueueID: id(), RingSize: 4096, QueuePercentage: rapid.SampledFrom([]uint32{0, 100}).Draw(l.rt, "percent"),
				QueuePriority: l.priority(),
			}
			_, _ = j.Main().Ioctl(j.fd, kfdabi.ReqUpdateQueue, kfd.PointerTo(&args))
		},
		"evict":      func(*rapid.T) { _ = l.m.Evict(job().MM(), kfd.TriggerTTM) },
		"restore":    func(*rapid.T) { _ = l.m.Restore(job().MM()) },
		"suspend":    func(*rapid.T) { _, _ = l.dbg.device.Suspend(job().PID(), []uint32{id()}) },
		"resume":     func(*rapid.T) { _, _ = l.dbg.device.Resume(job().PID(), []uint32{id()}) },
		"resume all": func(*rapid.T) { _, _ = l.dbg.device.ResumeAll(job().PID()) },
		// Half of the steps.
		"set": set, "set 2": set, "set 3": set, "set 4": set, "set 5": set, "set 6": set, "set 7": set, "set 8": set,
		"time passes": func(*rapid.T) {
			time.Sleep(time.Duration(rapid.IntRange(1, 500).Draw(l.rt, "ms")) * time.Millisecond)
		},
		"handle ends": func(*rapid.T) {
			i := limiter()
			h := l.handles[i]
			rapid.SampledFrom([]func(){func() { l.must(h.k.close()) }, h.Kill, h.Exec}).Draw(l.rt, "how")()
			l.handles[i] = l.limiter()
		},
		"job ends": func(*rapid.T) {
			j := job()
			rapid.SampledFrom([]func(){j.Kill, j.Exec}).Draw(l.rt, "how")()
			j.Kill()
			for _, h := range l.handles {
				delete(h.of, j)
			}
			l.jobs[slices.Index(l.jobs, j)] = l.job()
		},
		"": func(*rapid.T) {
			synctest.Wait()
			l.check()
		},
	}
}

// expire forgets the limits whose lease has ended.
func (l *limits) expire() {
	for _, h := range l.handles {
		if len(h.of) > 0 && !time.Now().Before(h.ends) {
			clear(h.of)
			h.lapses++
		}
	}
}

// set limits some jobs by a handle, and checks the answer.
func (l *limits) set(h *handle) {
	l.expire()
	chosen := rapid.SliceOfNDistinct(rapid.SampledFrom(l.jobs), 0, len(l.jobs), rapid.ID[*actor]).Draw(l.rt, "targets")
	lease := time.Duration(rapid.IntRange(100, 1000).Draw(l.rt, "lease")) * time.Millisecond
	var targets []limited
	before := map[*actor]map[uint32]driver.QueueState{}
	for _, j := range chosen {
		fd, err := h.Main().PidfdOpen(j.PID())
		l.must(err)
		limit := rapid.SampledFrom([]uint32{0, 0, 1, 2, 3, kfdabi.KmapNoLimit}).Draw(l.rt, "limit")
		targets = append(targets, limited{pidfd: fd, limit: limit, room: 16})
		before[j] = j.Queues()
	}
	cycles, err := h.k.set(targets, lease)
	l.must(err)
	h.ends = time.Now().Add(lease)
	changed := map[gpreempt.GPUID]bool{}
	for i, j := range chosen {
		owner, r := l.owner(j), targets[i]
		if refused := owner != nil && owner != h; refused != (r.err != nil) {
			l.fatalf("process %d of another handle: %v: %v", j.PID(), refused, r.err)
		}
		if r.err != nil {
			continue
		}
		if delete(h.of, j); r.limit != kfdabi.KmapNoLimit {
			h.of[j] = r.limit
		}
		after := j.Queues()
		l.checkChoice(j, after, r.limit, r)
		for id, q := range after {
			changed[q.GPU] = changed[q.GPU] || q.Held != before[j][id].Held
		}
	}
	maps.DeleteFunc(changed, func(_ gpreempt.GPUID, is bool) bool { return !is })
	if cycles != len(changed) {
		l.fatalf("%d runlists, want one for each of %v", cycles, changed)
	}
}

// eligible reports whether only a limit keeps a queue out.
func eligible(q driver.QueueState) bool {
	return q.Size > 0 && q.Percent > 0 && !q.Evicted && !q.Suspended
}

func compute(q driver.QueueState) bool {
	return q.Type == kfd.QueueTypeCompute || q.Type == kfd.QueueTypeComputeAQL
}

// checkChoice compares a process after a SET with the rules.
func (l *limits) checkChoice(j *actor, queues map[uint32]driver.QueueState, limit uint32, r limited) {
	want := map[uint32]bool{} // held
	for _, gpu := range []gpreempt.GPUID{gpuA, gpuB} {
		var order []driver.QueueState
		for id, q := range queues {
			if q.GPU != gpu {
				continue
			}
			want[id] = limit == 0 || limit != kfdabi.KmapNoLimit && compute(q)
			if compute(q) && eligible(q) {
				order = append(order, q)
			}
		}
		slices.SortFunc(order, func(a, b driver.QueueState) int {
			return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.ID, b.ID))
		})
		for _, q := range order[:min(len(order), int(limit))] {
			want[q.ID] = false
		}
	}
	held := 0
	for id, q := range queues {
		if q.Held != want[id] {
			l.fatalf("process %d with the limit %d: %+v, want held=%v", j.PID(), limit, q, want[id])
		}
		if q.Held {
			held++
		}
	}
	if r.total != len(queues) || r.held != held || len(r.queues) != len(queues) {
		l.fatalf("got %+v of %d queues, %d held", r, len(queues), held)
	}
	for _, q := range r.queues {
		s := queues[q.ID]
		if q.GPU() != s.GPU || (q.State&kfdabi.KmapHeld != 0) != s.Held || (q.State&kfdabi.KmapMapped != 0) != s.Running ||
			(q.State&kfdabi.KmapEvicted != 0) != s.Evicted || (q.State&kfdabi.KmapSuspended != 0) != s.Suspended {
			l.fatalf("%v in the answer is %+v", q, s)
		}
	}
}

// check is true at any time.
func (l *limits) check() {
	l.expire()
	if l.wrong != "" {
		l.fatalf("%s", l.wrong)
	}
	for _, j := range l.jobs {
		owner := l.owner(j)
		mapped := map[gpreempt.GPUID]uint32{}
		for _, q := range j.Queues() {
			if wanted := eligible(q) && !q.Held; q.Active != wanted || q.Running != wanted {
				l.fatalf("process %d: %+v", j.PID(), q)
			}
			switch {
			case owner == nil && q.Held:
				l.fatalf("process %d without a limit: %+v", j.PID(), q)
			case owner != nil && owner.of[j] == 0 && !q.Held:
				l.fatalf("held process %d: %+v", j.PID(), q)
			case owner != nil && owner.of[j] > 0 && !compute(q) && q.Held:
				l.fatalf("process %d, whose copies are free: %+v", j.PID(), q)
			case compute(q) && q.Running:
				mapped[q.GPU]++
			}
		}
		for gpu, n := range mapped {
			if owner != nil && n > owner.of[j] {
				l.fatalf("process %d has %d queues on GPU %v, and the limit %d", j.PID(), n, gpu, owner.of[j])
			}
		}
	}
	for _, h := range l.handles {
		info, err := h.k.info()
		l.must(err)
		if info.Lapses != h.lapses || int(info.Limited) != len(h.of) {
			l.fatalf("a handle is %+v, want %d lapses and %d processes", info, h.lapses, len(h.of))
		}
	}
}

// TestRandomLimits checks after each step of a random history that no runlist has a held queue or
// more queues than the limit, and at its end that no queue is held once every handle is closed.
func TestRandomLimits(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var failure any // of rapid, which reports by a panic on its own goroutine
		synctest.Test(t, func(*testing.T) {
			l := &limits{rt: rt}
			l.m = kfdtest.New(kfdtest.Config{
				Profile: driver.KmapProfile, Hardware: l.step, Oops: func(string) {}, Nodes: []driver.Node{{ID: gpuA, GFX: hws}, {ID: gpuB, GFX: hws}},
			})
			defer func() {
				failure = recover()
				for _, j := range l.jobs {
					j.Kill() // its waiting calls return
				}
				l.dbg.Kill()
				for _, h := range l.handles {
					h.Kill()
				}
			}()
			l.dbg = &actor{Process: l.m.Spawn()}
			var err error
			_, l.dbg.pipe, err = l.dbg.Main().Pipe(true)
			l.must(err)
			l.dbg.device, err = kfd.OpenWith(l.dbg.Main(), kfd.DevicePath)
			l.must(err)
			l.jobs = []*actor{l.job(), l.job()}
			l.handles = []*handle{l.limiter(), l.limiter()}
			rt.Repeat(l.actions())
			for _, h := range l.handles {
				l.must(h.k.close())
			}
			l.handles = nil
			l.check()
		})
		switch failure := failure.(type) {
		case nil:
		case difference:
			rt.Fatal(string(failure))
		default:
			panic(failure)
		}
	})
}

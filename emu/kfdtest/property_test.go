package kfdtest_test

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// history is a random history: jobs and debuggers start, exit and make calls.
type history struct {
	rt   *rapid.T
	m    *kfdtest.Machine
	jobs []*actor
	dbgs []*actor
	// stolen: an ENABLE has failed, so the debugger of a process is not known.
	stolen bool
}

// actor is a process with an open driver.
type actor struct {
	*kfdtest.Process
	fd, pipe int
	device   *kfd.Device
	// thieving has its copies of other processes' descriptors.
	thieving map[*actor]int
}

func (h *history) spawn() *actor {
	a := &actor{Process: h.m.Spawn(), thieving: map[*actor]int{}}
	var err error
	if a.fd, err = a.Main().OpenKFD(); err != nil {
		h.rt.Fatal(err)
	}
	if _, a.pipe, err = a.Main().Pipe(true); err != nil {
		h.rt.Fatal(err)
	}
	if a.device, err = kfd.OpenWith(a.Main(), kfd.DevicePath); err != nil {
		h.rt.Fatal(err)
	}
	return a
}

// begin makes a call that may wait in a new thread. A later signal, resume or death ends
// it.
func (h *history) begin(a *actor, call func(t *kfdtest.Thread)) {
	t := a.NewThread()
	go call(t)
	synctest.Wait()
	if t.Blocked() && rapid.Bool().Draw(h.rt, "interrupt") {
		t.Interrupt()
		synctest.Wait()
	}
}

func (h *history) actions() map[string]func(*rapid.T) {
	job := func() *actor { return rapid.SampledFrom(h.jobs).Draw(h.rt, "job") }
	dbg := func() *actor { return rapid.SampledFrom(h.dbgs).Draw(h.rt, "debugger") }
	gpu := func() gpreempt.GPUID { return rapid.SampledFrom([]gpreempt.GPUID{gpuA, gpuB}).Draw(h.rt, "gpu") }
	id := func() uint32 { return uint32(rapid.IntRange(0, 4).Draw(h.rt, "queue")) }
	return map[string]func(*rapid.T){
		"create": func(*rapid.T) {
			j, g := job(), gpu()
			kind := rapid.SampledFrom([]uint32{kfd.QueueTypeCompute, kfd.QueueTypeSDMA, kfd.QueueTypeComputeAQL}).Draw(h.rt, "type")
			h.begin(j, func(t *kfdtest.Thread) { _, _ = t.CreateQueue(j.fd, g, kind) })
		},
		"destroy": func(*rapid.T) {
			j, q := job(), id()
			h.begin(j, func(t *kfdtest.Thread) { _ = t.DestroyQueue(j.fd, q) })
		},
		"update": func(*rapid.T) {
			j := job()
			args := kfdabi.UpdateQueueArgs{
				RingBaseAddress: 1 << 20, QueueID: id(), RingSize: 4096, QueuePercentage: rapid.SampledFrom([]uint32{0, 100}).Draw(h.rt, "percent"),
			}
			_, _ = j.Main().Ioctl(j.fd, kfdabi.ReqUpdateQueue, kfd.PointerTo(&args))
		},
		"runtime on":  func(*rapid.T) { j := job(); h.begin(j, func(t *kfdtest.Thread) { _ = t.RuntimeEnable(j.fd) }) },
		"runtime off": func(*rapid.T) { j := job(); h.begin(j, func(t *kfdtest.Thread) { _ = t.RuntimeDisable(j.fd) }) },
		"evict":       func(*rapid.T) { _ = h.m.Evict(job().MM(), kfd.TriggerTTM) },
		"restore":     func(*rapid.T) { _ = h.m.Restore(job().MM()) },
		"seize":       func(*rapid.T) { _ = dbg().Main().Seize(job().PID()) },
		"detach":      func(*rapid.T) { _ = dbg().Main().Detach(job().PID()) },
		"enable": func(*rapid.T) {
			d, j := dbg(), job()
			if _, err := d.device.Enable(j.PID(), enabledMask, d.pipe); errors.Is(err, unix.EALREADY) {
				h.stolen = true
			}
		},
		"disable":  func(*rapid.T) { _ = dbg().device.Disable(job().PID()) },
		"snapshot": func(*rapid.T) { _, _ = dbg().device.Snapshot(job().PID(), kfd.ECQueueNew.Mask()) },
		"suspend":  func(*rapid.T) { h.suspend(dbg(), job()) },
		"resume":   func(*rapid.T) { _, _ = dbg().device.Resume(job().PID(), []uint32{id()}) },
		"resume all": func(*rapid.T) {
			d, j := dbg(), job()
			if _, err := d.device.ResumeAll(j.PID()); err == nil && j.Suspended() != nil {
				h.rt.Fatalf("queues suspended after RESUME_QUEUES of all: %v", j.Suspended())
			}
		},
		"answer": func(*rapid.T) {
			_ = dbg().device.AnswerRuntime(job().PID())
		},
		"query": func(*rapid.T) { _, _, _ = dbg().device.QueryDebugEvent(job().PID(), enabledMask) },
		"pause": func(*rapid.T) {
			if d, j := dbg(), job(); h.steal(d, j) {
				_ = kfd.CRIUPause(d.Main(), d.thieving[j], j.PID())
			}
		},
		"unpause": func(*rapid.T) {
			if d, j := dbg(), job(); h.steal(d, j) {
				_ = kfd.CRIUUnpause(d.Main(), d.thieving[j], j.PID())
			}
		},
		"job dies": func(*rapid.T) {
			j := job()
			rapid.SampledFrom([]func(){j.Kill, j.Exec}).Draw(h.rt, "how")()
			j.Kill()
			h.jobs[slices.Index(h.jobs, j)] = h.spawn()
		},
		"debugger dies": func(*rapid.T) {
			d := dbg()
			d.Kill()
			for _, j := range h.jobs {
				if s, _ := j.KFD(); s.Enabled && s.Debugger == d.PID() && !h.stolen {
					h.rt.Fatalf("process %d has a dead debugger", s.PID)
				}
			}
			h.dbgs[slices.Index(h.dbgs, d)] = h.spawn()
		},
		"": func(*rapid.T) {
			synctest.Wait()
			h.check()
		},
	}
}

func (h *history) steal(d, j *actor) bool {
	if _, ok := d.thieving[j]; !ok {
		fd, err := d.Main().PidfdGetfd(j.PID(), j.fd)
		if err != nil {
			return false
		}
		d.thieving[j] = fd
	}
	return true
}

// suspend checks the result of the call against the state before it.
func (h *history) suspend(d, j *actor) {
	before := j.Queues()
	ids := rapid.SliceOfN(rapid.Uint32Range(0, 5), 1, 4).Draw(h.rt, "ids")
	array := slices.Clone(ids)
	args := kfd.TrapSuspendQueuesArgs{
		PID: uint32(j.PID()), Op: kfd.TrapSuspendQueues, QueueArrayPtr: kfd.PointerToSlice(array), NumQueues: uint32(len(array)),
	}
	r1, err := d.Main().Ioctl(d.fd, kfd.ReqDbgTrap, kfd.PointerTo(&args))
	if err != nil {
		if !slices.Equal(ids, array) {
			h.rt.Fatalf("%v, but the array became %x", err, array)
		}
		return
	}
	clean, after := 0, j.Queues()
	for i, got := range array {
		q, exists := before[ids[i]]
		able := exists && (q.Suspended || !q.Destroying && !q.Exceptions.Has(kfd.ECQueueNew))
		first := !slices.Contains(ids[:i], ids[i])
		want := ids[i]
		if !able || !first {
			want |= kfd.QueueInvalidMask
		} else {
			clean++
		}
		if got != want || able && !after[ids[i]].Suspended {
			h.rt.Fatalf("queue %d (%+v): %#x, want %#x; after it %+v", ids[i], q, got, want, after[ids[i]])
		}
	}
	if int(r1) != clean {
		h.rt.Fatalf("%d suspended, but %d ids are clean", int(r1), clean)
	}
}

func (h *history) check() {
	for _, s := range h.m.Processes() {
		for _, q := range s.Queues {
			wanted := q.Size > 0 && q.Percent > 0 && !q.Evicted && !q.Suspended
			if q.Running != wanted || q.Active != wanted {
				h.rt.Fatalf("process %d: %+v", s.PID, q)
			}
			gpu := slices.Index([]gpreempt.GPUID{gpuA, gpuB}, q.GPU)
			if q.Evicted != (s.Evicted[gpu] > 0) {
				h.rt.Fatalf("process %d with evictions %v: %+v", s.PID, s.Evicted, q)
			}
			if q.Suspended && !s.Enabled {
				h.rt.Fatalf("process %d is not debugged: %+v", s.PID, q)
			}
		}
	}
	if h.stolen {
		return
	}
	count := map[int32]int{}
	for _, s := range h.m.Processes() {
		if s.Enabled && s.Debugger != 0 {
			count[s.Debugger]++
		}
	}
	for _, d := range h.dbgs {
		if s, ok := d.KFD(); ok && s.Debugged != count[d.PID()] {
			h.rt.Fatalf("debugger %d debugs %d processes, its count is %d", d.PID(), count[d.PID()], s.Debugged)
		}
	}
}

// run runs a random history in a bubble. The history may harm the emulated kernel, as a
// debugger that exits after a refused ENABLE does; the driver's state is checked all the same.
func run(t *testing.T, rt *rapid.T, cfg kfdtest.Config) {
	cfg.Oops = func(string) {}
	var failure any // of rapid, which reports by a panic on its own goroutine
	synctest.Test(t, func(*testing.T) {
		h := &history{rt: rt, m: kfdtest.New(cfg)}
		defer func() {
			failure = recover()
			for _, a := range slices.Concat(h.jobs, h.dbgs) {
				a.Kill() // its waiting calls return
			}
		}()
		h.jobs = []*actor{h.spawn(), h.spawn()}
		h.dbgs = []*actor{h.spawn(), h.spawn()}
		rt.Repeat(h.actions())
	})
	if failure != nil {
		panic(failure)
	}
}

func TestRandomHistories(t *testing.T) {
	for _, profile := range driver.Profiles() {
		t.Run(profile, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				gfx := rapid.SampledFrom([]uint32{hws, single, 110000, mes}).Draw(rt, "gfx")
				run(t, rt, kfdtest.Config{Profile: profile, Nodes: []driver.Node{{ID: gpuA, GFX: gfx}, {ID: gpuB, GFX: gfx}}})
			})
		})
	}
}

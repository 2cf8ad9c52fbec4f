package kmap

import (
	"context"
	"errors"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

const (
	gpuA gpreempt.GPUID = 1000
	gpuB gpreempt.GPUID = 2000
	// hws and mes are versions of GPUs with each firmware.
	hws = 90402
	mes = 110000
)

// world is a mechanism in a process of a fake machine, in a synctest bubble.
type world struct {
	*testing.T
	*Mechanism
	machine *kfdtest.Machine
	daemon  *kfdtest.Process
	// gpus are those of processes, for the mechanism; that of the others is gpuA.
	gpus map[gpreempt.ProcessKey][]gpreempt.GPU
	// before, if not nil, is called before each change of limits, with how many processes it names.
	before func(targets int)
}

// atOnce is the kernel for a mechanism that saves waves at once.
type atOnce struct {
	kfd.Sys
	w *world
}

func (s atOnce) Ioctl(fd int, req kfd.Request, arg kfd.Pointer) (uintptr, error) {
	if req == kfd.ReqKmapSet {
		args := kfd.As[kfd.KmapSetArgs](arg)
		if args.Grace != 1 {
			s.w.Errorf("a grace period of %d: waves are to be saved at once", args.Grace)
		}
		if s.w.before != nil {
			s.w.before(int(args.NumTargets))
		}
	}
	return s.Sys.Ioctl(fd, req, arg)
}

// pidfds are those of a fake process.
type pidfds struct {
	w    *world
	pids map[int]*kfdtest.Process
	all  map[gpreempt.ProcessKey]*kfdtest.Process
}

func (h *pidfds) Pidfd(target gpreempt.ProcessKey) (int, error) {
	p := h.all[target]
	if p == nil || p.Dead() {
		return -1, mechanism.ErrGone
	}
	fd, err := h.w.daemon.Main().PidfdOpen(target.PID)
	if errors.Is(err, unix.ESRCH) {
		return -1, mechanism.ErrGone
	}
	h.pids[fd] = p
	return fd, err
}

func (h *pidfds) Exited(pidfd int) bool { return h.pids[pidfd].Dead() }
func (h *pidfds) ClosePidfd(pidfd int)  { _ = h.w.daemon.Main().Close(pidfd) } // it may be dead

// inWorld runs a test with a mechanism on a machine with two GPUs.
func inWorld(t *testing.T, profile string, gfx uint32, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t}
		w.machine = kfdtest.New(kfdtest.Config{
			Profile: profile, Nodes: []driver.Node{{ID: gpuA, GFX: gfx}, {ID: gpuB, GFX: gfx}},
			Oops: func(what string) { t.Errorf("the kernel reports: %s", what) },
		})
		w.start()
		test(w)
		if err := w.Close(); err != nil && !errors.Is(err, unix.EBADF) && !w.daemon.Dead() { // an exec has closed it
			t.Error(err)
		}
	})
}

// start starts a daemon.
func (w *world) start() {
	w.daemon = w.machine.Spawn()
	host := &pidfds{w: w, pids: map[int]*kfdtest.Process{}, all: map[gpreempt.ProcessKey]*kfdtest.Process{}}
	daemon := w.daemon
	w.Mechanism = New(Config{
		Open: func() (*kfd.Kmap, error) { return kfd.OpenKmapWith(atOnce{daemon.Main(), w}, kfd.KmapPath) },
		GPUs: func(key gpreempt.ProcessKey) []gpreempt.GPU {
			if gpus := w.gpus[key]; gpus != nil {
				return gpus
			}
			return []gpreempt.GPU{{ID: gpuA, Name: "first"}}
		},
		Host: host, Log: zaptest.NewLogger(w),
	})
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// job returns a process with a queue of each kind on each of the GPUs.
func (w *world) job(gpus ...gpreempt.GPUID) *kfdtest.Process {
	w.Helper()
	p := w.machine.Spawn()
	w.queues(p, gpus...)
	return p
}

func (w *world) queues(p *kfdtest.Process, gpus ...gpreempt.GPUID) {
	w.Helper()
	fd, err := p.Main().StartRuntime()
	w.must(err)
	for _, gpu := range gpus {
		for _, kind := range []uint32{kfd.QueueTypeComputeAQL, kfd.QueueTypeSDMA} {
			_, err := p.Main().CreateQueue(fd, gpu, kind)
			w.must(err)
		}
	}
	w.cfg.Host.(*pidfds).all[p.Key()] = p
}

// attach attaches to jobs.
func (w *world) attach(jobs ...*kfdtest.Process) (sessions []mechanism.Session) {
	w.Helper()
	for _, p := range jobs {
		w.cfg.Host.(*pidfds).all[p.Key()] = p
		s, err := w.Attach(w.Context(), p.Key())
		w.must(err)
		sessions = append(sessions, s)
	}
	return sessions
}

// wantErrors compares the errors of a batch, nil for none.
func (w *world) wantErrors(errs []error, want ...error) {
	w.Helper()
	if len(errs) != len(want) {
		w.Fatalf("%d errors, want %d", len(errs), len(want))
	}
	for i, err := range errs {
		if !errors.Is(err, want[i]) {
			w.Errorf("error %d is %v, want %v", i, err, want[i])
		}
	}
}

// wantHeld checks every queue of jobs.
func (w *world) wantHeld(held bool, jobs ...*kfdtest.Process) {
	w.Helper()
	synctest.Wait()
	for _, p := range jobs {
		for id, q := range p.Queues() {
			if q.Held != held || q.Active == held || q.Running == held {
				w.Errorf("queue %d of process %d is %+v, want held %v", id, p.PID(), q, held)
			}
		}
	}
}

// beats has the daemon work for a time.
func (w *world) beats(long time.Duration) {
	for end := time.Now().Add(long); time.Now().Before(end); time.Sleep(BeatEvery) {
		w.Beat()
		synctest.Wait()
	}
}

// fdOf returns the job's descriptor of the driver.
func fdOf(w *world, p *kfdtest.Process) int {
	w.Helper()
	for fd, name := range p.FDs() {
		if name == kfd.DevicePath {
			return fd
		}
	}
	w.Fatal("the job has not opened the driver")
	return -1
}

// SuspendAll returns the results of SuspendEach.
func (m *Mechanism) SuspendAll(ctx context.Context, sessions []mechanism.Session) []error {
	errs := make([]error, len(sessions))
	m.SuspendEach(ctx, sessions, func(i int, err error) { errs[i] = err })
	return errs
}

// ResumeAll returns the results of ResumeEach.
func (m *Mechanism) ResumeAll(ctx context.Context, sessions []mechanism.Session) []error {
	errs := make([]error, len(sessions))
	m.ResumeEach(ctx, sessions, func(i int, err error) { errs[i] = err })
	return errs
}

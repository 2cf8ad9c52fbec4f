package kfdtest_test

import (
	"errors"
	"os"
	"slices"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// The GPU nodes of the tests, and their kinds.
const (
	gpuA gpreempt.GPUID = 0x7a31
	gpuB gpreempt.GPUID = 0x8a31

	hws    = 90402
	single = 90008
	mes    = 120001
)

// enabledMask is the exceptions that the debuggers of the tests enable.
var enabledMask = kfd.Exceptions(kfd.ECQueueNew, kfd.ECProcessRuntime)

// scene is a machine with a job and a debugger, in a bubble.
type scene struct {
	*testing.T
	m      *kfdtest.Machine
	job    *kfdtest.Process
	fd     int // the job's
	dbg    *kfdtest.Process
	device *kfd.Device
	// events is the end of a pipe that the debugger reads, pipe the one it passes to ENABLE.
	events, pipe int
	// profile is that of the driver.
	profile string
	// eventPage is the job's memory for signal events, once it has provided it.
	eventPage uint64
	// oopses are where the driver would have crashed the kernel. The test takes those that
	// it expects.
	oopses []string
}

// stage runs a test on a machine with two GPUs of a kind, a job that started its
// runtime, and a debugger that traces it.
func stage(t *testing.T, profile string, gfx uint32, test func(s *scene)) {
	t.Helper()
	stageOf(t, kfdtest.Config{Profile: profile}, gfx, test)
}

func stageOf(t *testing.T, cfg kfdtest.Config, gfx uint32, test func(s *scene)) {
	t.Helper()
	cfg.Nodes = []driver.Node{{ID: gpuA, GFX: gfx}, {ID: gpuB, GFX: gfx}}
	stageOn(t, cfg, test)
}

// stageOn is stage on any machine.
func stageOn(t *testing.T, cfg kfdtest.Config, test func(s *scene)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &scene{T: t, profile: cfg.Profile}
		cfg.Oops = func(what string) { s.oopses = append(s.oopses, what) }
		s.m = kfdtest.New(cfg)
		s.job, s.dbg = s.m.Spawn(), s.m.Spawn()
		var err error
		s.fd, err = s.job.Main().StartRuntime()
		s.must(err)
		s.device = s.open(s.dbg)
		s.events, s.pipe, err = s.dbg.Main().Pipe(true)
		s.must(err)
		s.must(s.dbg.Main().Seize(s.job.PID()))
		test(s)
		synctest.Wait()
		for _, what := range s.oopses {
			t.Errorf("kernel oops: %s", what)
		}
	})
}

// onProfiles runs a test with each of the drivers, or with all.
func onProfiles(t *testing.T, gfx uint32, test func(s *scene), profiles ...string) {
	t.Helper()
	if len(profiles) == 0 {
		profiles = driver.Profiles()
	}
	for _, profile := range profiles {
		t.Run(profile, func(t *testing.T) { stage(t, profile, gfx, test) })
	}
}

// onEach runs a test with each driver and each kind of GPU.
func onEach(t *testing.T, test func(s *scene)) {
	t.Helper()
	for name, gfx := range map[string]uint32{"HWS": hws, "single VMID": single, "MES": mes} {
		t.Run(name, func(t *testing.T) { onProfiles(t, gfx, test) })
	}
}

func (s *scene) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *scene) want(errno unix.Errno, err error) {
	s.Helper()
	if !errors.Is(err, errno) && (errno != 0 || err != nil) {
		s.Fatalf("got %v, want %v", err, errno)
	}
}

func (s *scene) open(p *kfdtest.Process) *kfd.Device {
	s.Helper()
	d, err := kfd.OpenWith(p.Main(), kfd.DevicePath)
	s.must(err)
	return d
}

// queue creates a queue of the job.
func (s *scene) queue(gpu gpreempt.GPUID) uint32 {
	s.Helper()
	id, err := s.job.Main().CreateQueue(s.fd, gpu, kfd.QueueTypeComputeAQL)
	s.must(err)
	return id
}

func (s *scene) enable() kfd.RuntimeInfo {
	s.Helper()
	info, err := s.device.Enable(s.job.PID(), enabledMask, s.pipe)
	s.must(err)
	return info
}

// suspendable creates queues on the GPUs, enables debugging, and clears EC_QUEUE_NEW.
func (s *scene) suspendable(gpus ...gpreempt.GPUID) []uint32 {
	s.Helper()
	var ids []uint32
	for _, gpu := range gpus {
		ids = append(ids, s.queue(gpu))
	}
	s.enable()
	_, err := s.device.Snapshot(s.job.PID(), kfd.ECQueueNew.Mask())
	s.must(err)
	return ids
}

// suspend makes the call with any array, and returns its result and the array.
func (s *scene) suspend(ids ...uint32) (int, []uint32) {
	s.Helper()
	return s.suspendFor(kfd.GraceMin, ids...)
}

// suspendFor is suspend with another grace period.
func (s *scene) suspendFor(grace uint32, ids ...uint32) (int, []uint32) {
	s.Helper()
	ids = slices.Clone(ids)
	args := kfd.TrapSuspendQueuesArgs{
		PID: uint32(s.job.PID()), Op: kfd.TrapSuspendQueues, QueueArrayPtr: kfd.PointerToSlice(ids), NumQueues: uint32(len(ids)),
		GracePeriod: grace,
	}
	n, err := s.trap(kfd.PointerTo(&args))
	s.must(err)
	return n, ids
}

// trap makes a DBG_TRAP call of the debugger.
func (s *scene) trap(args kfd.Pointer) (int, error) {
	n, err := s.dbg.Main().Ioctl(s.fdOf(s.dbg), kfd.ReqDbgTrap, args)
	return int(n), err
}

// fdOf returns the process's descriptor of the driver.
func (s *scene) fdOf(p *kfdtest.Process) int {
	s.Helper()
	for fd, name := range p.FDs() {
		if name == kfd.DevicePath {
			return fd
		}
	}
	s.Fatal("the process has not opened the driver")
	return -1
}

// dots reads what the driver wrote to the debugger.
func (s *scene) dots() int {
	s.Helper()
	b := make([]byte, 100)
	n, err := s.dbg.Main().Read(s.events, b)
	if errors.Is(err, unix.EAGAIN) {
		return 0
	}
	s.must(err)
	return n
}

// running returns the IDs of the job's queues that are on a GPU.
func (s *scene) running() []uint32 {
	var ids []uint32
	for id, q := range s.job.Queues() {
		if q.Running {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// start makes a call that may wait, and returns a channel for its error.
func start(call func() error) <-chan error {
	c := make(chan error, 1)
	go func() { c <- call() }()
	synctest.Wait()
	return c
}

// waits reports whether a call has not returned.
func waits(c <-chan error) bool { return len(c) == 0 }

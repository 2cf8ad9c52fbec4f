package driver_test

import (
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// These tests cover what an emulator needs: the queues of a step, its own mmap offsets and
// clocks, and signals.

// client is a process that makes calls with arguments in its own memory.
type client struct {
	*testing.T
	d    *driver.Driver
	task *task
	file *driver.File
}

func newClient(t *testing.T, d *driver.Driver, pid int32) *client {
	t.Helper()
	c := &client{T: t, d: d, task: &task{tid: pid}}
	var err error
	if c.file, err = d.Open(c.task); err != nil {
		t.Fatal(err)
	}
	return c
}

// call makes a call that must succeed, and returns the words of the memory after it.
func (c *client) call(req kfd.Request, args ...uint32) []uint32 {
	c.Helper()
	memory := space{bytes: append(words(args...), make([]byte, 512)...)}
	if _, errno := c.d.Ioctl(c.task, c.file, req, memory); errno != 0 {
		c.Fatalf("%v: %v", req, errno)
	}
	return wordsOf(memory.bytes)
}

// queue creates an AQL queue on GPU 7. It returns the ID and the lower half of the
// doorbell's offset.
func (c *client) queue(ring uint32) (id, doorbell uint32) {
	c.Helper()
	out := c.call(kfdabi.ReqCreateQueue, ring, 0, ring+1, 0, ring+2, 0, 0, 0, 4096, 7, 2, 100, 5, 0, 0, 0, 0, 0, ring+3, 0, 8192, 64)
	return out[13], out[6]
}

func newDriver(t *testing.T, gfx uint32, cfg driver.Config, hook func(driver.Step) driver.Outcome) *driver.Driver {
	t.Helper()
	cfg.Profile, cfg.Nodes = "6.12", []driver.Node{{ID: 7, GFX: gfx}}
	d, err := driver.New(cfg, hook)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestStepsHaveTheQueuesThatTheHardwareGets(t *testing.T) {
	// step has the serials of a step's queues.
	type step struct {
		Kind    driver.StepKind
		Serials []uint64
	}
	for gfx, want := range map[uint32][]step{
		90402: {
			{"map", []uint64{1}},
			{Kind: "unmap"},
			{"map", []uint64{2, 1}},
			{Kind: "unmap"},
			{"map", []uint64{2, 1, 3}},
			{Kind: "unmap"},
			{"map", []uint64{1, 3}},
			{Kind: "unmap"},
			{"map", []uint64{4, 1, 3}},
		},
		120001: {{"add", []uint64{1}}, {"add", []uint64{2}}, {"add", []uint64{3}}, {"remove", []uint64{2}}, {"add", []uint64{4}}},
	} {
		var steps []step
		var last driver.MappedQueue
		d := newDriver(t, gfx, driver.Config{}, func(s driver.Step) driver.Outcome {
			got := step{Kind: s.Kind}
			for _, q := range s.Queues {
				got.Serials = append(got.Serials, q.Serial)
				last = q
			}
			steps = append(steps, got)
			return driver.Outcome{}
		})
		a, b := newClient(t, d, 10), newClient(t, d, 20)
		a.queue(1 << 20)
		id, _ := a.queue(2 << 20)
		b.queue(3 << 20)
		lastOfB := last
		a.call(kfdabi.ReqDestroyQueue, id)
		if again, _ := a.queue(4 << 20); again != id {
			t.Errorf("ID %d, want %d: only the serial distinguishes the two", again, id)
		}
		if diff := cmp.Diff(want, steps); diff != "" {
			t.Errorf("gfx %d (-want +got):\n%s", gfx, diff)
		}
		wantQueue := driver.MappedQueue{PID: 20, MM: int32(20), QueueState: driver.QueueState{
			Serial: 3, GPU: 7, Type: kfd.QueueTypeComputeAQL, Active: true, Exceptions: kfd.ECQueueNew.Mask(), Size: 4096, Percent: 100,
			Priority: 5, Ring: 3 << 20, Write: 3<<20 + 1, Read: 3<<20 + 2, Ctx: 3<<20 + 3, CtxSize: 8192,
		}}
		if diff := cmp.Diff(wantQueue, lastOfB); diff != "" {
			t.Errorf("queue on gfx %d (-want +got):\n%s", gfx, diff)
		}
	}
}

func TestQueuesAreReportedBeforeTheHardwareSeesThemAndAfterItsLastUse(t *testing.T) {
	type event struct {
		What   string
		Serial uint64
	}
	var got []event
	fail := false
	d := newDriver(t, 90402, driver.Config{Queue: func(q driver.MappedQueue, created bool) {
		what := "destroyed"
		if created {
			what = "created"
		}
		got = append(got, event{what, q.Serial})
	}}, func(s driver.Step) driver.Outcome {
		got = append(got, event{What: string(s.Kind)})
		if fail {
			return driver.Outcome{Errno: driver.EIO}
		}
		return driver.Outcome{}
	})
	c := newClient(t, d, 10)
	id, _ := c.queue(1 << 20)
	c.call(kfdabi.ReqDestroyQueue, id)
	c.queue(2 << 20)
	fail = true
	memory := space{bytes: append(words(3<<20, 0, 1, 0, 2, 0, 0, 0, 4096, 7, 2, 100, 5), make([]byte, 512)...)}
	if _, errno := d.Ioctl(c.task, c.file, kfdabi.ReqCreateQueue, memory); errno != driver.EIO {
		t.Errorf("a queue that the hardware rejected: %v, want EIO", errno)
	}
	fail = false
	d.MMReleased(c.task, c.task.MM())
	d.Release(c.file)
	want := []event{
		{"created", 1},
		{What: "map"},
		{What: "unmap"},
		{"destroyed", 1},
		{"created", 2},
		{What: "map"},
		{"created", 3},
		{What: "unmap"},
		{"destroyed", 3},
		{What: "unmap"},
		{"destroyed", 2},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestSDMAQueuesAreLimited(t *testing.T) {
	d, err := driver.New(driver.Config{
		Profile: "6.12", Nodes: []driver.Node{{ID: 7, GFX: 90402, SDMAQueues: 2, XGMIQueues: 1}, {ID: 8, GFX: 90402, SDMAQueues: 2}},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, b := newClient(t, d, 10), newClient(t, d, 20)
	var got []syscall.Errno
	create := func(c *client, gpu, kind uint32) {
		memory := space{bytes: append(words(1<<20, 0, 1, 0, 2, 0, 0, 0, 4096, gpu, kind, 100, 5), make([]byte, 512)...)}
		_, errno := c.d.Ioctl(c.task, c.file, kfdabi.ReqCreateQueue, memory)
		got = append(got, errno)
	}
	create(a, 7, kfd.QueueTypeSDMA)
	create(b, 7, kfd.QueueTypeSDMA)
	create(a, 7, kfd.QueueTypeSDMA) // the limit is for all processes together
	create(a, 8, kfd.QueueTypeSDMA)
	create(a, 7, kfd.QueueTypeSDMAXGMI)
	create(a, 7, kfd.QueueTypeSDMAXGMI)
	create(a, 7, kfd.QueueTypeComputeAQL)
	a.call(kfdabi.ReqDestroyQueue, 0)
	create(b, 7, kfd.QueueTypeSDMA)
	const ok, full = syscall.Errno(0), driver.ENOMEM
	if diff := cmp.Diff([]syscall.Errno{ok, ok, full, ok, ok, full, ok, ok}, got); diff != "" {
		t.Error(diff)
	}
}

func TestStreamWithoutAFreeDescriptorIsRefused(t *testing.T) {
	d := newDriver(t, 90402, driver.Config{}, nil)
	c := newClient(t, d, 10)
	full := &fullTask{c.task}
	f, err := d.Open(full)
	if err != nil {
		t.Fatal(err)
	}
	if _, errno := d.Ioctl(full, f, kfd.ReqSMIEvents, space{bytes: words(7, 0)}); errno != syscall.EMFILE {
		t.Errorf("%v, want EMFILE", errno)
	}
}

// fullTask has no free descriptor.
type fullTask struct{ *task }

func (t *fullTask) Leader() driver.Task           { return t }
func (t *fullTask) Install(*driver.SMIStream) int { return -int(syscall.EMFILE) }
func (t *fullTask) MM() driver.MM                 { return "full" }

func TestOffsetsAreThoseOfTheConfiguration(t *testing.T) {
	d := newDriver(t, 90402, driver.Config{Offsets: &driver.Offsets{
		Doorbells: func(id gpreempt.GPUID) uint64 { return uint64(id) << 13 },
		Events:    0x123000,
		MMIO:      func(id gpreempt.GPUID) uint64 { return uint64(id) << 12 },
	}}, nil)
	c := newClient(t, d, 10)
	c.queue(1 << 20)
	id, doorbell := c.queue(2 << 20)
	state, _ := d.Process(c.task.MM())
	if got := state.Queues[0]; got.ID != id || doorbell != 7<<13|got.Doorbell || got.Doorbell == state.Queues[1].Doorbell {
		t.Errorf("doorbell of queue %d at %#x: %+v", id, doorbell, state.Queues)
	}
	if out := c.call(kfdabi.ReqCreateEvent); out[0] != 0x123000 {
		t.Errorf("events at %#x", out[0])
	}
	out := c.call(kfdabi.ReqAllocMemoryOfGPU, 0, 1, 4096, 0, 0, 0, 0, 0, 7, kfdabi.AllocMMIORemap)
	if out[6] != 7<<12 {
		t.Errorf("registers at %#x", out[6])
	}
	if got := d.Allocations(c.task.MM())[0].Offset; got != 7<<12 {
		t.Errorf("allocation of registers at %#x", got)
	}
}

func TestStatesDistinguishContexts(t *testing.T) {
	d, err := driver.New(driver.Config{Profile: "7.2", Nodes: []driver.Node{{ID: 7, GFX: 90402}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, d, 10)
	other, err := d.Open(c.task)
	if err != nil {
		t.Fatal(err)
	}
	if _, errno := d.Ioctl(c.task, other, kfdabi.ReqCreateProcess, nil); errno != 0 {
		t.Fatal(errno)
	}
	type context struct {
		MM        driver.MM
		Secondary bool
	}
	var got []context
	for _, p := range d.Processes() {
		got = append(got, context{p.MM, p.Secondary})
	}
	if diff := cmp.Diff([]context{{int32(10), false}, {int32(10), true}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The clock does not advance: a wait times out when the configuration calls wake.
func TestWaitUsesTheClockOfTheConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type timer struct {
			d    time.Duration
			wake func()
		}
		timers := make(chan timer, 8)
		stopped := 0
		now := driver.Clocks{Raw: 5e9, Boot: 6e9, GPU: 7}
		d := newDriver(t, 90402, driver.Config{
			Clock: func() driver.Clocks { return now },
			After: func(d time.Duration, wake func()) func() {
				timers <- timer{d, wake}
				return func() { stopped++ }
			},
		}, nil)
		c := newClient(t, d, 10)
		out := c.call(kfdabi.ReqGetClockCounters, 0, 0, 0, 0, 0, 0, 0, 0, 7)
		if diff := cmp.Diff([]uint32{7, 0, 705032704, 1, 1705032704, 1, 1e9, 0}, out[:8]); diff != "" {
			t.Errorf("counters (-want +got):\n%s", diff)
		}
		id := c.call(kfdabi.ReqCreateEvent)[6]
		// The event's ID is 40 bytes behind the array's beginning, which is at 32.
		args := make([]uint32, 19)
		args[0], args[2], args[4], args[18] = 32, 1, 250, id
		wait := func() <-chan []uint32 {
			done := make(chan []uint32, 1)
			go func() { done <- c.call(kfdabi.ReqWaitEvents, args...) }()
			return done
		}
		done := wait()
		timeout := <-timers
		if timeout.d != 250*time.Millisecond {
			t.Errorf("a timer of %v", timeout.d)
		}
		timeout.wake()
		if result := (<-done)[5]; result != kfdabi.WaitResultTimeout {
			t.Errorf("result %d", result)
		}
		done = wait()
		late := <-timers
		synctest.Wait()
		d.SignalEvent(c.task.MM(), id)
		if result := (<-done)[5]; result != kfdabi.WaitResultComplete || stopped != 2 {
			t.Errorf("result %d, %d timers stopped", result, stopped)
		}
		late.wake() // a timer that was stopped too late has no effect
	})
}

func TestInterruptedWaitIsRestartedWithTheRestOfTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDriver(t, 90402, driver.Config{}, nil)
		c := newClient(t, d, 10)
		id := c.call(kfdabi.ReqCreateEvent)[6]
		args := make([]uint32, 19)
		args[0], args[2], args[4], args[18] = 32, 1, 1000, id
		memory := space{bytes: words(args...)}
		memory.bytes = append(memory.bytes, make([]byte, 64)...)
		done := make(chan error, 1)
		go func() {
			_, errno := d.Ioctl(c.task, c.file, kfdabi.ReqWaitEvents, memory)
			done <- errno
		}()
		time.Sleep(400 * time.Millisecond)
		synctest.Wait()
		if waiting, interruptible := d.Waiting(c.task); !waiting || !interruptible {
			t.Error("the call does not wait interruptibly")
		}
		c.task.interrupted = true
		d.Wake()
		if err := <-done; err != driver.ERESTARTSYS { //nolint:errorlint // errnos as they come
			t.Errorf("interrupted: %v", err)
		}
		if left := wordsOf(memory.bytes)[4]; left != 600 {
			t.Errorf("%d ms remain, want 600", left)
		}
		// A pending signal takes precedence over events.
		if _, errno := d.Ioctl(c.task, c.file, kfdabi.ReqWaitEvents, memory); errno != driver.ERESTARTSYS {
			t.Errorf("with a signal pending: %v", errno)
		}
	})
}

func BenchmarkSignalEvent(b *testing.B) {
	d, err := driver.New(driver.Config{Profile: "6.12", Nodes: []driver.Node{{ID: 7, GFX: 90402}}}, nil)
	if err != nil {
		b.Fatal(err)
	}
	t := &task{tid: 10}
	f, err := d.Open(t)
	if err != nil {
		b.Fatal(err)
	}
	if _, errno := d.Ioctl(t, f, kfdabi.ReqCreateEvent, space{bytes: make([]byte, 32)}); errno != 0 {
		b.Fatal(errno)
	}
	for b.Loop() {
		d.SignalEvent(t.MM(), 1)
	}
}

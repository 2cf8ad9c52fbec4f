package kfdtest_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// do makes a call of the job.
func (s *scene) do(req kfd.Request, args kfd.Pointer) error {
	_, err := s.job.Main().Ioctl(s.fd, req, args)
	return err
}

func (s *scene) newEvent(kind uint32, autoReset bool) uint32 {
	s.Helper()
	args := kfdabi.CreateEventArgs{EventType: kind}
	if autoReset {
		args.AutoReset = 1
	}
	if s.profile == "7.3" && s.eventPage == 0 {
		s.eventPage = s.alloc(gpuA, kfdabi.AllocGTT, 8*kfdabi.SignalEventLimit)
		args.EventPageOffset = s.eventPage
	}
	s.must(s.do(kfdabi.ReqCreateEvent, kfd.PointerTo(&args)))
	return args.EventID
}

func (s *scene) setEvent(id uint32) error {
	return s.do(kfdabi.ReqSetEvent, kfd.PointerTo(&kfdabi.SetEventArgs{EventID: id}))
}

func (s *scene) resetEvent(id uint32) error {
	return s.do(kfdabi.ReqResetEvent, kfd.PointerTo(&kfdabi.ResetEventArgs{EventID: id}))
}

func (s *scene) destroyEvent(id uint32) error {
	return s.do(kfdabi.ReqDestroyEvent, kfd.PointerTo(&kfdabi.DestroyEventArgs{EventID: id}))
}

// waited is the result of a wait.
type waited struct {
	Result, Timeout uint32
	Ages            []uint64
	Err             error
}

// wait waits for the events ids. ages are their last known ages, if any.
func (s *scene) wait(t *kfdtest.Thread, all bool, timeout uint32, ids []uint32, ages ...uint64) waited {
	list := make([]kfdabi.SignalEventData, len(ids))
	for i, id := range ids {
		list[i].EventID = id
		if i < len(ages) {
			list[i].LastEventAge = ages[i]
		}
	}
	args := kfdabi.WaitEventsArgs{EventsPtr: kfd.PointerToSlice(list), NumEvents: uint32(len(ids)), Timeout: timeout}
	if all {
		args.WaitForAll = 1
	}
	_, err := t.Ioctl(s.fd, kfdabi.ReqWaitEvents, kfd.PointerTo(&args))
	w := waited{Result: args.WaitResult, Timeout: args.Timeout, Err: err}
	for i := range ages {
		w.Ages = append(w.Ages, list[i].LastEventAge)
	}
	return w
}

// poll returns the signalled events among ids, without waiting.
func (s *scene) poll(ids ...uint32) (signalled []uint32) {
	for _, id := range ids {
		if w := s.wait(s.job.Main(), false, 0, []uint32{id}); w.Result == kfdabi.WaitResultComplete && w.Err == nil {
			signalled = append(signalled, id)
		}
	}
	return signalled
}

// waiting begins a wait in a new thread.
func (s *scene) waiting(all bool, timeout uint32, ids []uint32) (*kfdtest.Thread, <-chan waited) {
	t := s.job.NewThread()
	c := make(chan waited, 1)
	go func() { c <- s.wait(t, all, timeout, ids) }()
	synctest.Wait()
	return t, c
}

// pass advances the time.
func (s *scene) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (s *scene) same(want, got any) {
	s.Helper()
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b unix.Errno) bool { return a == b })); diff != "" {
		s.Errorf("(-want +got):\n%s", diff)
	}
}

func TestEventsGetTheLowestFreeIDs(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		var ids []uint32
		for _, kind := range []uint32{kfdabi.EventTypeSignal, kfdabi.EventTypeMemory, kfdabi.EventTypeDebug, kfdabi.EventTypeHWException, 77} {
			ids = append(ids, s.newEvent(kind, false))
		}
		s.same([]uint32{1, 1 << 30, 2, 1<<30 + 1, 1<<30 + 2}, ids)
		s.must(s.destroyEvent(1))
		s.must(s.destroyEvent(1 << 30))
		s.want(unix.EINVAL, s.destroyEvent(1))
		s.same([]uint32{1, 1 << 30}, []uint32{s.newEvent(kfdabi.EventTypeSignal, false), s.newEvent(99, false)})
		args := kfdabi.CreateEventArgs{EventType: kfdabi.EventTypeSignal}
		s.must(s.do(kfdabi.ReqCreateEvent, kfd.PointerTo(&args)))
		s.same(kfdabi.CreateEventArgs{EventPageOffset: 2 << 62, EventTriggerData: 3, EventID: 3, EventSlotIndex: 3}, args)
	})
}

func TestSignalEventsNeedThePageOfTheProcessSince73(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		want := unix.Errno(0)
		if s.profile == "7.3" {
			want = unix.ENOMEM
		}
		for _, kind := range []uint32{kfdabi.EventTypeSignal, kfdabi.EventTypeDebug} {
			s.want(want, s.do(kfdabi.ReqCreateEvent, kfd.PointerTo(&kfdabi.CreateEventArgs{EventType: kind})))
		}
		s.must(s.do(kfdabi.ReqCreateEvent, kfd.PointerTo(&kfdabi.CreateEventArgs{EventType: kfdabi.EventTypeMemory})))
	})
}

func TestOnlySignalEventsAreSetByTheProcess(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.want(unix.EINVAL, s.setEvent(0)) // the driver's own
		s.want(unix.EINVAL, s.setEvent(1))
		for _, kind := range []uint32{kfdabi.EventTypeDebug, kfdabi.EventTypeMemory, kfdabi.EventTypeHWException} {
			id := s.newEvent(kind, false)
			s.want(unix.EINVAL, s.setEvent(id))
			s.want(unix.EINVAL, s.resetEvent(id))
		}
		id := s.newEvent(kfdabi.EventTypeSignal, false)
		s.must(s.setEvent(id))
		s.same([]uint32{id}, s.poll(id))
		s.same([]uint32{id}, s.poll(id))
		s.must(s.resetEvent(id))
		s.same([]uint32(nil), s.poll(id))
	})
}

func TestGPUSignalsOnlySignalAndDebugEvents(t *testing.T) {
	stage(t, "7.2", hws, func(s *scene) {
		ids := []uint32{
			s.newEvent(kfdabi.EventTypeSignal, false), s.newEvent(kfdabi.EventTypeDebug, false),
			s.newEvent(kfdabi.EventTypeMemory, false), s.newEvent(kfdabi.EventTypeHWException, false),
		}
		for _, id := range ids {
			s.m.SignalEvent(s.job.MM(), id)
		}
		s.m.SignalEvent(s.job.MM(), 4000)
		s.m.SignalEvent(s.dbg.MM(), 1) // another process's ID
		s.same(ids[:2], s.poll(ids...))
		s.job.Kill()
		s.m.SignalEvent(s.job.MM(), ids[0]) // too late
	})
}

func TestAutoResetEventEndsOneWait(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		id := s.newEvent(kfdabi.EventTypeSignal, true)
		s.must(s.setEvent(id))
		s.must(s.setEvent(id)) // signals are not counted
		s.same([]uint32{id}, s.poll(id))
		s.same([]uint32(nil), s.poll(id))
		_, first := s.waiting(false, kfdabi.WaitForever, []uint32{id})
		_, second := s.waiting(false, kfdabi.WaitForever, []uint32{id})
		s.m.SignalEvent(s.job.MM(), id) // it wakes the wait, and the event stays unsignalled
		s.same(waited{Timeout: kfdabi.WaitForever}, <-first)
		s.same(waited{Timeout: kfdabi.WaitForever}, <-second)
		s.same([]uint32(nil), s.poll(id))
	})
}

func TestSecondSignalBeforeTheSleeperRunsStays(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		first, second := s.newEvent(kfdabi.EventTypeSignal, true), s.newEvent(kfdabi.EventTypeSignal, true)
		_, done := s.waiting(true, kfdabi.WaitForever, []uint32{first, second})
		s.must(s.setEvent(first))
		synctest.Wait()
		s.must(s.setEvent(first)) // the wait already has this event
		s.same([]uint32{first}, s.poll(first))
		s.must(s.setEvent(second))
		s.same(waited{Timeout: kfdabi.WaitForever}, <-done)
		s.same([]uint32(nil), s.poll(first, second))
	})
}

func TestWaitForOneOrForAll(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		ids := []uint32{s.newEvent(kfdabi.EventTypeSignal, false), s.newEvent(kfdabi.EventTypeSignal, false)}
		_, all := s.waiting(true, kfdabi.WaitForever, ids)
		_, one := s.waiting(false, kfdabi.WaitForever, ids)
		s.must(s.setEvent(ids[1]))
		s.same(waited{Timeout: kfdabi.WaitForever}, <-one)
		synctest.Wait()
		if len(all) != 0 {
			s.Error("one event ended the wait for all")
		}
		s.must(s.setEvent(ids[0]))
		s.same(waited{Timeout: kfdabi.WaitForever}, <-all)
		s.same(waited{}, s.wait(s.job.Main(), true, 0, nil)) // an empty wait completes
		s.same(waited{Result: kfdabi.WaitResultTimeout}, s.wait(s.job.Main(), false, 0, []uint32{s.newEvent(77, false)}))
	})
}

func TestWaitTimesOut(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		id := s.newEvent(kfdabi.EventTypeSignal, false)
		began := time.Now()
		s.same(waited{Result: kfdabi.WaitResultTimeout, Timeout: 1500}, s.wait(s.job.Main(), false, 1500, []uint32{id}))
		s.same(1500*time.Millisecond, time.Since(began))
		_, done := s.waiting(false, 1500, []uint32{id})
		s.pass(time.Second)
		s.must(s.setEvent(id))
		s.same(waited{Timeout: 1500}, <-done)
	})
}

func TestSignalEndsAWaitAndUndoesIt(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		taken, other := s.newEvent(kfdabi.EventTypeSignal, true), s.newEvent(kfdabi.EventTypeSignal, false)
		s.must(s.setEvent(taken))
		thread, done := s.waiting(true, 2000, []uint32{taken, other})
		s.same([]uint32(nil), s.poll(taken))
		s.pass(700 * time.Millisecond)
		thread.Interrupt()
		// The restarted call waits for the rest of the time.
		s.same(waited{Result: kfdabi.WaitResultFail, Timeout: 1300, Err: unix.EINTR}, <-done)
		s.same([]uint32{taken}, s.poll(taken))
		thread, done = s.waiting(false, kfdabi.WaitForever, []uint32{other})
		thread.Interrupt()
		s.same(waited{Result: kfdabi.WaitResultFail, Timeout: kfdabi.WaitForever, Err: unix.EINTR}, <-done)
		_, done = s.waiting(false, kfdabi.WaitForever, []uint32{other})
		s.job.Kill()
		s.same(waited{Result: kfdabi.WaitResultFail, Timeout: kfdabi.WaitForever, Err: unix.EOWNERDEAD}, <-done)
	})
}

func TestDestroyedEventFailsItsWaits(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		gone, stays := s.newEvent(kfdabi.EventTypeSignal, false), s.newEvent(kfdabi.EventTypeSignal, false)
		thread, done := s.waiting(false, kfdabi.WaitForever, []uint32{gone, stays})
		if !thread.Blocked() {
			s.Error("it does not wait")
		}
		s.must(s.destroyEvent(gone))
		s.same(waited{Result: kfdabi.WaitResultFail, Timeout: kfdabi.WaitForever, Err: unix.EIO}, <-done)
		s.must(s.setEvent(stays))
		s.same([]uint32{stays}, s.poll(stays))
	})
}

func TestWaitForUnknownEventsFails(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		fail := func(err unix.Errno) waited { return waited{Result: kfdabi.WaitResultFail, Err: err} }
		id := s.newEvent(kfdabi.EventTypeSignal, true)
		s.must(s.setEvent(id))
		s.same(fail(unix.EINVAL), s.wait(s.job.Main(), false, 0, []uint32{id, 7}))
		s.same([]uint32(nil), s.poll(id)) // events that were reset by then are lost
		args := kfdabi.WaitEventsArgs{NumEvents: 1}
		s.want(unix.EFAULT, s.do(kfdabi.ReqWaitEvents, kfd.PointerTo(&args)))
		args = kfdabi.WaitEventsArgs{EventsPtr: kfdtest.Unmapped(), NumEvents: 1}
		s.want(unix.EFAULT, s.do(kfdabi.ReqWaitEvents, kfd.PointerTo(&args)))
		s.same(kfdabi.WaitResultFail, args.WaitResult)
	})
}

func TestNumberOfEventsToWaitForIsLimited(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		limit := uint32(4 << 20 / 56)
		if s.device.Version().Minor >= 23 {
			limit = kfdabi.SignalEventLimit
		}
		for n, want := range map[uint32]unix.Errno{limit: unix.EFAULT, limit + 1: unix.ENOMEM} {
			args := kfdabi.WaitEventsArgs{EventsPtr: kfdtest.Unmapped(), NumEvents: n}
			s.want(want, s.do(kfdabi.ReqWaitEvents, kfd.PointerTo(&args)))
		}
	})
}

func TestAgeReportsSignalsBetweenWaits(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		id := s.newEvent(kfdabi.EventTypeSignal, true)
		s.must(s.setEvent(id))
		s.must(s.setEvent(id))
		s.same([]uint32{id}, s.poll(id))
		got := s.wait(s.job.Main(), false, 0, []uint32{id}, 1) // a new event has age 1
		want := waited{Ages: []uint64{3}}
		if s.device.Version().Minor < 14 {
			want = waited{Result: kfdabi.WaitResultTimeout, Ages: []uint64{1}}
		}
		s.same(want, got)
		s.same(waited{Result: kfdabi.WaitResultTimeout, Ages: []uint64{3}}, s.wait(s.job.Main(), false, 0, []uint32{id}, 3))
	})
}

func TestEventPageLimitsTheSignals(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		for range 255 {
			s.newEvent(kfdabi.EventTypeSignal, false)
		}
		args := kfdabi.CreateEventArgs{EventType: kfdabi.EventTypeSignal}
		s.want(unix.ENOSPC, s.do(kfdabi.ReqCreateEvent, kfd.PointerTo(&args)))
		s.newEvent(kfdabi.EventTypeMemory, false)
		// Another page is too late.
		args.EventPageOffset = s.alloc(gpuA, kfdabi.AllocGTT, 8*kfdabi.SignalEventLimit)
		s.want(unix.EINVAL, s.do(kfdabi.ReqCreateEvent, kfd.PointerTo(&args)))
	})
	stage(t, "6.12", hws, func(s *scene) {
		page := s.alloc(gpuA, kfdabi.AllocGTT, 8*kfdabi.SignalEventLimit)
		for _, handle := range []uint64{s.alloc(gpuA, kfdabi.AllocGTT, 4096), s.allocUserptr(gpuA), page + 9, 1} {
			args := kfdabi.CreateEventArgs{EventPageOffset: handle}
			s.want(unix.EINVAL, s.do(kfdabi.ReqCreateEvent, kfd.PointerTo(&args)))
		}
		args := kfdabi.CreateEventArgs{EventPageOffset: page}
		s.must(s.do(kfdabi.ReqCreateEvent, kfd.PointerTo(&args)))
		for range kfdabi.SignalEventLimit - 2 {
			s.newEvent(kfdabi.EventTypeSignal, false)
		}
		args = kfdabi.CreateEventArgs{}
		s.want(unix.ENOSPC, s.do(kfdabi.ReqCreateEvent, kfd.PointerTo(&args)))
		s.want(unix.EPERM, s.free(page))
	})
}

func TestCreateEventWaitsForADebuggersSuspend(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		ids := s.suspendable(gpuA)
		event := s.newEvent(kfdabi.EventTypeSignal, false)
		hold := s.m.Inject(kfdtest.Fault{Stage: kfdtest.Hardware, Step: driver.StepUnmap, Hold: true})
		suspended := start(func() error { s.suspend(ids...); return nil })
		if !waits(suspended) {
			s.Fatal("the hardware does not hold the call")
		}
		created := start(func() error {
			_, err := s.job.NewThread().Ioctl(s.fd, kfdabi.ReqCreateEvent, kfd.PointerTo(&kfdabi.CreateEventArgs{}))
			return err
		})
		if !waits(created) {
			s.Error("an event was created while a debugger has event_mutex")
		}
		s.must(s.setEvent(event)) // this does not take event_mutex
		hold.Release()
		s.must(<-suspended)
		s.must(<-created)
	})
}

func TestFaultSignalsMemoryEventsAndStopsTheProcess(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		s.queue(gpuA)
		s.queue(gpuB)
		ids := []uint32{s.newEvent(kfdabi.EventTypeMemory, true), s.newEvent(kfdabi.EventTypeHWException, true)}
		s.m.Fault(s.job.MM(), gpuA, driver.MemoryFault{VA: 0x7f00dead000, NotPresent: true, ReadOnly: true})
		s.same([]uint32{ids[0]}, s.memoryEvents(ids, kfdabi.MemoryEventData{
			NotPresent: 1, ReadOnly: 1, VA: 0x7f00dead000, GPUID: uint32(gpuA), EventID: ids[0],
		}))
		s.same([]uint32{1}, s.running())
	})
}

// memoryEvents polls, and compares the data of the first of the events.
func (s *scene) memoryEvents(ids []uint32, want kfdabi.MemoryEventData) (signalled []uint32) {
	s.Helper()
	list := make([]kfdabi.MemoryEventData, 1)
	for _, id := range ids {
		list[0] = kfdabi.MemoryEventData{EventID: id}
		args := kfdabi.WaitEventsArgs{EventsPtr: kfd.PointerToSlice(list), NumEvents: 1}
		s.must(s.do(kfdabi.ReqWaitEvents, kfd.PointerTo(&args)))
		if args.WaitResult == kfdabi.WaitResultComplete {
			signalled = append(signalled, id)
			s.same(want, list[0])
		}
	}
	return signalled
}

func TestDebuggerDecidesWhetherTheRuntimeGetsAFault(t *testing.T) {
	stage(t, "7.2", hws, func(s *scene) {
		id := s.newEvent(kfdabi.EventTypeMemory, true)
		s.queue(gpuA)
		_, err := s.device.Enable(s.job.PID(), kfdabi.ECDeviceMemoryViolation.Mask(), s.pipe)
		s.must(err)
		s.m.Fault(s.job.MM(), gpuA, driver.MemoryFault{VA: 0x1000, NoExecute: true})
		s.same(1, s.dots())
		s.same([]uint32(nil), s.poll(id))
		s.same([]uint32{0}, s.running())
		args := kfd.TrapSendRuntimeEventArgs{
			PID: uint32(s.job.PID()), Op: kfd.TrapSendRuntimeEvent, ExceptionMask: kfdabi.ECDeviceMemoryViolation.Mask(), GPUID: uint32(gpuA),
		}
		_, err = s.trap(kfd.PointerTo(&args))
		s.must(err)
		s.same([]uint32{id}, s.memoryEvents([]uint32{id}, kfdabi.MemoryEventData{
			NoExecute: 1, VA: 0x1000, GPUID: uint32(gpuA), EventID: id,
		}))
		s.same([]uint32(nil), s.running())
	})
}

func TestResetSignalsAnEventOfEveryProcess(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		id := s.newEvent(kfdabi.EventTypeHWException, true)
		memory := s.newEvent(kfdabi.EventTypeMemory, true)
		s.m.StartReset(gpuB)
		s.m.EndReset(gpuB)
		list := make([]kfdabi.HWEventData, 1)
		list[0].EventID = id
		args := kfdabi.WaitEventsArgs{EventsPtr: kfd.PointerToSlice(list), NumEvents: 1}
		s.must(s.do(kfdabi.ReqWaitEvents, kfd.PointerTo(&args)))
		s.same(kfdabi.HWEventData{MemoryLost: 1, GPUID: uint32(gpuB), EventID: id}, list[0])
		s.same([]uint32(nil), s.poll(memory))
	})
}

package kfdemu

import (
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/seccomp"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The time of the GPUs stands still while the emulator works for a caller, also after the
// hardware has done its part, and runs before, after, and while the call waits.
func TestTimeOfTheGPUsStandsStillDuringTheEmulatorsWork(t *testing.T) {
	if err := seccomp.Supported(); err != nil {
		t.Skip("no emulated machine here: ", err)
	}
	var e *Emulator
	var mu sync.Mutex
	still := map[string]bool{} // before each answer
	e, err := New(Config{Machine: "mi210", Event: func(v Event) {
		if v.Kind == EventCall {
			a, b := e.rt.Now(), e.rt.Now()
			mu.Lock()
			defer mu.Unlock()
			still[v.Op] = a == b
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	// runs returns when time has passed.
	runs := func() {
		for from := e.rt.Now(); e.rt.Now() == from; {
			continue
		}
	}
	gpu := uint32(e.GPUs()[0].ID)
	here(t, e, func() {
		sys := kfd.Kernel()
		fd, err := sys.Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC)
		if err != nil {
			t.Error(err)
			return
		}
		defer sys.Close(fd)
		call := func(req kfd.Request, arg kfd.Pointer) {
			if _, err := sys.Ioctl(fd, req, arg); err != nil {
				t.Errorf("%v: %v", req, err)
			}
		}
		runs()
		call(kfd.ReqGetVersion, kfd.PointerTo(&kfd.GetVersionArgs{}))
		runs()
		queue := kfdabi.CreateQueueArgs{GPUID: gpu, QueueType: kfd.QueueTypeSDMA, RingSize: 4096, QueuePercentage: 100, RingBaseAddress: 1 << 20}
		call(kfdabi.ReqCreateQueue, kfd.PointerTo(&queue)) // waits for the hardware
		call(kfdabi.ReqDestroyQueue, kfd.PointerTo(&kfdabi.DestroyQueueArgs{QueueID: queue.QueueID}))
		event := kfdabi.CreateEventArgs{EventType: kfdabi.EventTypeSignal, NodeID: gpu}
		call(kfdabi.ReqCreateEvent, kfd.PointerTo(&event))
		tid := int32(unix.Gettid())
		awaited := make(chan struct{})
		go func() {
			defer close(awaited)
			for waiting := false; !waiting; {
				waiting, _ = e.Waiting(tid)
			}
			runs()
			task, err := e.host.Task(tid)
			if err != nil {
				t.Error(err)
				return
			}
			e.driver.SignalEvent(task.Space(), event.EventID)
		}()
		data := []kfdabi.SignalEventData{{EventID: event.EventID}}
		call(kfdabi.ReqWaitEvents, kfd.PointerTo(&kfdabi.WaitEventsArgs{EventsPtr: kfd.PointerToSlice(data), NumEvents: 1, Timeout: kfdabi.WaitForever}))
		<-awaited
		runs()
	})
	mu.Lock()
	defer mu.Unlock()
	delete(still, "WAIT_EVENTS") // no step of the hardware ended it
	delete(still, "open")        // it may wait for the end of another process
	want := map[string]bool{"GET_VERSION": true, "CREATE_QUEUE": true, "DESTROY_QUEUE": true, "CREATE_EVENT": true}
	if diff := cmp.Diff(want, still); diff != "" {
		t.Errorf("the time stood still before the answer (-want +got):\n%s", diff)
	}
}

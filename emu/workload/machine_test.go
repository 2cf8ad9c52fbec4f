package workload

import (
	"encoding/binary"
	"maps"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// machine is a fake driver with GPUs that run packets from this process's memory. It is a
// Sys and works in synctest bubbles: a tick of the GPUs is virtual time there.
type machine struct {
	t    *testing.T
	gpus []gpreempt.GPUID
	// interrupt n interrupts every n-th call without effect; 0 interrupts none.
	interrupt int
	// fault is the fault at the eighth packet of each queue.
	fault fault
	mem   *os.File // of this process

	mu      sync.Mutex
	resumed *sync.Cond
	calls   int
	refuse  map[kfd.Request]unix.Errno
	queues  map[uint32]*fakeQueue
	events  map[uint32]chan struct{}
	maps    int
	open    int
	made    int
	runtime bool
}

// fault is a fault of a GPU.
type fault int

const (
	none      fault = iota
	twice           // runs it twice
	never           // does not run it, but completes it
	swapped         // runs the value of the next in its place
	decrement       // decrements the signal twice
	progress        // does not report its end
	header          // leaves the packet in its slot
	behind          // does not increment the read index
	silent          // does not raise the event
	lost            // does not raise the event of this packet
	flipped         // flips a bit of a copy
	fence           // writes something else to a fence
)

const (
	doorbellOffset = 3 << 62
	eventOffset    = 1<<63 | 1<<62>>1
	tick           = 20 * time.Microsecond
)

type fakeQueue struct {
	m         *machine
	args      kfdabi.CreateQueueArgs
	suspended bool
	gone      chan struct{}
	ran       int
	ticks     int // of the packet at the head
	read      uint64
}

func newMachine(t *testing.T, gpus ...gpreempt.GPUID) *machine {
	t.Helper()
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		t.Fatalf("open this process's memory: %v", err)
	}
	m := &machine{t: t, gpus: gpus, mem: mem, refuse: map[kfd.Request]unix.Errno{}, queues: map[uint32]*fakeQueue{}, events: map[uint32]chan struct{}{}}
	m.resumed = sync.NewCond(&m.mu)
	t.Cleanup(func() { _ = mem.Close() })
	return m
}

// leftovers returns what a client has not released.
func (m *machine) leftovers() (queues, events, mappings, files int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.queues), len(m.events), m.maps, m.open
}

func (m *machine) suspend(id uint32, on bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.queues[id].suspended = on
	m.resumed.Broadcast()
}

// interrupted counts a call and reports whether it is interrupted. mu is held.
func (m *machine) interrupted() bool {
	m.calls++
	return m.interrupt > 0 && m.calls%m.interrupt == 0
}

func (m *machine) Open(path string, _ int) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.interrupted():
		return -1, unix.EINTR
	case path != kfd.DevicePath:
		return -1, unix.ENOENT
	}
	m.open++
	return 1000 + m.open, nil
}

func (m *machine) Close(int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open--
	return nil
}

func (m *machine) Read(int, []byte) (int, error)  { return 0, unix.EINVAL }
func (m *machine) Write(int, []byte) (int, error) { return 0, unix.EINVAL }

func (m *machine) Map(_ int, offset int64, n int) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if offset >= 0 {
		return nil, unix.EINVAL // all offsets of the driver have bit 63 set
	}
	m.maps++
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
}

func (m *machine) MapAt(mem []byte, _ int, _ int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.maps++
	return nil
}

func (m *machine) Unmap(mem []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.maps--
	return unix.Munmap(mem)
}

func (m *machine) Ioctl(_ int, req kfd.Request, arg kfd.Pointer) (uintptr, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.interrupted() {
		return 0, unix.EINTR
	}
	if errno := m.refuse[req]; errno != 0 {
		return 0, errno
	}
	switch req {
	case kfdabi.ReqGetProcessAperturesNew:
		args := kfd.As[kfdabi.ProcessAperturesNewArgs](arg)
		for i := range kfd.SliceAt[kfdabi.ProcessDeviceApertures](args.Apertures, int(args.NumOfNodes)) {
			kfd.SliceAt[kfdabi.ProcessDeviceApertures](args.Apertures, i+1)[i].GPUID = uint32(m.gpus[i])
		}
		args.NumOfNodes = uint32(len(m.gpus))
	case kfdabi.ReqRuntimeEnable:
		on := kfd.As[kfdabi.RuntimeEnableArgs](arg).ModeMask&kfdabi.RuntimeEnableModeEnable != 0
		switch {
		case on && m.runtime:
			return 0, unix.EBUSY
		case on && len(m.queues) > 0:
			return 0, unix.EEXIST
		}
		m.runtime = on
	case kfdabi.ReqCreateEvent:
		args := kfd.As[kfdabi.CreateEventArgs](arg)
		args.EventID = lowest(m.events)
		args.EventSlotIndex, args.EventPageOffset = args.EventID, eventOffset
		m.events[args.EventID] = make(chan struct{}, 1)
	case kfdabi.ReqDestroyEvent:
		delete(m.events, kfd.As[kfdabi.DestroyEventArgs](arg).EventID)
	case kfdabi.ReqSetEvent:
		m.raise(kfd.As[kfdabi.SetEventArgs](arg).EventID)
	case kfdabi.ReqWaitEvents:
		return 0, m.waitEvents(kfd.As[kfdabi.WaitEventsArgs](arg))
	case kfdabi.ReqCreateQueue:
		m.createQueue(kfd.As[kfdabi.CreateQueueArgs](arg))
	case kfdabi.ReqDestroyQueue:
		return 0, m.destroyQueue(kfd.As[kfdabi.DestroyQueueArgs](arg).QueueID)
	default:
		m.t.Errorf("the client called %v", req)
		return 0, unix.EINVAL
	}
	return 0, nil
}

// lowest returns the lowest free ID.
func lowest[T any](m map[uint32]T) uint32 {
	for id := uint32(0); ; id++ {
		if _, taken := m[id]; !taken {
			return id
		}
	}
}

func (m *machine) raise(id uint32) {
	select {
	case m.events[id] <- struct{}{}:
	default:
	}
}

func (m *machine) waitEvents(args *kfdabi.WaitEventsArgs) error {
	event := m.events[kfd.As[kfdabi.SignalEventData](args.EventsPtr).EventID]
	m.mu.Unlock()
	defer m.mu.Lock()
	timer := time.NewTimer(time.Duration(args.Timeout) * time.Millisecond)
	defer timer.Stop()
	select {
	case <-event:
		args.WaitResult = kfdabi.WaitResultComplete
	case <-timer.C:
		args.WaitResult = kfdabi.WaitResultTimeout
	}
	return nil
}

func (m *machine) createQueue(args *kfdabi.CreateQueueArgs) {
	args.QueueID = lowest(m.queues)
	args.DoorbellOffset = doorbellOffset | uint64(args.GPUID)<<46 | uint64(args.QueueID)*8
	q := &fakeQueue{m: m, args: *args, gone: make(chan struct{})}
	m.queues[args.QueueID] = q
	m.made++
	go q.run()
}

func (m *machine) destroyQueue(id uint32) error {
	q := m.queues[id]
	if q == nil {
		return unix.EINVAL
	}
	for q.suspended {
		m.resumed.Wait()
	}
	close(q.gone)
	delete(m.queues, id)
	return nil
}

// run makes the queue run packets. It polls less often while the queue is empty.
func (q *fakeQueue) run() {
	const idle = 50 * tick
	clock := time.NewTicker(tick)
	defer clock.Stop()
	for {
		select {
		case <-q.gone:
			return
		case <-clock.C:
		}
		if q.turn() {
			clock.Reset(tick)
		} else {
			clock.Reset(idle)
		}
	}
}

// turn spends a tick, if there is work.
func (q *fakeQueue) turn() bool {
	q.m.mu.Lock()
	defer q.m.mu.Unlock()
	if q.suspended || closed(q.gone) || q.read >= q.u64(q.args.WritePointerAddress) {
		return false
	}
	if q.args.QueueType == kfd.QueueTypeSDMA {
		q.copy()
	} else {
		q.dispatch()
	}
	return true
}

// get and put access the memory of the process for the GPU.
func (q *fakeQueue) get(addr uint64, n int) []byte {
	b := make([]byte, n)
	if _, err := q.m.mem.ReadAt(b, int64(addr)); err != nil {
		q.m.t.Errorf("the GPU reads %d bytes at %#x: %v", n, addr, err)
	}
	return b
}

func (q *fakeQueue) put(addr uint64, b []byte) {
	if _, err := q.m.mem.WriteAt(b, int64(addr)); err != nil {
		q.m.t.Errorf("the GPU writes %d bytes at %#x: %v", len(b), addr, err)
	}
}

func (q *fakeQueue) u64(addr uint64) uint64 { return binary.LittleEndian.Uint64(q.get(addr, 8)) }
func (q *fakeQueue) put64(addr, v uint64)   { q.put(addr, binary.LittleEndian.AppendUint64(nil, v)) }

// wrong reports whether this is the packet with the fault f.
func (q *fakeQueue) wrong(f fault) bool { return q.m.fault == f && q.ran == 8 }

// dispatch spends a tick on the packet at the head.
func (q *fakeQueue) dispatch() {
	packet := q.packet(q.read)
	if !engine.Ready(packet) {
		return
	}
	if engine.HeaderOf(packet).Type() == engine.PacketDispatch {
		kernel, _ := engine.DecodeKernel(q.get(engine.DecodeDispatch(packet).Kernel, engine.KernelBytes))
		mix := engine.DecodeMix(q.get(engine.DecodeDispatch(packet).Kernarg, engine.MixBytes))
		if ticks := int(kernel.Duration / tick); q.ticks < ticks {
			q.ticks++
			q.put64(mix.Progress, uint64(engine.WholeGPU*q.ticks/(ticks+1)))
			return
		}
	}
	for _, dep := range engine.DecodeBarrier(packet).Deps {
		if engine.HeaderOf(packet).Type() == engine.PacketBarrierAnd && dep != 0 && q.u64(dep+engine.SignalValue) != 0 {
			return
		}
	}
	q.finish()
}

func (q *fakeQueue) packet(n uint64) []byte { return q.get(q.slot(n), engine.PacketBytes) }

func (q *fakeQueue) slot(n uint64) uint64 {
	return q.args.RingBaseAddress + n*engine.PacketBytes%uint64(q.args.RingSize)
}

// finish ends the packet at the head, in the order of package engine.
func (q *fakeQueue) finish() {
	q.ran++
	q.ticks = 0
	packet := q.packet(q.read)
	if engine.HeaderOf(packet).Type() == engine.PacketDispatch && !q.wrong(never) {
		mix := engine.DecodeMix(q.get(engine.DecodeDispatch(packet).Kernarg, engine.MixBytes))
		q.mix(mix)
		if q.wrong(twice) {
			q.mix(mix)
		}
	}
	if !q.wrong(header) {
		q.put(q.slot(q.read), []byte{byte(engine.PacketInvalid), 0})
	}
	q.read++
	if q.m.fault != behind || q.ran < 8 {
		q.put64(q.args.ReadPointerAddress, q.read)
	}
	at := engine.CompletionOf(packet)
	signal := engine.DecodeSignal(q.get(at, engine.SignalBytes))
	signal.Value--
	if q.wrong(decrement) {
		signal.Value--
	}
	q.put64(at+engine.SignalValue, uint64(signal.Value))
	if signal.Mailbox != 0 && (q.m.fault != silent || q.ran < 8) && !q.wrong(lost) {
		q.put64(signal.Mailbox, uint64(signal.Event))
		q.m.raise(signal.Event)
	}
}

func (q *fakeQueue) mix(mix engine.Mix) {
	count, hash := q.u64(mix.Result), q.u64(mix.Result+8)
	if q.wrong(swapped) {
		mix.Value++
	}
	q.put64(mix.Result+8, engine.MixHash(hash, mix.Value))
	q.put64(mix.Result, count+1)
	if !q.wrong(progress) {
		q.put64(mix.Progress, engine.WholeGPU)
	}
}

// copy runs one SDMA command.
func (q *fakeQueue) copy() {
	at, size := q.read%uint64(q.args.RingSize), uint64(q.args.RingSize)
	rest := min(size-at, q.u64(q.args.WritePointerAddress)-q.read)
	command, n, err := engine.DecodeCommand(q.get(q.args.RingBaseAddress+at, int(rest)))
	if err != nil {
		q.m.t.Errorf("an SDMA command of the client: %v", err)
		return
	}
	if c, ok := command.(engine.Copy); ok {
		q.ran++
		b := q.get(c.Source, int(c.Bytes))
		if q.wrong(flipped) {
			b[len(b)-1] ^= 1
		}
		q.put(c.Target, b)
	}
	q.read += uint64(n)
	q.put64(q.args.ReadPointerAddress, q.read)
	switch c := command.(type) {
	case engine.Fence:
		if q.wrong(fence) {
			c.Value += 7
		}
		q.put(c.Address, binary.LittleEndian.AppendUint32(nil, c.Value))
	case engine.Trap:
		q.m.raise(c.Event)
	}
}

// queue finds a queue.
func (m *machine) queue(id uint32) *fakeQueue {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.queues[id]
}

// finish runs the packet at the head of a queue, even of one that was destroyed.
func (m *machine) finish(q *fakeQueue) {
	m.mu.Lock()
	defer m.mu.Unlock()
	q.finish()
}

// living returns the IDs of the existing queues.
func (m *machine) living() []uint32 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.queues))
}

package kfdemu

import (
	"encoding/binary"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// pm4Client is a program with a queue of PM4 packets and an event, by system calls.
type pm4Client struct {
	t        *testing.T
	fd       int
	memory   []byte // pm4At
	doorbell []byte
	event    uint32
	slot     uint64 // the address of the event's slot
	at       uint64 // the write pointer, in dwords
}

// Offsets in a pm4Client's memory.
const (
	pm4Read, pm4WritePtr, pm4Words = 0, 8, 64
	pm4RingAt, pm4RingBytes        = 4096, 4096
	pm4BufferAt, pm4Bytes          = 8192, 12288
)

func addressOf(b []byte) uint64 { return uint64(reflect.ValueOf(b).Pointer()) }

func (c *pm4Client) must(what string, err error) {
	if err != nil {
		c.t.Errorf("%s: %v", what, err)
	}
}

func (c *pm4Client) ioctl(req kfd.Request, arg kfd.Pointer) {
	_, err := kfd.Kernel().Ioctl(c.fd, req, arg)
	c.must(req.String(), err)
}

func (c *pm4Client) open(gpu uint32) {
	var err error
	c.fd, err = unix.Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	c.must("open", err)
	c.memory, err = unix.Mmap(-1, 0, pm4Bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	c.must("mmap", err)
	event := kfdabi.CreateEventArgs{EventType: kfdabi.EventTypeSignal, AutoReset: 1}
	c.ioctl(kfdabi.ReqCreateEvent, kfd.PointerTo(&event))
	page, err := unix.Mmap(c.fd, int64(event.EventPageOffset), 8*kfdabi.SignalEventLimit, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	c.must("map the events", err)
	c.event, c.slot = event.EventID, addressOf(page)+8*uint64(event.EventSlotIndex)
	queue := kfdabi.CreateQueueArgs{
		RingBaseAddress: c.address(pm4RingAt), RingSize: pm4RingBytes, ReadPointerAddress: c.address(pm4Read), WritePointerAddress: c.address(pm4WritePtr),
		GPUID: gpu, QueueType: kfd.QueueTypeCompute, QueuePercentage: 100, QueuePriority: 7,
	}
	c.ioctl(kfdabi.ReqCreateQueue, kfd.PointerTo(&queue))
	const doorbells = 8192
	bells, err := unix.Mmap(c.fd, int64(queue.DoorbellOffset&^(doorbells-1)), doorbells, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	c.must("map the doorbells", err)
	c.doorbell = bells[queue.DoorbellOffset&(doorbells-1):][:8]
}

func (c *pm4Client) address(off int) uint64 { return addressOf(c.memory) + uint64(off) }

func (c *pm4Client) word(i int) uint32 {
	return binary.LittleEndian.Uint32(c.memory[pm4Words+4*i:])
}

func pm4Packet(op uint32, body ...uint32) (b []byte) {
	b = binary.LittleEndian.AppendUint32(b, 3<<30|uint32(len(body)-1)<<16|op<<8|2)
	for _, w := range body {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return b
}

// store is WRITE_DATA to word i, launch DISPATCH_DIRECT, buffer INDIRECT_BUFFER, and signal
// RELEASE_MEM with an interrupt.
func (c *pm4Client) store(i int, v uint32) []byte {
	at := c.address(pm4Words + 4*i)
	return pm4Packet(0x37, 5<<8|1<<20, uint32(at), uint32(at>>32), v)
}

func (c *pm4Client) launch() []byte { return pm4Packet(0x15, 1, 1, 1, 0x21) }

func (c *pm4Client) buffer(b []byte) []byte {
	copy(c.memory[pm4BufferAt:], b)
	at := c.address(pm4BufferAt)
	return pm4Packet(0x3f, uint32(at), uint32(at>>32), uint32(len(b)/4)|1<<23)
}

func (c *pm4Client) signal() []byte {
	return pm4Packet(0x49, 0x14|5<<8, 1<<29|2<<24, uint32(c.slot), uint32(c.slot>>32), c.event, 0, c.event)
}

// submit puts packets on the ring and rings the doorbell.
func (c *pm4Client) submit(packets ...[]byte) {
	for _, p := range packets {
		for i := 0; i < len(p); i += 4 {
			copy(c.memory[pm4RingAt+int(4*c.at%pm4RingBytes):], p[i:i+4])
			c.at++
		}
	}
	binary.LittleEndian.PutUint64(c.memory[pm4WritePtr:], c.at)
	binary.LittleEndian.PutUint64(c.doorbell, c.at)
}

// wait waits for the event, at most for some milliseconds, and reports whether it came.
func (c *pm4Client) wait(ms uint32) bool {
	data := kfdabi.SignalEventData{EventID: c.event}
	args := kfdabi.WaitEventsArgs{EventsPtr: kfd.PointerTo(&data), NumEvents: 1, Timeout: ms}
	c.ioctl(kfdabi.ReqWaitEvents, kfd.PointerTo(&args))
	return args.WaitResult == kfdabi.WaitResultComplete
}

// A queue is taken off the GPU in the middle of an indirect buffer: nothing behind that place
// takes effect until it is back, and everything does then.
func TestPM4QueueGoesOnInTheMiddleOfABuffer(t *testing.T) {
	for _, machine := range []string{"mi210", "mi300x", "rx7900xtx"} {
		t.Run(machine, func(t *testing.T) {
			e, _ := start(t, Config{Machine: machine, KernelTime: 10 * time.Millisecond})
			here(t, e, func() {
				c := &pm4Client{t: t}
				c.open(uint32(e.GPUs()[0].ID))
				mm := e.driver.Processes()[0].MM
				between, rounds := 0, 0
				for between < 3 && rounds < 200 && !t.Failed() {
					rounds++
					n := uint32(rounds)
					b := append(c.store(0, n), c.launch()...)
					b = append(append(b, c.launch()...), c.store(1, n)...)
					c.submit(c.buffer(b), c.store(2, n), c.signal())
					for c.word(0) != n { // it is in the buffer
						c.wait(1)
					}
					c.must("evict", e.driver.Evict(mm, kfdabi.TriggerUserptr))
					was := [3]uint32{c.word(0), c.word(1), c.word(2)}
					if was[2] != n {
						between++
						if c.wait(20) {
							t.Error("an event of a queue that is evicted")
						}
					}
					if is := [3]uint32{c.word(0), c.word(1), c.word(2)}; is != was {
						t.Errorf("the words became %d while the queue was evicted, from %d", is, was)
					}
					c.must("restore", e.driver.Restore(mm))
					if was[2] != n && !c.wait(30_000) {
						t.Error("no event after the queue was restored")
						break
					}
					for c.wait(1) { // a signal that came before the eviction
					}
					for binary.LittleEndian.Uint32(c.memory[pm4Read:]) != uint32(c.at)%(pm4RingBytes/4) {
						c.wait(1)
					}
					if is, want := [3]uint32{c.word(0), c.word(1), c.word(2)}, [3]uint32{n, n, n}; is != want {
						t.Errorf("the words are %d, want %d", is, want)
					}
				}
				if between == 0 {
					t.Error("no eviction was in the middle of a buffer")
				}
				c.must("close", unix.Close(c.fd))
			})
		})
	}
}

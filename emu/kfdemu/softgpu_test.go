package kfdemu

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// module is a fake of emu/softgpu: the other side of the channel.
type module struct {
	t         *testing.T
	channel   *os.File
	doorbells []byte
	seq       uint64
	// stop ends the packet processor and returns its counters.
	stop func() SoftGPUCounters
}

func newModule(t *testing.T) *module {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	bells, err := unix.MemfdCreate("doorbells", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	page := os.Getpagesize()
	if err := unix.Ftruncate(bells, int64(2*page)); err != nil {
		t.Fatal(err)
	}
	m := &module{t: t, channel: os.NewFile(uintptr(fds[0]), "module")}
	if m.doorbells, err = unix.Mmap(bells, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	channel, file := os.NewFile(uintptr(fds[1]), "channel"), os.NewFile(uintptr(bells), "doorbells")
	s, err := NewSoftGPU(channel, file, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	type end struct {
		sum SoftGPUCounters
		err error
	}
	ended := make(chan end, 1)
	go func() {
		sum, err := s.Serve(ctx)
		ended <- end{sum, err}
	}()
	stopped := false
	m.stop = func() SoftGPUCounters {
		stopped = true
		cancel()
		e := <-ended
		if e.err != nil {
			t.Error(e.err)
		}
		return e.sum
	}
	t.Cleanup(func() {
		if !stopped {
			m.stop()
		}
		for _, f := range []*os.File{channel, file, m.channel} {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := unix.Munmap(m.doorbells); err != nil {
			t.Error(err)
		}
	})
	return m
}

// send sends a record about a queue of the process.
func (m *module) send(kind uint32, q *softRing) {
	m.t.Helper()
	m.seq++
	const longer = 8 // as a newer module sends them
	r := softRecord{
		Size: minSoftRecord + longer, Kind: kind, Seq: m.seq, GPU: q.gpu, PID: q.pid, Type: kfd.QueueTypeComputeAQL, MQD: q.mqd,
		Ring: q.base + softRingAt, RingBytes: softSlots * engine.PacketBytes, Read: q.base + softRead, Write: q.base + softWrite,
		Doorbell: q.doorbell,
	}
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, r); err != nil {
		m.t.Fatal(err)
	}
	b.Write(make([]byte, longer))
	if _, err := m.channel.Write(b.Bytes()); err != nil {
		m.t.Fatal(err)
	}
}

// receive returns the next reply.
func (m *module) receive() (r softReply) {
	m.t.Helper()
	b := make([]byte, 64)
	n, err := m.channel.Read(b)
	if err == nil {
		_, err = binary.Decode(b[:n], binary.NativeEndian, &r)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	return r
}

// unmap unmaps a queue and waits until it has stopped.
func (m *module) unmap(q *softRing) {
	m.t.Helper()
	m.send(softUnmap, q)
	want := softReply{Kind: softAck, GPU: q.gpu, Seq: m.seq, PID: q.pid}
	if diff := cmp.Diff(want, m.receive()); diff != "" {
		m.t.Fatalf("the answer to UNMAP (-want +got):\n%s", diff)
	}
}

// Where things are in the memory of a queue: one page.
const (
	softWrite   = 0
	softRead    = 128
	softResult  = 256
	softKernel  = 320
	softSignal  = 384
	softMailbox = 448
	softRingAt  = 1024
	softSlots   = 16
	softKernarg = 2048
)

// softRing is a queue in the memory of a real process. The test writes to it in the
// process's place.
type softRing struct {
	t              *testing.T
	gpu            uint32
	pid            int32
	mqd            uint64
	base, doorbell uint64
	mem            *os.File
	bells          []byte
	pushed, hash   uint64
}

func (m *module) queue(gpu uint32, doorbell int, kernel time.Duration) *softRing {
	m.t.Helper()
	c := startProgram(m.t, nil)
	mem, err := os.OpenFile(procPath(c.pid, "mem"), os.O_RDWR, 0)
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { _ = mem.Close() })
	q := &softRing{
		t: m.t, gpu: gpu, pid: c.pid, base: c.numbers(0, "map %d x", unix.PROT_READ|unix.PROT_WRITE)[0],
		doorbell: uint64(doorbell), mem: mem, bells: m.doorbells,
	}
	q.mqd = q.base
	b := make([]byte, engine.KernelBytes)
	engine.Kernel{Op: engine.OpMix, Duration: kernel, Occupancy: 1000}.Put(b)
	q.write(softKernel, b)
	for slot := range softSlots {
		q.write(softRingAt+slot*engine.PacketBytes, []byte{byte(engine.PacketInvalid)})
	}
	return q
}

func (q *softRing) write(off int, b []byte) {
	q.t.Helper()
	if _, err := q.mem.WriteAt(b, int64(q.base)+int64(off)); err != nil {
		q.t.Fatal(err)
	}
}

func (q *softRing) u64(off int) uint64 {
	q.t.Helper()
	b := make([]byte, 8)
	if _, err := q.mem.ReadAt(b, int64(q.base)+int64(off)); err != nil {
		q.t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(b)
}

func (q *softRing) put64(off int, v uint64) { q.write(off, binary.LittleEndian.AppendUint64(nil, v)) }

// push submits a packet. It reports false while the ring is full.
func (q *softRing) push(signal engine.Signal) bool {
	q.t.Helper()
	if q.pushed-q.u64(softRead) >= softSlots {
		return false
	}
	slot := int(q.pushed % softSlots)
	b := make([]byte, engine.SignalBytes)
	signal.Put(b)
	q.write(softSignal, b)
	clear(b)
	engine.Mix{Result: q.base + softResult, Value: q.pushed}.Put(b)
	q.write(softKernarg+slot*engine.MixBytes, b[:engine.MixBytes])
	packet := make([]byte, engine.PacketBytes)
	first := engine.Dispatch{
		Header: engine.MakeHeader(engine.PacketDispatch, true), Dimensions: 1,
		Kernel: q.base + softKernel, Kernarg: q.base + softKernarg + uint64(slot*engine.MixBytes), Completion: q.base + softSignal,
	}.Put(packet)
	q.write(softRingAt+slot*engine.PacketBytes+4, packet[4:])
	q.write(softRingAt+slot*engine.PacketBytes, binary.LittleEndian.AppendUint32(nil, first))
	q.hash = engine.MixHash(q.hash, q.pushed)
	q.pushed++
	q.put64(softWrite, q.pushed)
	binary.NativeEndian.PutUint64(q.bells[q.doorbell:], q.pushed-1)
	return true
}

// ran returns how many packets have run.
func (q *softRing) ran() uint64 { return q.u64(softResult) }

// check checks that each packet has run once and in order.
func (q *softRing) check() {
	q.t.Helper()
	got := []uint64{q.u64(softRead), q.ran(), q.u64(softResult + 8)}
	if diff := cmp.Diff([]uint64{q.pushed, q.pushed, q.hash}, got); diff != "" {
		q.t.Errorf("read index, packets that ran and their hash (-want +got):\n%s", diff)
	}
}

func TestSoftGPURunsEachPacketOnceWhileItsQueueIsUnmappedAndMapped(t *testing.T) {
	m := newModule(t)
	const packets = 300
	job, other := m.queue(77, 64, 300*time.Microsecond), m.queue(99, os.Getpagesize()+8, 100*time.Microsecond)
	m.send(softMap, job)
	m.send(softMap, other)
	for job.ran() < packets {
		for job.pushed < packets && job.push(engine.Signal{Kind: engine.SignalUser, Value: 1}) {
		}
		m.unmap(job)
		before := job.ran()
		// Time passes on the other GPU.
		other.push(engine.Signal{Kind: engine.SignalUser, Value: 1})
		until(t, "the other process's packet has run", func() bool { return other.ran() == other.pushed })
		if after := job.ran(); after != before {
			t.Fatalf("%d packets ran on a queue that was unmapped", after-before)
		}
		m.send(softMap, job)
		until(t, "a packet has run", func() bool { return job.ran() > before || before == job.pushed })
	}
	for _, q := range []*softRing{job, other} {
		until(t, "the last packet has been completed", func() bool { return q.u64(softRead) == q.pushed })
		q.check()
		m.unmap(q)
		m.send(softRemove, q)
		m.unmap(q) // answered although the queue is unknown
	}
	if diff := cmp.Diff(SoftGPUCounters{Executed: job.pushed + other.pushed}, m.stop()); diff != "" {
		t.Errorf("the packets (-want +got):\n%s", diff)
	}
}

// The driver frees an MQD before it says that its queue is gone.
func TestSoftGPUKeepsQueuesWithTheSameMQDApart(t *testing.T) {
	m := newModule(t)
	old, young := m.queue(77, 0, time.Millisecond), m.queue(77, 8, time.Millisecond)
	old.mqd, young.mqd = 1, 1
	m.send(softMap, old)
	m.unmap(old)
	m.send(softMap, young)
	m.send(softRemove, old)
	young.push(engine.Signal{Kind: engine.SignalUser, Value: 1})
	until(t, "the second process's packet has run", func() bool { return young.u64(softRead) == 1 })
	young.check()
}

func TestSoftGPUUnmapsInTheMiddleOfAKernel(t *testing.T) {
	m := newModule(t)
	q := m.queue(77, 0, 10*time.Hour)
	q.push(engine.Signal{Kind: engine.SignalUser, Value: 1})
	for range 3 {
		m.send(softMap, q)
		m.unmap(q)
	}
	m.send(softRemove, q)
	m.unmap(q)
	if got := q.ran(); got != 0 {
		t.Errorf("%d packets have run", got)
	}
}

func TestSoftGPUInterruptsForASignalWithAnEvent(t *testing.T) {
	m := newModule(t)
	q := m.queue(77, 0, time.Millisecond)
	m.send(softMap, q)
	q.push(engine.Signal{Kind: engine.SignalUser, Value: 1, Mailbox: q.base + softMailbox, Event: 9})
	if diff := cmp.Diff(softReply{Kind: softInterrupt, GPU: 77, PID: q.pid, Event: 9}, m.receive()); diff != "" {
		t.Errorf("the interrupt (-want +got):\n%s", diff)
	}
	if got := q.u64(softMailbox); got != 9 {
		t.Errorf("the event's slot has %d, want 9", got)
	}
}

func TestSoftGPUAnswersForAProcessThatEnded(t *testing.T) {
	m := newModule(t)
	q := m.queue(77, 0, 10*time.Hour)
	q.push(engine.Signal{Kind: engine.SignalUser, Value: 1})
	m.send(softMap, q)
	if err := unix.Kill(int(q.pid), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, "the process has ended", func() bool { return state(q.pid) == 'Z' })
	late := *q
	late.mqd++ // one that is mapped after the end of its process
	m.send(softMap, &late)
	for _, q := range []*softRing{q, &late} {
		m.unmap(q)
		m.send(softRemove, q)
	}
	m.unmap(q)
	if got := m.stop(); got.Executed+got.Lost+got.Repeated != 0 {
		t.Errorf("packets of a process that ended: %+v", got)
	}
}

package kfdemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// SoftGPU executes the packets of queues of the real driver on GPU nodes without a GPU: a
// module of the driver (emu/softgpu) reports the queues that it maps and unmaps through
// a device file. A queue that is unmapped has stopped, in the middle of its kernel, before
// the module is answered. The duration of everything is EMULATED.
type SoftGPU struct {
	channel, doorbells *os.File
	trouble            func(error)
	host               *Host
	rt                 *gpumodel.Realtime
	engine             *engine.Engine
	// acks go before interrupts: the driver waits for them.
	acks, interrupts chan softReply
	over             chan struct{}

	// gpus are the driver's IDs of the modelled GPUs, in their order.
	gpus   []uint32
	procs  map[*Space]*softProcess
	queues map[softKey]*softQueue
	serial uint32
}

// softKey names a queue from its first MAP to its REMOVE. The driver may use the memory of
// an MQD for another process's queue before that.
type softKey struct {
	gpu uint32
	pid int32
	mqd uint64
}

// softProcess is a process that has queues.
type softProcess struct {
	key    gpreempt.ProcessKey // the model's
	memory *softMemory
	queues int
}

// softQueue is a queue that the driver has mapped before.
type softQueue struct {
	serial  uint32
	space   *Space // nil: no packet of it is executed
	ref     gpumodel.QueueRef
	release func() error // unmaps its doorbell
}

// SoftGPUCounters are the packets on all queues so far.
type SoftGPUCounters struct {
	Executed  uint64 `json:"executed"`
	Lost      uint64 `json:"lost"`
	Repeated  uint64 `json:"repeated"`
	Abandoned uint64 `json:"abandoned"`
	Pending   uint64 `json:"pending"`
}

// softSpec is the modelled GPU. The module unmaps and maps queue by queue, which the model
// does for GPUs with MES.
func softSpec() (gpumodel.Spec, error) {
	spec, err := gpumodel.PresetByName("mi300x")
	mes, mesErr := gpumodel.PresetByName("rx7900xtx")
	spec.MES, spec.Costs.RemoveQueue, spec.Costs.AddQueue = true, mes.Costs.RemoveQueue, mes.Costs.AddQueue
	return spec, errors.Join(err, mesErr)
}

// maxSoftGPUs is the most nodes of the module.
const maxSoftGPUs = 8

// NewSoftGPU returns a packet processor for the module behind channel. A mapping of
// doorbells has the doorbells of all queues: the module's channel has that, too. trouble
// is called with what fails for one queue or process, by any goroutine. The caller must
// call Serve, which releases everything but the files.
func NewSoftGPU(channel, doorbells *os.File, trouble func(error)) (*SoftGPU, error) {
	spec, err := softSpec()
	if err != nil {
		return nil, err
	}
	host, err := NewHost(func() {}, trouble)
	if err != nil {
		return nil, err
	}
	timer, err := hrtimer.New()
	if err != nil {
		host.Close()
		return nil, err
	}
	s := &SoftGPU{
		channel: channel, doorbells: doorbells, trouble: trouble, host: host, rt: gpumodel.Start(gpumodel.New(spec, maxSoftGPUs, 1), timer),
		acks: make(chan softReply, 1024), interrupts: make(chan softReply, 1024), over: make(chan struct{}), procs: map[*Space]*softProcess{}, queues: map[softKey]*softQueue{},
	}
	s.engine, err = engine.New(s.rt, engine.Config{OnFault: func(serial, address uint64) {
		s.trouble(fmt.Errorf("queue %d made its GPU access %#x", serial, address))
	}})
	if err != nil {
		host.Close()
		return nil, errors.Join(err, s.rt.Close())
	}
	return s, nil
}

// Serve executes packets until ctx is done, and returns their counters.
func (s *SoftGPU) Serve(ctx context.Context) (SoftGPUCounters, error) {
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		s.answer()
	}()
	stop := context.AfterFunc(ctx, func() { _ = s.channel.SetReadDeadline(longAgo) })
	err := s.listen()
	stop()
	if ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		err = nil
	}
	close(s.over)
	<-answered
	err = errors.Join(err, s.engine.Close())
	var sum SoftGPUCounters
	s.rt.Do(func(m *gpumodel.Machine) {
		for _, c := range m.Counters() {
			sum.Executed += c.Executed
			sum.Lost += c.Lost
			sum.Repeated += c.Repeated
			sum.Abandoned += c.Abandoned
			sum.Pending += c.Pending
		}
	})
	for _, q := range s.queues {
		err = errors.Join(err, q.release())
	}
	s.host.Close()
	return sum, errors.Join(err, s.rt.Close())
}

// listen handles the module's records.
func (s *SoftGPU) listen() error {
	buf := make([]byte, 64*maxSoftRecord)
	for {
		n, err := s.channel.Read(buf)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, fs.ErrClosed):
			return nil
		case err != nil:
			return fmt.Errorf("read the queues that the driver maps: %w", err)
		}
		for records := buf[:n]; len(records) > 0; {
			r, rest, err := decodeSoftRecord(records)
			if err != nil {
				return err
			}
			records = rest
			s.handle(r)
		}
	}
}

func (s *SoftGPU) handle(r softRecord) {
	key := softKey{r.GPU, r.PID, r.MQD}
	q := s.queues[key]
	switch r.Kind {
	case softMap:
		if q == nil {
			q = s.attach(r)
			s.queues[key] = q
		}
		s.move(q, (*gpumodel.Machine).AddQueue, nil)
	case softUnmap:
		s.move(q, (*gpumodel.Machine).RemoveQueue, func() { s.reply(s.acks, softReply{Kind: softAck, GPU: r.GPU, Seq: r.Seq, PID: r.PID}) })
	case softRemove:
		if q != nil {
			s.detach(q)
			delete(s.queues, key)
		}
	default:
		s.trouble(fmt.Errorf("the module sent an unknown record: %+v", r))
	}
}

// move maps or unmaps a queue. done, which may be nil, is called once that has taken its
// time.
func (s *SoftGPU) move(q *softQueue, how func(*gpumodel.Machine, gpumodel.QueueRef, func()) error, done func()) {
	if q == nil || q.space == nil {
		if done != nil {
			done()
		}
		return
	}
	var err error
	s.rt.Do(func(m *gpumodel.Machine) { err = how(m, q.ref, done) })
	if err != nil {
		s.trouble(fmt.Errorf("map or unmap queue %d: %w", q.serial, err))
		if done != nil {
			done()
		}
	}
}

// attach makes a queue known to the model and the engine. One that fails is known, and
// none of its packets is executed.
func (s *SoftGPU) attach(r softRecord) *softQueue {
	s.serial++
	q := &softQueue{serial: s.serial, release: func() error { return nil }}
	if err := s.attachTo(q, r); err != nil && !errors.Is(err, ErrGone) {
		s.trouble(fmt.Errorf("execute the packets of a queue of process %d: %w", r.PID, err))
	}
	return q
}

func (s *SoftGPU) attachTo(q *softQueue, r softRecord) error {
	task, err := s.host.Task(r.PID)
	if err != nil {
		return err
	}
	space := task.Space()
	if space == nil {
		return ErrGone
	}
	gpu, err := s.gpu(r.GPU)
	if err != nil {
		return err
	}
	p := s.procs[space]
	if p == nil {
		p = &softProcess{memory: &softMemory{Space: space}}
		s.rt.Do(func(m *gpumodel.Machine) { p.key, err = m.StartProcess(gpumodel.ProcSpec{}) })
		if err != nil {
			return err
		}
		s.procs[space] = p
	}
	p.queues++
	q.space, q.ref = space, gpumodel.QueueRef{Process: p.key, ID: q.serial}
	typ := gpumodel.QueueType(r.Type)
	s.rt.Do(func(m *gpumodel.Machine) {
		err = m.AttachQueue(p.key, gpumodel.QueueSpec{
			ID: q.serial, GPU: gpu, Type: typ, PM4: r.Type == kfd.QueueTypeCompute,
			Ring: r.Ring, RingBytes: r.RingBytes, Read: r.Read, Write: r.Write,
		})
	})
	if err == nil {
		err = s.execute(q, p, r, typ)
	}
	if err != nil {
		s.detach(q)
		q.space, q.release = nil, func() error { return nil }
	}
	return err
}

// execute has the engine execute the packets of a queue that the model knows.
func (s *SoftGPU) execute(q *softQueue, p *softProcess, r softRecord, typ gpreempt.QueueType) error {
	doorbell, release, err := mapDoorbell(s.doorbells, r.Doorbell)
	if err != nil {
		return err
	}
	q.release = release
	return s.engine.Add(engine.Queue{
		Serial: uint64(q.serial), Ref: q.ref, Type: typ, AQL: r.Type == kfd.QueueTypeComputeAQL,
		Ring: r.Ring, RingBytes: uint32(r.RingBytes), Read: r.Read, Write: r.Write, Doorbell: doorbell, Memory: p.memory,
		Interrupt: func(event uint32) {
			s.reply(s.interrupts, softReply{Kind: softInterrupt, GPU: r.GPU, PID: r.PID, Event: event})
		},
	})
}

// gpu returns the modelled GPU for a GPU of the driver.
func (s *SoftGPU) gpu(id uint32) (gpreempt.GPUID, error) {
	i := slices.Index(s.gpus, id)
	if i < 0 {
		i = len(s.gpus)
		s.gpus = append(s.gpus, id)
	}
	if all := s.rt.GPUs(); i < len(all) {
		return all[i].ID, nil
	}
	return 0, fmt.Errorf("GPU %d is one more than %d", id, maxSoftGPUs)
}

// detach forgets a queue. Its packets have no effect from then on.
func (s *SoftGPU) detach(q *softQueue) {
	if q.space == nil {
		return
	}
	s.engine.Remove(uint64(q.serial))
	p := s.procs[q.space]
	p.queues--
	s.rt.Do(func(m *gpumodel.Machine) {
		// The model does not know a queue that could not be attached.
		if err := m.DetachQueue(q.ref.Process, q.ref.ID); err != nil && !errors.Is(err, gpumodel.ErrNoQueue) {
			s.trouble(err)
		}
		if p.queues == 0 {
			if err := m.EndProcess(p.key); err != nil {
				s.trouble(err)
			}
		}
	})
	if err := q.release(); err != nil {
		s.trouble(err)
	}
	if p.queues == 0 {
		delete(s.procs, q.space)
		s.host.Sweep() // closes the files of processes that have ended
	}
}

// reply never waits for the module, unless it is far behind.
func (s *SoftGPU) reply(to chan<- softReply, r softReply) {
	select {
	case to <- r:
	case <-s.over:
	}
}

// answer writes replies.
func (s *SoftGPU) answer() {
	for {
		var r softReply
		select {
		case r = <-s.acks:
		default:
			select {
			case r = <-s.acks:
			case r = <-s.interrupts:
			case <-s.over:
				return
			}
		}
		// ESRCH: the process has ended.
		if _, err := s.channel.Write(r.encode()); err != nil && !errors.Is(err, unix.ESRCH) {
			s.trouble(fmt.Errorf("answer the module with %+v: %w", r, err))
		}
	}
}

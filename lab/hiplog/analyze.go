package hiplog

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"strconv"
)

// The bounds of what is counted separately, for constant memory.
const (
	maxQueues     = 512
	maxProcesses  = 512
	maxThreads    = 4096
	maxObjects    = 16384
	maxTIDs       = 256
	maxList       = 256
	maxPIDsInText = 16
)

// Analyze reads a log, compressed or not. Its memory is bounded. When compressed data end
// early or r fails, the analysis describes the data before; the former sets Truncated and is
// not an error.
func Analyze(r io.Reader) (*Analysis, error) {
	a := analyzer{processes: map[int32]*process{}}
	totals, err := scanAll(r, a.record, a.text)
	result := a.result(totals)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		result.Truncated, err = true, nil
	}
	result.Warnings = warnings(result)
	return result, err
}

type analyzer struct {
	processes  map[int32]*process
	order      []*process
	last       *process
	queues     []*queue
	names      names
	threads    int
	spare      thread
	objects    int
	untracked  uint64
	pidsInText []int32
}

// process is the state of a Process.
type process struct {
	Process
	rings   map[Address]*queue // by HWq
	handles map[Address]*queue // by SWq
	threads map[uint64]*thread
	// kernels are the names of kernel objects, from launches with both.
	kernels    map[Address]nameID
	intervals  histogram
	launches   tally
	lastThread *thread
	lastTID    uint64
	// old reports that the log is of ROCm 6.1 or older.
	old bool
}

// thread is what a thread announced for its next packet.
type thread struct {
	kernel nameID
	named  bool
	stream Address
}

// queue is the state of a Queue.
type queue struct {
	Queue
	intervals   histogram
	kernels     tally
	read, write index
	// createdAt is the time of the last creation.
	createdAt uint64
}

func (a *analyzer) record(rec *Record) error {
	p := a.process(rec)
	if p == nil {
		a.untracked++
		return nil
	}
	p.Records++
	p.MinMicros, p.MaxMicros = min(p.MinMicros, rec.Micros), max(p.MaxMicros, rec.Micros)
	t := a.thread(p, rec.TID)
	p.old = p.old && !rec.New || rec.Old
	switch rec.Kind {
	case Other:
	case Kernel:
		t.kernel, t.named = a.names.id(rec.Name), true
		p.launches.add(t.kernel)
	case Enqueued:
		t.stream = rec.Stream
	case Allocated:
		p.QueuesPerPriority = rec.PerPriority
	default:
		q := a.queue(p, rec)
		if q == nil {
			a.untracked++
			return nil
		}
		if rec.Kind == Dispatch || rec.Kind == Barrier {
			a.packet(p, q, t, rec)
		} else {
			q.life(rec)
		}
	}
	return nil
}

func (a *analyzer) process(rec *Record) *process {
	if a.last != nil && a.last.PID == rec.PID {
		return a.last
	}
	p := a.processes[rec.PID]
	if p == nil {
		if len(a.order) == maxProcesses {
			return nil
		}
		p = &process{
			Process: Process{PID: rec.PID, MinMicros: rec.Micros, MaxMicros: rec.Micros, TIDs: []Address{}},
			rings:   map[Address]*queue{}, handles: map[Address]*queue{}, threads: map[uint64]*thread{}, kernels: map[Address]nameID{},
		}
		a.processes[rec.PID] = p
		a.order = append(a.order, p)
	}
	a.last = p
	return p
}

// thread returns the state of a thread. Beyond the bound it is always empty.
func (a *analyzer) thread(p *process, tid uint64) *thread {
	if p.lastThread != nil && p.lastTID == tid {
		return p.lastThread
	}
	t := p.threads[tid]
	if t == nil {
		if a.threads == maxThreads {
			a.spare = thread{}
			return &a.spare
		}
		t = &thread{}
		p.threads[tid] = t
		a.threads++
		if tid != 0 {
			p.Threads++
			if len(p.TIDs) < maxTIDs {
				p.TIDs = append(p.TIDs, Address(tid))
			}
		}
	}
	p.lastThread, p.lastTID = t, tid
	return t
}

// queue returns the queue of a record, by its ring if known.
func (a *analyzer) queue(p *process, rec *Record) *queue {
	ring, handle := rec.HWq, rec.SWq
	if rec.Queue != 0 {
		if p.old || p.handles[rec.Queue] != nil {
			handle = rec.Queue
		} else {
			ring = rec.Queue
		}
	}
	var q *queue
	switch {
	case ring != 0:
		if q = p.rings[ring]; q == nil && p.old {
			// ROCm 4.5 may print the hsa_queue_t as HWq, too.
			if q = p.handles[ring]; q != nil && q.HWq == 0 {
				q.HWq, p.rings[ring] = ring, q
			}
		}
	case handle != 0:
		if q = p.handles[handle]; q == nil && p.old {
			q = p.rings[handle]
		}
	default:
		return nil // a null pointer
	}
	if q == nil {
		if len(a.queues) == maxQueues {
			return nil
		}
		q = &queue{Queue: Queue{PID: p.PID, HWq: ring, SWqs: []Address{}, IDs: []uint32{}, Streams: []Address{}}}
		a.queues = append(a.queues, q)
		p.Queues++
		if ring != 0 {
			p.rings[ring] = q
		}
	}
	if handle != 0 && list(&q.SWqs, handle) {
		p.handles[handle] = q
	}
	return q
}

// list adds v to a bounded list and reports whether it was new.
func list[T comparable](values *[]T, v T) bool {
	if n := len(*values); n > 0 && (*values)[n-1] == v || n >= maxList || slices.Contains(*values, v) {
		return false
	}
	*values = append(*values, v)
	return true
}

// life records the creation, use and deletion of a queue.
func (q *queue) life(rec *Record) {
	at := &Event{Line: rec.Line, Micros: rec.Micros}
	switch rec.Kind {
	case Created:
		// A wrapper's console may repeat lines, in any order.
		if q.Creations > 0 && at.Micros == q.createdAt {
			return
		}
		q.createdAt = at.Micros
		q.Creations++
		if q.Created == nil || at.Micros < q.Created.Micros {
			q.Created = at
		}
		q.SizePackets = rec.Size
		q.Priority = strconv.FormatUint(rec.Priority, 10)
		if rec.Priority < 3 {
			q.Priority = []string{PriorityLow, PriorityNormal, PriorityHigh}[rec.Priority]
		}
		cooperative := rec.Cooperative
		q.Cooperative = &cooperative
		q.read, q.write = index{}, index{} // they restart at 0
	case Deleted:
		q.Deletions++
		if q.Deleted == nil || at.Micros >= q.Deleted.Micros {
			q.Deleted = at
		}
	case CUMask:
		q.CUMask = string(rec.Mask[:min(len(rec.Mask), maxName)])
	case Acquired:
		q.Acquired++
		q.refCount(rec)
	case Selected:
		q.Selected++
		q.refCount(rec)
	case Released:
		q.Released++
		q.refCount(rec)
	default: // without a queue, or a packet
	}
}

func (q *queue) refCount(rec *Record) {
	q.RefCount = rec.RefCount
	q.MaxRefCount = max(q.MaxRefCount, rec.RefCount)
}

// packet records a packet, with its thread's announcement.
func (a *analyzer) packet(p *process, q *queue, t *thread, rec *Record) {
	if rec.ID >= 0 {
		list(&q.IDs, uint32(rec.ID))
	}
	if rec.Indexed {
		q.indices(rec)
	}
	if rec.ROCr {
		q.ROCrPackets++
	} else if t.stream != 0 {
		list(&q.Streams, t.stream)
		t.stream = 0
	}
	if rec.Kind == Barrier {
		q.Barriers++
		p.Barriers++
		return
	}
	q.Dispatches++
	p.Dispatches++
	q.kernels.add(a.kernel(p, t, rec))
	q.intervals.event(rec.Micros)
	p.intervals.event(rec.Micros)
	if q.FirstDispatch == nil {
		q.FirstDispatch = &Event{Line: rec.Line, Micros: rec.Micros}
		q.LastDispatch = &Event{}
	}
	*q.LastDispatch = Event{Line: rec.Line, Micros: rec.Micros}
}

// kernel returns the name of a dispatched kernel: as announced by its thread, else the
// earlier name of the kernel object. ROCr announces nothing.
func (a *analyzer) kernel(p *process, t *thread, rec *Record) nameID {
	if t.named && !rec.ROCr {
		t.named = false
		if known, ok := p.kernels[rec.KernelObject]; rec.KernelObject != 0 && (!ok || known != t.kernel) {
			if ok || a.objects < maxObjects {
				p.kernels[rec.KernelObject] = t.kernel
			}
			if !ok {
				a.objects++
			}
		}
		return t.kernel
	}
	if id, ok := p.kernels[rec.KernelObject]; ok {
		return id
	}
	var name [len("kernel_obj=0x") + 16]byte
	return a.names.id(strconv.AppendUint(append(name[:0], "kernel_obj=0x"...), uint64(rec.KernelObject), 16))
}

// text searches for a process id in a line of the program.
func (a *analyzer) text(line []byte) {
	for _, label := range []string{"Process ID:", "PID:"} {
		at := bytes.Index(line, []byte(label))
		if at < 0 {
			continue
		}
		c := cursor{b: line, at: at + len(label)}
		c.spaces()
		var pid uint64
		if c.decimal(&pid) && pid > 0 && pid < 1<<31 && len(a.pidsInText) < maxPIDsInText {
			list(&a.pidsInText, int32(pid))
		}
		return
	}
}

func (a *analyzer) result(totals Totals) *Analysis {
	r := &Analysis{
		Totals: totals, PIDs: []int32{}, PIDsInText: append([]int32{}, a.pidsInText...),
		Processes: []Process{}, Queues: []Queue{}, Untracked: a.untracked,
	}
	for _, p := range a.order {
		p.Intervals = p.intervals.intervals()
		p.Launches = p.launches.mix(&a.names)
		r.Processes = append(r.Processes, p.Process)
		if p.PID != 0 {
			r.PIDs = append(r.PIDs, p.PID)
		}
	}
	for _, q := range a.queues {
		q.Intervals = q.intervals.intervals()
		q.Kernels = q.kernels.mix(&a.names)
		r.Queues = append(r.Queues, q.Queue)
	}
	return r
}

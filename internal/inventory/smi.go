package inventory

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Stream is the event stream of one GPU: a *kfd.SMIStream.
type Stream interface {
	Read() ([]kfd.SMIEvent, error)
	Close() error
}

// evictionsRecent is how long a warning about evictions stays.
const evictionsRecent = time.Minute

// smiReader counts how often the driver evicts queues by itself. It is read with every
// check of sysfs: a reading without events is one short system call.
type smiReader struct {
	streams map[gpreempt.GPUID]Stream // those of Run; nil where it could not be opened

	mu sync.Mutex // guards what follows
	// memory counts evictions for lack of memory; recent is the time of the last one.
	memory map[gpreempt.GPUID]uint64
	recent map[gpreempt.GPUID]time.Time
}

// MemoryEvictions returns how often the driver has evicted the queues of a process
// because another process needed GPU memory, since Run began; the driver drops events
// that are not read in time. It returns false for a GPU whose events cannot be read.
func (o *Observer) MemoryEvictions(gpu gpreempt.GPUID) (uint64, bool) {
	r := &o.smi
	r.mu.Lock()
	defer r.mu.Unlock()
	n, known := r.memory[gpu]
	return n, known
}

// readSMI reads the events of every GPU.
func (o *Observer) readSMI() {
	if o.cfg.SMI == nil {
		return
	}
	began := o.cfg.Now()
	var failure error
	open := 0
	for _, gpu := range o.cfg.Inventory.GPUs() {
		stream, tried := o.smi.streams[gpu.ID]
		if !tried {
			stream = o.openSMI(gpu.ID)
		}
		if stream == nil {
			continue
		}
		events, err := stream.Read()
		if err != nil {
			failure = err
			continue
		}
		open++
		for _, event := range events {
			if why, evicted := event.Evicted(); evicted && why == kfd.TriggerTTM {
				o.smi.note(gpu.ID, o.cfg.Now())
			}
		}
	}
	if open > 0 || failure != nil {
		o.noteReading(smi, began, o.cfg.Intervals().Shortest, failure)
	}
	o.warnEvictions()
}

// openSMI opens the events of a GPU; it does not retry after an error.
func (o *Observer) openSMI(gpu gpreempt.GPUID) Stream {
	r := &o.smi
	stream, err := o.cfg.SMI(gpu)
	r.streams[gpu] = stream
	if err != nil {
		o.cfg.Log.Info("cannot read the driver's events of a GPU", log.GPU(gpu), log.Err(err))
		o.update(smi, func(s *Source) { s.Note = err.Error() })
		o.cfg.Warn(smi, gpreempt.WarnSMIUnavailable.Warn(fmt.Sprintf("evictions for lack of memory on GPU %v are not counted: %v", gpu, err)))
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.memory[gpu] = 0 // from now on it is known
	return stream
}

// note counts an eviction.
func (r *smiReader) note(gpu gpreempt.GPUID, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.memory[gpu]++
	r.recent[gpu] = at
}

// warnEvictions warns about GPUs that lack memory: the driver restores evicted queues
// after seconds, and no lease restores them sooner.
func (o *Observer) warnEvictions() {
	now := o.cfg.Now()
	var short []string
	r := &o.smi
	r.mu.Lock()
	for gpu, at := range r.recent {
		if now.Sub(at) < evictionsRecent {
			short = append(short, fmt.Sprintf("GPU %v (%d times so far)", gpu, r.memory[gpu]))
		}
	}
	r.mu.Unlock()
	if len(short) == 0 {
		o.cfg.Warn("memory")
		return
	}
	slices.Sort(short)
	o.cfg.Warn("memory", gpreempt.WarnGPUMemoryShort.Warn("the driver evicts queues for lack of GPU memory, in the last minute on "+strings.Join(short, ", ")+": online work may stall for seconds, which suspending other work does not prevent"))
}

func (r *smiReader) close() {
	for _, stream := range r.streams {
		if stream != nil {
			_ = stream.Close() // it was only read
		}
	}
}

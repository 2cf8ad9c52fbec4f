package driver

import (
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// SaveArea has the sizes of a compute queue's save area that the driver computes for a GPU,
// in bytes for one XCC (kfd_queue_ctx_save_restore_size). They are in the topology, except
// for Debug.
type SaveArea struct {
	// Stack is the control stack, which is part of Bytes. Debug is the debugger's part,
	// behind the whole.
	Stack, Bytes, Debug uint32
}

// mapping returns the memory that is mapped on the GPU at an address, if it starts there
// and has the size; below a page any size will do (kfd_queue_buffer_get).
func (x *pdd) mapping(at, size uint64) *object {
	for _, owner := range x.p.pdds {
		for _, o := range owner.memory {
			if o.mapped[x.gpu] && o.va/pageSize == at/pageSize && (size < pageSize || alignUp(o.size, pageSize)/pageSize == size/pageSize) {
				return o
			}
		}
	}
	return nil
}

// ringBytes is the size that the memory of a queue's ring must have: since 7.2 whole pages, with the
// ring's metadata.
func (d *Driver) ringBytes(args *kfdabi.CreateQueueArgs) uint64 {
	if !d.prof.contexts {
		return uint64(args.RingSize)
	}
	return alignUp(uint64(args.RingSize)+uint64(args.MetadataRingSize), pageSize)
}

// acquireBuffers is kfd_queue_acquire_buffers: the memory of a queue must be mapped on its
// GPU as a whole, each part with its own size. While the queue exists, it cannot be
// unmapped. ring is the size of its ring.
func (x *pdd) acquireBuffers(args *kfdabi.CreateQueueArgs, ring uint64, kind uint32) ([]*object, errno) {
	type buffer struct{ at, size uint64 }
	buffers := []buffer{{args.WritePointerAddress, pageSize}, {args.ReadPointerAddress, pageSize}, {args.RingBaseAddress, ring}}
	compute := kind == kfd.QueueTypeCompute || kind == kfd.QueueTypeComputeAQL
	if compute && args.EOPBufferAddress != 0 {
		if args.EOPBufferSize < pageSize {
			return nil, EINVAL
		}
		buffers = append(buffers, buffer{args.EOPBufferAddress, alignUp(args.EOPBufferSize, pageSize)})
	}
	var held []*object
	for _, b := range buffers {
		o := x.mapping(b.at, b.size)
		if o == nil {
			return nil, EINVAL
		}
		held = append(held, o)
	}
	if save := x.gpu.node.SaveArea; compute && save != (SaveArea{}) {
		if args.CtlStackSize != save.Stack || args.CtxSaveRestoreSize < save.Bytes {
			return nil, EINVAL
		}
		whole := alignUp((uint64(args.CtxSaveRestoreSize)+uint64(save.Debug))*uint64(max(x.gpu.node.XCCs, 1)), pageSize)
		if o := x.mapping(args.CtxSaveRestoreAddress, whole); o != nil {
			held = append(held, o)
		} else if !x.sharedBuffer(args.CtxSaveRestoreAddress, whole) {
			return nil, EINVAL
		}
	}
	return held, 0
}

// sharedBuffer reports whether addresses of the process are shared with the GPU, and stay
// mapped there (kfd_queue_buffer_svm_get).
func (x *pdd) sharedBuffer(at, size uint64) bool {
	for size > 0 {
		r := x.p.svmAt(at, at)
		if r == nil || !r.access[x.gpu] && !r.accessInSitu[x.gpu] || r.flags&kfdabi.SVMFlagGPUAlwaysMapped == 0 {
			return false
		}
		// The driver takes the whole range, also where at is behind its start.
		part := r.last - r.start + 1
		if part >= size {
			return true
		}
		at, size = at+part, size-part
	}
	return true
}

// hold takes the buffers for the queue, release gives them back (kfd_queue_unref_bo_vas).
func (q *queue) hold(buffers []*object) {
	q.buffers = buffers
	for _, o := range buffers {
		o.users[q.pdd.gpu]++
	}
}

// replaceRing exchanges the ring, for UPDATE_QUEUE (pqm_update_queue_properties).
func (q *queue) replaceRing(ring *object) {
	const third = 2
	ring.users[q.pdd.gpu]++
	if old := q.buffers[third]; old.users[q.pdd.gpu] > 0 {
		old.users[q.pdd.gpu]--
	}
	q.buffers[third] = ring
}

func (q *queue) release() {
	for _, o := range q.buffers {
		o.users[q.pdd.gpu] = max(o.users[q.pdd.gpu]-1, 0)
	}
}

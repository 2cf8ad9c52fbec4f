package driver

import (
	"encoding/binary"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Op names what a call does: OpOpen, "GET_VERSION", "DBG_TRAP SUSPEND_QUEUES",
// "CRIU_OP UNPAUSE" and so on.
type Op string

// OpOpen is open(2) of the device.
const OpOpen Op = "open"

// TrapOp is the call DBG_TRAP op.
func TrapOp(op kfd.TrapOp) Op { return Op(kfd.ReqDbgTrap.String() + " " + op.String()) }

// CRIUOp is the call CRIU_OP op.
func CRIUOp(op kfd.CRIUOp) Op { return Op(kfd.ReqCRIUOp.String() + " " + op.String()) }

// RequestOp is the call req, whatever size it carries.
func RequestOp(req kfd.Request) Op {
	if known, ok := requests[req.Number()]; ok {
		req = known
	}
	return Op(req.String())
}

// Ops are the names of all calls there are, sorted.
func Ops() []Op {
	ops := []Op{OpOpen}
	for _, req := range requests {
		ops = append(ops, RequestOp(req))
	}
	for op := kfd.TrapEnable; op <= kfd.TrapGetDeviceSnapshot; op++ {
		ops = append(ops, TrapOp(op))
	}
	for op := kfd.CRIUOpProcessInfo; op <= kfd.CRIUOpResume; op++ {
		ops = append(ops, CRIUOp(op))
	}
	slices.Sort(ops)
	return ops
}

// Described is what can be read from a call's arguments before it is made.
type Described struct {
	Op Op
	// Target is the process a DBG_TRAP call names, 0 for other calls.
	Target int32
	// Mask is the exceptions of an ENABLE, a SUSPEND_QUEUES, a SEND_RUNTIME_EVENT,
	// a query or a snapshot.
	Mask kfd.ExceptionMask
	// Queues are the ids a SUSPEND_QUEUES or a RESUME_QUEUES names, nil for NULL.
	Queues []uint32
	// Grace is the grace period of a SUSPEND_QUEUES.
	Grace uint32
}

// Describe reads a call's arguments. It asks for no more memory than the request
// says is there.
func Describe(req kfd.Request, arg Memory) Described {
	d := Described{Op: RequestOp(req)}
	b := make([]byte, max(req.Size(), 56))
	if arg == nil || !arg.Read(b[:req.Size()]) {
		return d
	}
	u32 := func(off int) uint32 { return binary.NativeEndian.Uint32(b[off:]) }
	u64 := func(off int) uint64 { return binary.NativeEndian.Uint64(b[off:]) }
	ids := func(ptr, count int) []uint32 {
		if u64(ptr) == 0 || req.Size() < ptr+8 || u32(count) > kfd.MaxQueues {
			return nil
		}
		ids, _ := readIDs(arg.Pointer(ptr), int(u32(count)))
		return ids
	}
	switch req.Number() {
	case kfd.ReqCRIUOp.Number():
		d.Op = CRIUOp(kfd.CRIUOp(u32(48)))
	case kfd.ReqDbgTrap.Number():
		op := kfd.TrapOp(u32(4))
		d.Op, d.Target = TrapOp(op), int32(u32(0))
		switch op {
		case kfd.TrapSuspendQueues:
			d.Mask, d.Queues, d.Grace = kfd.ExceptionMask(u64(8)), ids(16, 24), u32(28)
		case kfd.TrapResumeQueues:
			d.Queues = ids(8, 16)
		case kfd.TrapEnable, kfd.TrapSendRuntimeEvent, kfd.TrapSetExceptionsEnabled, kfd.TrapQueryDebugEvent,
			kfd.TrapGetQueueSnapshot, kfd.TrapGetDeviceSnapshot:
			d.Mask = kfd.ExceptionMask(u64(8))
		default:
		}
	}
	return d
}

// readIDs reads n queue ids.
func readIDs(m Memory, n int) ([]uint32, bool) {
	b := make([]byte, 4*n)
	if n > 0 && (m == nil || !m.Read(b)) {
		return nil, false
	}
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return ids, true
}

// writeIDs writes queue ids. That it fails is only logged by the driver.
func writeIDs(m Memory, ids []uint32) {
	b := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		b = binary.NativeEndian.AppendUint32(b, id)
	}
	writeAt(m, 0, b)
}

package driver

import (
	"slices"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Op is the name of a call: OpOpen, "GET_VERSION", "DBG_TRAP SUSPEND_QUEUES", "CRIU_OP
// UNPAUSE" and so on.
type Op string

// OpOpen is open(2) of the device.
const OpOpen Op = "open"

// TrapOp returns the name of the call DBG_TRAP op.
func TrapOp(op kfd.TrapOp) Op { return Op(kfd.ReqDbgTrap.String() + " " + op.String()) }

// CRIUOp returns the name of the call CRIU_OP op.
func CRIUOp(op kfd.CRIUOp) Op {
	step := gpreempt.Word(op, "op", "PROCESS_INFO", "CHECKPOINT", "UNPAUSE", "RESTORE", "RESUME")
	return Op(kfd.ReqCRIUOp.String() + " " + step)
}

// RequestOp returns the name of the call req, which may carry any size.
func RequestOp(req kfd.Request) Op {
	if known, ok := requests[req.Number()]; ok {
		req = known
	}
	return Op(req.String())
}

// Ops returns the names of all calls, sorted.
func Ops() []Op {
	ops := []Op{OpOpen, OpOpenKmap}
	for _, req := range requests {
		ops = append(ops, RequestOp(req))
	}
	for req := range kmapHandlers {
		ops = append(ops, Op(kfdabi.KmapName(req)))
	}
	for op := kfd.TrapEnable; op <= kfd.TrapGetDeviceSnapshot; op++ {
		ops = append(ops, TrapOp(op))
	}
	for op := kfd.CRIUOpProcessInfo; op <= kfdabi.CRIUOpResume; op++ {
		ops = append(ops, CRIUOp(op))
	}
	slices.Sort(ops)
	return ops
}

// Described is the content of a call's arguments that faults and logs select by.
type Described struct {
	Op Op
	// Target is the process of a DBG_TRAP, 0 for other calls.
	Target int32
	// Mask is the exceptions of an ENABLE, a SUSPEND_QUEUES, a SEND_RUNTIME_EVENT,
	// a query or a snapshot.
	Mask kfd.ExceptionMask
	// Queues are the ids in a SUSPEND_QUEUES or a RESUME_QUEUES, nil for NULL.
	Queues []uint32
	// Grace is the grace period of a SUSPEND_QUEUES.
	Grace uint32
}

// Describe reads a call's arguments. It reads at most the memory that the request says is
// there.
func Describe(req kfd.Request, arg Memory) Described {
	d := Described{Op: RequestOp(req)}
	own := requests[req.Number()]
	c := &call{arg: arg, usize: req.Size(), data: make([]byte, max(req.Size(), own.Size()))}
	if arg == nil || !arg.Read(c.data[:c.usize]) {
		return d
	}
	ids := func(array *kfd.Pointer, n uint32) []uint32 {
		from := c.memory(array)
		if from == nil || n > kfd.MaxQueues {
			return nil
		}
		ids, _ := copyFrom[uint32](from, int(n))
		return ids
	}
	switch own {
	case kfd.ReqCRIUOp:
		d.Op = CRIUOp(copyIn[kfd.CRIUArgs](c).Op)
	case kfd.ReqDbgTrap:
		args := copyIn[kfd.TrapSuspendQueuesArgs](c)
		d.Op, d.Target = TrapOp(args.Op), int32(args.PID)
		switch args.Op {
		case kfd.TrapSuspendQueues:
			d.Mask, d.Queues, d.Grace = args.ExceptionMask, ids(&args.QueueArrayPtr, args.NumQueues), args.GracePeriod
		case kfd.TrapResumeQueues:
			args := copyIn[kfd.TrapResumeQueuesArgs](c)
			d.Queues = ids(&args.QueueArrayPtr, args.NumQueues)
		case kfd.TrapEnable, kfd.TrapSendRuntimeEvent, kfdabi.TrapSetExceptionsEnabled, kfd.TrapQueryDebugEvent,
			kfd.TrapGetQueueSnapshot, kfd.TrapGetDeviceSnapshot:
			d.Mask = args.ExceptionMask // the first field of these arms, too
		default:
		}
	}
	return d
}

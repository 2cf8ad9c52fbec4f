package workload

import (
	"context"
	"fmt"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// trapTime is how long a kernel with a trap, and the report of a fault, may take.
const trapTime = 30 * time.Second

// run runs a kernel in one wave on the spare queue.
func (d *device) run(ctx context.Context, name string, args ...uint64) error {
	q, err := d.submit(name, args...)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, trapTime, fmt.Errorf("kernel %s does not end within %v", name, trapTime))
	defer cancel()
	return q.wait(ctx)
}

func (d *device) submit(name string, args ...uint64) (*queue, error) {
	k, err := d.kernel(name)
	if err != nil {
		return nil, err
	}
	q, err := d.spareQueue(k.private)
	if err != nil {
		return nil, err
	}
	m, err := d.arguments(args...)
	if err != nil {
		return nil, err
	}
	q.dispatch(k, 1, 64, m.base)
	return q, nil
}

// debugtrap runs a kernel with an llvm.debugtrap, with a trap handler below that of the driver or
// with none, as ROCm's runtime installs one. It returns what the kernel stored: 4, with bit 0
// if the handler ran, and bit 1 if the driver reported a debugger to it.
func (d *device) debugtrap(ctx context.Context, handler bool) (uint32, error) {
	out, err := d.allocate(pageBytes)
	if err != nil {
		return 0, err
	}
	args := kfdabi.SetTrapHandlerArgs{GPUID: d.gpu}
	if handler {
		c, err := d.load()
		if err != nil {
			return 0, err
		}
		args.TBAAddr = c.addr(int(c.symbols["trapped"]))
	}
	if err := d.ioctl(kfdabi.ReqSetTrapHandler, kfd.PointerTo(&args)); err != nil {
		return 0, err
	}
	if err := d.run(ctx, "debugtrap", out.base); err != nil {
		return 0, err
	}
	return out.u32(0).Load(), nil
}

// touch reads an address in a kernel, and returns the fault that the driver reports to the
// process: "" for none. Afterwards the driver runs no queue of the process on that GPU
// (kfd_dqm_evict_pasid). A mapped address must give no fault.
func (d *device) touch(ctx context.Context, mapped bool) (string, error) {
	m, err := d.allocate(pageBytes)
	if err != nil {
		return "", err
	}
	created := kfdabi.CreateEventArgs{EventType: kfdabi.EventTypeMemory}
	if err := d.ioctl(kfdabi.ReqCreateEvent, kfd.PointerTo(&created)); err != nil {
		return "", err
	}
	event := []kfdabi.MemoryEventData{{EventID: created.EventID}}
	wait := kfdabi.WaitEventsArgs{EventsPtr: kfd.PointerToSlice(event), NumEvents: 1}
	at := m.addr(line)
	if mapped {
		err = d.run(ctx, "touch", m.base, at)
	} else {
		wait.Timeout = uint32(trapTime.Milliseconds())
		if at, err = reserve(pageBytes); err == nil {
			_, err = d.submit("touch", m.base, at)
		}
	}
	if err == nil {
		err = d.ioctl(kfdabi.ReqWaitEvents, kfd.PointerTo(&wait))
	}
	switch {
	case err != nil:
		return "", err
	case wait.WaitResult == kfdabi.WaitResultComplete:
		return describeFault(event[0], at), nil
	case mapped && wait.WaitResult == kfdabi.WaitResultTimeout:
		return "", nil
	}
	return "", fmt.Errorf("the driver reports no fault within %v (result %d)", trapTime, wait.WaitResult)
}

// describeFault returns what the driver reports of a fault, the same for the same fault of another process.
func describeFault(e kfdabi.MemoryEventData, at uint64) string {
	return fmt.Sprintf("GPU %d, %+d bytes from the address, not present %d, read only %d, not executable %d, imprecise %d, memory error %d",
		e.GPUID, int64(e.VA-at), e.NotPresent, e.ReadOnly, e.NoExecute, e.Imprecise, e.ErrorType)
}

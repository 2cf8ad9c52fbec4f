package accept

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpreempt/gpreempt/accept/workload"
)

// faults compares what a process sees of its memory fault, and how it ends, when it is held with
// what another one sees that is not. The driver's lines about page faults are no alarm.
func faults(ctx context.Context, r *result) error {
	j, err := r.b.start(ctx, workload.Config{})
	if err != nil {
		return err
	}
	reply, err := j.Ask(ctx, "touch mapped")
	if err = errors.Join(err, j.Kill()); err != nil {
		return err
	}
	if reply.Fault != "" {
		return fmt.Errorf("the check cannot fail: a read of mapped memory is reported as a fault: %s", reply.Fault)
	}
	r.controls = append(r.controls, "a read of mapped memory: no fault")
	free, err := r.fault(ctx, false)
	if err != nil {
		return fmt.Errorf("not held: %w", err)
	}
	r.note("a fault: %s", free)
	for range r.cycles(10) {
		held, err := r.fault(ctx, true)
		if err == nil && held != free {
			err = fmt.Errorf("the fault is %q, not %q", held, free)
		}
		if err != nil {
			return fmt.Errorf("held: %w", err)
		}
	}
	return nil
}

// fault lets a process read an address without memory, and returns what the driver reports to it.
// The queues of the process are evicted then. It ends at once, as ROCm's runtime aborts.
func (r *result) fault(ctx context.Context, held bool) (fault string, err error) {
	j, err := r.b.start(ctx, workload.Config{})
	if err != nil {
		return "", err
	}
	h := heldJob{job: j}
	if held {
		if h.session, err = r.b.attach(ctx, j.Key()); err != nil {
			return "", errors.Join(err, j.Kill())
		}
	}
	reply, err := j.Ask(ctx, "touch unmapped")
	if err == nil && reply.Fault == "" {
		err = errors.New("the driver reports no fault")
	}
	if held {
		if err == nil {
			err = errors.Join(h.session.Suspend(ctx, nil), h.session.Resume(ctx))
		}
		h.drop(&err)
	} else {
		err = errors.Join(err, j.Kill())
	}
	if err != nil {
		return "", err
	}
	return reply.Fault, r.leftBehind(ctx, j.Key())
}

// What a kernel with llvm.debugtrap stores (kernels.c).
var trapped = map[uint32]string{
	4: "is ignored",
	5: "runs the trap handler, without a debugger",
	7: "runs the trap handler, with a debugger",
}

// debugtraps records what llvm.debugtrap does in a process before, while and after it is held.
// ROCm's trap handler ignores it without a debugger, and stops the wave with one.
func debugtraps(ctx context.Context, r *result) error {
	none, err := r.debugtrap(ctx, "none")
	if err != nil {
		return err
	}
	if none != [3]string{trapped[4], trapped[4], trapped[4]} {
		return fmt.Errorf("the check cannot fail: without a trap handler, llvm.debugtrap %s; held, it %s; released, it %s", none[0], none[1], none[2])
	}
	r.controls = append(r.controls, "without a trap handler llvm.debugtrap is ignored")
	own, err := r.debugtrap(ctx, "own")
	if err != nil {
		return err
	}
	r.note("with a trap handler llvm.debugtrap %s; held, it %s; released, it %s", own[0], own[1], own[2])
	switch {
	case own[1] == trapped[4]:
		return skipped("the GPU runs no trap handler in a held process, so that nothing can be recorded")
	case own[2] != own[0]:
		return errors.New("llvm.debugtrap does not do after the release what it did before")
	}
	return nil
}

// debugtrap returns what llvm.debugtrap does before, while and after a new process is held, with
// its own trap handler or none.
func (r *result) debugtrap(ctx context.Context, handler string) (did [3]string, err error) {
	j, err := r.b.start(ctx, workload.Config{})
	if err != nil {
		return did, err
	}
	defer func() { err = errors.Join(err, j.Kill()) }()
	ask := func(i int) error {
		reply, err := j.Ask(ctx, "debugtrap "+handler)
		if did[i] = trapped[reply.Trapped]; err == nil && did[i] == "" {
			err = fmt.Errorf("the kernel stored %d", reply.Trapped)
		}
		return err
	}
	if err := ask(0); err != nil {
		return did, fmt.Errorf("not held: %w", err)
	}
	s, err := r.b.attach(ctx, j.Key())
	if err != nil {
		return did, err
	}
	if err := errors.Join(ask(1), s.Close()); err != nil {
		return did, fmt.Errorf("held: %w", err)
	}
	if err := ask(2); err != nil {
		return did, fmt.Errorf("released: %w", err)
	}
	return did, nil
}

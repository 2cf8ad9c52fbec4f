package criu

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// errNoContext reports that the process has no descriptor to make a call on.
var errNoContext = errors.New("it has no descriptor of /dev/kfd that it opened itself: it does not use the GPU, or has closed it; retry when it opens /dev/kfd again")

// visit is the time during which a process is traced.
type visit struct {
	m       *Mechanism
	target  gpreempt.ProcessKey
	process Process
	thread  Thread
}

// visit traces the process while do runs. It returns mechanism.ErrGone when the process
// has exited.
func (m *Mechanism) visit(ctx context.Context, target gpreempt.ProcessKey, do func(*visit) error) error {
	p, err := m.cfg.Host.Open(target)
	if err != nil {
		return err
	}
	defer p.Close()
	thread, err := m.cfg.Attach(ctx, target.PID, target.Start)
	if err != nil {
		return err
	}
	defer func() {
		// Detaching takes less than a second, also when ctx has ended.
		if err := thread.Detach(context.WithoutCancel(ctx)); err != nil {
			m.cfg.Log.Warn("cannot end the trace of a process", log.Target(target), log.Err(err))
		}
	}()
	return do(&visit{m, target, p, thread})
}

// call runs f on the tracing thread with copies of the descriptors that have these
// numbers, without those that were closed meanwhile.
func (v *visit) call(ctx context.Context, numbers []int, f func(fds []int) error) error {
	var fds []int
	defer func() {
		for _, fd := range fds {
			if err := v.m.cfg.Sys.Close(fd); err != nil {
				v.m.cfg.Log.Warn("cannot close a descriptor of a process: its GPU memory stays allocated when it dies",
					log.Target(v.target), log.Err(err))
			}
		}
	}()
	for _, number := range numbers {
		fd, err := v.process.Take(number)
		if errors.Is(err, unix.EBADF) {
			continue
		} else if err != nil {
			return err
		}
		fds = append(fds, fd)
	}
	return v.thread.Do(ctx, func() error { return f(fds) })
}

// unpause unpauses every context of the process, also after one that failed.
func (v *visit) unpause(ctx context.Context) error {
	numbers, err := v.process.Descriptors()
	if err != nil {
		return err
	}
	own, paused := 0, 0
	err = v.call(ctx, numbers, func(fds []int) error {
		var errs []error
		for _, fd := range fds {
			switch err := kfd.CRIUUnpause(v.m.cfg.Sys, fd, v.target.PID); {
			case err == nil:
				own++
				paused++
			case errors.Is(err, unix.EINVAL): // not paused
				own++
			case errors.Is(err, unix.EBADF): // of another process, inherited
			default:
				errs = append(errs, hardware(err))
			}
		}
		return errors.Join(errs...)
	})
	switch {
	case err != nil:
		return err
	case own == 0:
		return errNoContext
	}
	v.m.cfg.Log.Debug("unpaused", log.Target(v.target), log.Descriptors(own), log.Paused(paused))
	return nil
}

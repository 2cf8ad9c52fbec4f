package criu

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/tracer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// errNoContext reports that there is nothing to make a call on.
var errNoContext = errors.New("it has no descriptor of /dev/kfd that it opened itself: it does not use the GPU, or has closed it; when it opens it again this can be tried again")

// visit is the time during which a process is traced.
type visit struct {
	m       *Mechanism
	target  gpreempt.ProcessKey
	process Process
	thread  Thread
}

// file is a descriptor of the process: its number there, and ours here.
type file struct{ number, fd int }

// visit traces the process while do runs. It gives mechanism.ErrGone when the process
// has exited.
func (m *Mechanism) visit(ctx context.Context, target gpreempt.ProcessKey, do func(*visit) error) error {
	p, err := m.cfg.Host.Open(target)
	if err != nil {
		return err
	}
	defer m.close(p, target)
	thread, err := m.cfg.Attach(ctx, target.PID, target.Start)
	if err != nil {
		return gone(err)
	}
	defer func() {
		// It ends within a second; the caller's end does not shorten that.
		if err := thread.Detach(context.WithoutCancel(ctx)); err != nil {
			m.cfg.Log.Warn("the trace of a process did not end", logkey.Target(target), logkey.Err(err))
		}
	}()
	return gone(do(&visit{m, target, p, thread}))
}

// gone returns mechanism.ErrGone for the tracer's word for it.
func gone(err error) error {
	if errors.Is(err, tracer.ErrGone) {
		return mechanism.ErrGone
	}
	return err
}

// call has f make calls on the descriptors of these numbers, on the tracing thread.
// Numbers that were closed meanwhile are left out.
func (v *visit) call(ctx context.Context, numbers []int, f func([]file) error) error {
	var files []file
	defer func() {
		for _, f := range files {
			if err := v.m.cfg.Sys.Close(f.fd); err != nil {
				v.m.cfg.Log.Warn("a descriptor of a process could not be closed: its GPU memory stays when it dies",
					logkey.Target(v.target), logkey.Err(err))
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
		files = append(files, file{number, fd})
	}
	return v.thread.Do(ctx, func() error { return f(files) })
}

// unpause unpauses every context of the process, also after one that failed.
func (v *visit) unpause(ctx context.Context) error {
	numbers, err := v.process.Descriptors()
	if err != nil {
		return err
	}
	own, paused := 0, 0
	err = v.call(ctx, numbers, func(files []file) error {
		var errs []error
		for _, f := range files {
			switch err := kfd.CRIUUnpause(v.m.cfg.Sys, f.fd, v.target.PID); {
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
	v.m.cfg.Log.Debug("unpaused", logkey.Target(v.target), logkey.Descriptors(own), logkey.Paused(paused))
	return nil
}

func (m *Mechanism) close(p Process, target gpreempt.ProcessKey) {
	if err := p.Close(); err != nil {
		m.cfg.Log.Warn("a process descriptor could not be closed", logkey.Target(target), logkey.Err(err))
	}
}

// Probe implements mechanism.Mechanism.
func (m *Mechanism) Probe(_ context.Context, target gpreempt.ProcessKey) mechanism.Capability {
	var c mechanism.Capability
	say := func(check, found string, ok bool, remedy string) {
		if ok {
			remedy = ""
		}
		c.Evidence = append(c.Evidence, mechanism.Evidence{Check: check, Found: found, OK: ok, Remedy: remedy})
	}

	capabilities, err := m.cfg.Host.Capabilities()
	const needed = 1<<unix.CAP_CHECKPOINT_RESTORE | 1<<unix.CAP_SYS_ADMIN
	switch {
	case err != nil:
		say("capabilities", err.Error(), false, "")
	case capabilities&needed == 0:
		say("capabilities", "neither CAP_CHECKPOINT_RESTORE nor CAP_SYS_ADMIN", false, "run as root, or add CAP_CHECKPOINT_RESTORE to the unit")
	default:
		say("capabilities", "CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN", true, "")
	}

	version, err := m.driver()
	if err != nil {
		say("KFD version", err.Error(), false, "load the amdgpu driver")
	} else {
		found := fmt.Sprintf("%d.%d", version.Major, version.Minor)
		say("KFD version", found, version.Major == 1 && version.Minor >= 7, "CRIU_OP came with 1.7, in Linux 5.18")
	}

	p, err := m.cfg.Host.Open(target)
	if errors.Is(err, mechanism.ErrGone) {
		say("process", "it has exited", false, "")
		return c
	} else if err != nil {
		say("process", err.Error(), false, "")
		return c
	}
	defer m.close(p, target)
	switch tracing, err := p.Tracer(); {
	case err != nil:
		say("tracer", err.Error(), false, "")
	default:
		found := "none"
		if tracing != 0 {
			found = fmt.Sprintf("thread %d traces it", tracing)
		}
		say("tracer", found, tracing == 0, "end that debugger; a process has one tracer at a time")
	}
	switch numbers, err := p.Descriptors(); {
	case err != nil:
		say("/dev/kfd", err.Error(), false, "")
	default:
		say("/dev/kfd", fmt.Sprintf("%d descriptors", len(numbers)), len(numbers) > 0, "it does not use the GPU, or has closed it")
	}
	return c
}

// driver asks for the version of the driver, once it is there. Having opened it, this
// program is one of the driver's processes.
func (m *Mechanism) driver() (_ kfd.Version, err error) {
	m.mu.Lock()
	known := m.version
	m.mu.Unlock()
	if known != nil {
		return *known, nil
	}
	fd, err := m.cfg.Sys.Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC)
	if err != nil {
		return kfd.Version{}, fmt.Errorf("open %s: %w", kfd.DevicePath, err)
	}
	defer func() { err = errors.Join(err, m.cfg.Sys.Close(fd)) }()
	var args kfd.GetVersionArgs
	if _, err := m.cfg.Sys.Ioctl(fd, kfd.ReqGetVersion, kfd.PointerTo(&args)); err != nil {
		return kfd.Version{}, fmt.Errorf("%s: %w", kfd.ReqGetVersion, err)
	}
	version := kfd.Version{Major: args.Major, Minor: args.Minor}
	m.mu.Lock()
	m.version = &version
	m.mu.Unlock()
	return version, nil
}

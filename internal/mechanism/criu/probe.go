package criu

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Probe implements mechanism.Mechanism.
func (m *Mechanism) Probe(_ context.Context, target gpreempt.ProcessKey) mechanism.Capability {
	var c mechanism.Capability
	add := func(check, found string, ok bool, remedy string) {
		if ok {
			remedy = ""
		}
		c.Evidence = append(c.Evidence, mechanism.Evidence{Check: check, Found: found, OK: ok, Remedy: remedy})
	}

	capabilities, err := m.cfg.Host.Capabilities()
	const needed = 1<<unix.CAP_CHECKPOINT_RESTORE | 1<<unix.CAP_SYS_ADMIN
	switch {
	case err != nil:
		add("capabilities", err.Error(), false, "")
	case capabilities&needed == 0:
		add("capabilities", "neither CAP_CHECKPOINT_RESTORE nor CAP_SYS_ADMIN", false, "run as root, or add CAP_CHECKPOINT_RESTORE to the unit")
	default:
		add("capabilities", "CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN", true, "")
	}

	version, err := m.driver()
	if err != nil {
		add("KFD version", err.Error(), false, "load the amdgpu driver")
	} else {
		found := fmt.Sprintf("%d.%d", version.Major, version.Minor)
		add("KFD version", found, version.Major == 1 && version.Minor >= 7, "CRIU_OP needs 1.7, which Linux 5.18 has")
	}

	p, err := m.cfg.Host.Open(target)
	if errors.Is(err, mechanism.ErrGone) {
		add("process", "it has exited", false, "")
		return c
	} else if err != nil {
		add("process", err.Error(), false, "")
		return c
	}
	defer p.Close()
	switch found, remedy, err := p.Tracer(); {
	case err != nil:
		add("tracer", err.Error(), false, "")
	case found == "":
		add("tracer", "none", true, "")
	default:
		add("tracer", found, false, remedy)
		c.Evidence[len(c.Evidence)-1].Reason = gpreempt.ReasonResisted
	}
	switch numbers, err := p.Descriptors(); {
	case err != nil:
		add("/dev/kfd", err.Error(), false, "")
	default:
		add("/dev/kfd", fmt.Sprintf("%d descriptors", len(numbers)), len(numbers) > 0, "it does not use the GPU, or has closed it")
	}
	return c
}

// driver returns the version of the driver, which it reads once. Opening the driver
// makes this program one of its processes.
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

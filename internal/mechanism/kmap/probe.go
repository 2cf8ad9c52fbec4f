package kmap

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// remedies has what to do when the extension cannot be opened.
var remedies = map[kfd.KmapSupport]string{
	kfd.KmapMissing: "boot a kernel with the extension, and pass the device to a container (--device /dev/kfd_kmap), or remove kmap from the config key mechanisms",
	kfd.KmapForeign: "install the gpreempt of that kernel, or remove kmap from the config key mechanisms",
	kfd.KmapDenied:  "run as root with CAP_SYS_ADMIN, and allow the device: DeviceAllow=/dev/kfd_kmap rw in the systemd unit",
	kfd.KmapUnknown: "see dmesg | grep -i kfd",
}

// Probe implements mechanism.Mechanism.
func (m *Mechanism) Probe(_ context.Context, target gpreempt.ProcessKey) mechanism.Capability {
	pidfd, err := m.cfg.Host.Pidfd(target)
	switch {
	case errors.Is(err, mechanism.ErrGone):
		return one(mechanism.Evidence{Check: "process", Found: "it has exited"})
	case err != nil:
		return one(mechanism.Evidence{Check: "process", Found: err.Error()})
	}
	m.cfg.Host.ClosePidfd(pidfd)
	handle, err := m.lane(target).open()
	if err != nil {
		return one(mechanism.Evidence{Check: "kfd_kmap", Found: err.Error(), Remedy: remedies[kfd.KmapSupportOf(err)]})
	}
	c := one(mechanism.Evidence{Check: "kfd_kmap", Found: fmt.Sprintf("ABI %v", handle.Version()), OK: true})
	for _, gpu := range m.cfg.GPUs(target) {
		if e := runlist(handle, gpu); !e.OK {
			c.Evidence = append(c.Evidence, e)
		}
	}
	return c
}

func one(e mechanism.Evidence) mechanism.Capability {
	return mechanism.Capability{Evidence: []mechanism.Evidence{e}}
}

// runlist checks whether the extension works for a GPU.
func runlist(handle *kfd.Kmap, gpu gpreempt.GPU) mechanism.Evidence {
	e := mechanism.Evidence{Check: "runlist", OK: true}
	_, err := handle.Occupancy(gpu.ID)
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		e.OK, e.Found = false, fmt.Sprintf("GPU %v (%s) has none: its firmware is MES, or does not schedule", gpu.ID, gpu.Name)
		e.Remedy = "let another mechanism hold the process: name one after kmap in the config key mechanisms"
	case err != nil:
		e.OK, e.Found = false, err.Error()
	}
	return e
}

// Examine opens the extension of this host and closes it. It says what it found, and what to do
// if that cannot be used.
func Examine() (found, remedy string, usable bool) {
	info, support, err := kfd.ProbeKmap(kfd.Kernel(), kfd.KmapPath)
	if err != nil {
		return err.Error(), remedies[support], false
	}
	return fmt.Sprintf("ABI %v, up to %d processes in one call", info.Version, info.MaxTargets), "", true
}

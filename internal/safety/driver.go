package safety

import (
	"errors"
	"syscall"
)

func (h *host) driverInterface() finding {
	d, err := h.open, h.openErr
	switch {
	case err == nil && d.Note != "":
		return warn("watch the first suspends, and check for a newer gpreempt", "%s", d.Note)
	case err == nil:
		return ok("%s, using the %s ABI", d.Version, d.Profile)
	case !isErrno(err):
		return fail("Linux 6.5 or newer, or an equally new amdgpu-dkms package of AMD; criu and freezer do not need DBG_TRAP", "%v", err)
	case absent(err):
		return fail("ls -l /dev/kfd; in a container, pass the device (--device /dev/kfd)", "the driver is loaded, and /dev/kfd does not exist")
	case hidden(err):
		if h.selfErr == nil && h.self.UID == 0 {
			return fail("allow the device to this process: DeviceAllow=/dev/kfd rw in its systemd unit, --device /dev/kfd for its container",
				"root may not open /dev/kfd: the device cgroup or a security module forbids it")
		}
		if h.cfg.ByDaemon {
			return fail(asRoot, "uid %d may not open /dev/kfd", h.self.UID)
		}
		return h.notChecked("the group of the device (ls -l /dev/kfd)", "open /dev/kfd")
	case errors.Is(err, syscall.EINVAL):
		return fail("retry in a minute; if it still fails, see dmesg | grep -i amdgpu",
			"the driver cannot be opened during a GPU reset or a change of partitions")
	}
	return fail("see dmesg | grep -i kfd", "%v", err)
}

func isErrno(err error) bool {
	_, ok := errors.AsType[syscall.Errno](err)
	return ok
}

// fromParam is the finding for a module parameter that cannot be read.
func fromParam(err error) finding {
	if absent(err) {
		return skip("the driver has no such parameter")
	}
	return unread(err)
}

func (h *host) schedPolicy() finding {
	policy, err := h.param("sched_policy")
	switch {
	case err != nil:
		return fromParam(err)
	case policy == 0:
		return ok("0: the firmware schedules, and queues take turns if there are more of them than slots")
	case policy == 1:
		return ok("1: the firmware schedules; more queues than slots are rejected")
	case policy == 2:
		return fail("remove amdgpu.sched_policy=2 from the kernel command line and /etc/modprobe.d, then reboot",
			"2: the firmware does not schedule, so the driver rejects suspends")
	}
	return warn("set it to 0, the default", "%d, which is not a known value", policy)
}

func (h *host) cwsr() finding {
	on, err := h.param("cwsr_enable")
	switch {
	case err != nil:
		return fromParam(err)
	case on == 0:
		return fail("remove amdgpu.cwsr_enable=0 from the kernel command line and /etc/modprobe.d, then reboot",
			"0: kernels cannot be interrupted: a suspend waits until they end, and after a long one the driver resets the GPU")
	}
	return ok("%d: kernels can be interrupted", on)
}

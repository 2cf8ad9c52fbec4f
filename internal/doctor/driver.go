package doctor

import (
	"errors"
	"fmt"
	"syscall"
)

func (p *patient) driverInterface() finding {
	d, err := p.open, p.openErr
	switch {
	case err == nil && d.Note != "":
		return warn("watch the first suspends, and look for a newer gpreempt", "%s%s", d.Note, p.trace())
	case err == nil:
		return ok("%s, spoken to as that of %s%s", d.Version, d.Profile, p.trace())
	case !isErrno(err):
		return fail("Linux 6.5 or newer, or AMD's amdgpu-dkms package as new; criu and the freezer do not need DBG_TRAP", "%v", err).blocking(dbgtrap)
	case absent(err):
		return fail("ls -l /dev/kfd; in a container, pass the device (--device /dev/kfd)", "the driver is loaded, and there is no /dev/kfd").
			blocking(dbgtrap, criu)
	case hidden(err):
		if p.selfErr == nil && p.self.UID == 0 {
			return fail("allow the device to this process: DeviceAllow=/dev/kfd rw in its systemd unit, --device /dev/kfd for its container",
				"root may not open /dev/kfd: the device cgroup or a security module forbids it").blocking(dbgtrap, criu)
		}
		return p.limited("uid %d may not open /dev/kfd", p.self.UID)
	case errors.Is(err, syscall.EINVAL):
		return fail("wait a minute and look again; if it stays so, dmesg | grep -i amdgpu tells why",
			"the driver refuses to be opened: a GPU reset or a change of partitions is going on").blocking(dbgtrap, criu)
	}
	return fail("dmesg | grep -i kfd may tell why", "%v", err).blocking(dbgtrap, criu)
}

func isErrno(err error) bool {
	_, ok := errors.AsType[syscall.Errno](err)
	return ok
}

// trace says what opening the driver leaves behind.
func (p *patient) trace() string {
	if p.cfg.ByDaemon {
		return ""
	}
	return "; opening it made this diagnosis a process of the driver, until it ends in a moment"
}

func (p *patient) permissionRule() finding {
	const (
		thread  = "thread: the daemon stays the tracer of a process for as long as it holds it"
		process = "process: the daemon traces a process only while it attaches"
	)
	meaning := map[string]string{"thread": thread, "process": process}
	if rule := meaning[p.open.Rule]; rule != "" {
		return ok("%s (found out by trying)", rule)
	}
	if p.openErr != nil && !hidden(p.openErr) {
		return skip("the driver could not be opened")
	}
	guess := p.open.ProfileRule
	s, err := p.text("proc/sys/kernel/osrelease")
	if err == nil {
		if r, err := parseRelease(s); err == nil && (r.atLeast(7, 2, 0) || r.major == 6 && r.minor == 12 && r.patch >= 103) {
			guess = "process"
		}
	}
	if meaning[guess] == "" {
		return skip("not known before the daemon holds a process")
	}
	return ok("a guess by version: %s; the daemon finds out by trying when it first holds a process", meaning[guess])
}

// fromParam is the finding for a module parameter that cannot be read.
func fromParam(err error) finding {
	if absent(err) {
		return skip("the driver has no such parameter")
	}
	return unread(err)
}

func (p *patient) schedPolicy() finding {
	policy, err := p.param("sched_policy")
	switch {
	case err != nil:
		return fromParam(err)
	case policy == 0:
		return ok("0: the firmware schedules, and takes turns when there are more queues than slots")
	case policy == 1:
		return ok("1: the firmware schedules; more queues than slots are refused")
	case policy == 2:
		return fail("take amdgpu.sched_policy=2 off the kernel command line and out of /etc/modprobe.d, then reboot",
			"2: the firmware does not schedule, so the driver refuses to suspend queues").blocking(dbgtrap)
	}
	return warn("set it to 0, the default", "%d, which is not a known value", policy)
}

func (p *patient) cwsr() finding {
	on, err := p.param("cwsr_enable")
	switch {
	case err != nil:
		return fromParam(err)
	case on == 0:
		return fail("take amdgpu.cwsr_enable=0 off the kernel command line and out of /etc/modprobe.d, then reboot",
			"0: kernels cannot be interrupted, so a suspend waits for them to end, and a long one makes the driver reset the GPU").blocking(dbgtrap, criu)
	}
	return ok("%d: kernels can be interrupted", on)
}

// kernelQueues describes how many queue slots the driver keeps for itself.
func (p *patient) kernelQueues() string {
	n, err := p.param("num_kcq")
	if err != nil {
		return ""
	}
	if n < 0 || n > 8 { // amdgpu_gfx_get_num_kcq
		n = 8
	}
	return fmt.Sprintf("; num_kcq keeps %d of each GPU for the kernel", n)
}

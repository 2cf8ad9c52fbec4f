package safety

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Driver is the result of opening the driver.
type Driver struct {
	// Version is the interface version, "major.minor", and Minor its second part.
	Version string
	Minor   uint32
	// Profile names the ABI that is used, such as "6.12".
	Profile string
	// Note says what is unusual about the version; "" for a known one.
	Note string
}

// Config is what an examination needs.
type Config struct {
	// Root is the root directory of the host, os.DirFS("/"), or of a simulated machine.
	Root fs.FS
	// Simulated names the simulated machine of Root; "" for a host.
	Simulated string
	// ByDaemon reports whether this process is the daemon, so that its rights are the
	// daemon's.
	ByDaemon bool
	// Version is the version of the program.
	Version string
	// OpenDriver opens /dev/kfd and asks for its version, or returns what is known of the
	// driver that is already open. It is not called on a host without a GPU, nor in a
	// simulation. An error that wraps no syscall.Errno means that this build does not
	// support the driver's interface.
	OpenDriver func() (Driver, error)
	// Hazards are the results of the hazard table for dbgtrap; nil without a table.
	Hazards map[gpreempt.GPUID]Result
	// NVIDIA says what it found of the NVIDIA driver, and what to do if nvchannels cannot use that; nil
	// if the mechanism is not enabled. A remedy may be about some GPUs only.
	NVIDIA func() (found, remedy string, usable bool)
	// Processes reports how each process of the driver would be suspended; nil if that is
	// unknown.
	Processes func(context.Context) []*gpreemptv1.DiagnosedProcess
	// Debugfs is discovery.debugfs.
	Debugfs bool
	// ConfigErr is why the config file cannot be used; then the defaults are assumed.
	ConfigErr error
	// PrivateKey are the warnings about the access to the private key for TCP.
	PrivateKey []gpreempt.Warning
}

// gpu is a GPU node with what matters for suspending.
type gpu struct {
	gpreempt.GPU
	// sharing is how many processes can be debugged on it at once.
	sharing gpreemptv1.DebugSharing
	// computeQueues counts the user compute queues, suspended ones included.
	computeQueues int
}

// finding is the result of a check.
type finding struct {
	status        gpreemptv1.CheckStatus
	found, remedy string
}

func ok(format string, args ...any) finding {
	return finding{status: gpreemptv1.CheckStatus_CHECK_STATUS_OK, found: fmt.Sprintf(format, args...)}
}

func skip(format string, args ...any) finding {
	return finding{status: gpreemptv1.CheckStatus_CHECK_STATUS_SKIP, found: fmt.Sprintf(format, args...)}
}

func warn(remedy, format string, args ...any) finding {
	return finding{status: gpreemptv1.CheckStatus_CHECK_STATUS_WARN, found: fmt.Sprintf(format, args...), remedy: remedy}
}

func fail(remedy, format string, args ...any) finding {
	return finding{status: gpreemptv1.CheckStatus_CHECK_STATUS_FAIL, found: fmt.Sprintf(format, args...), remedy: remedy}
}

// subject is what a check needs.
type subject int

const (
	aboutHost subject = iota
	aboutDriver
	aboutGPUs
	// aboutMachine is a machine, simulated or not.
	aboutMachine
)

// checks are in the order of the report.
var checks = []struct {
	id, title string
	about     subject
	run       func(*host) finding
}{
	{"kernel", "kernel", aboutHost, (*host).kernel},
	{"kfd-interface", "KFD interface", aboutGPUs, (*host).driverInterface},
	{"debug-firmware", "debug firmware", aboutMachine, (*host).debugFirmware},
	{"debug-sharing", "debugged processes", aboutMachine, (*host).debugSharing},
	{"sched-policy", "sched_policy", aboutDriver, (*host).schedPolicy},
	{"cwsr", "cwsr_enable", aboutDriver, (*host).cwsr},
	{"queue-slots", "queue slots", aboutMachine, (*host).queueSlots},
	{"hazards", "known hazards", aboutGPUs, (*host).hazards},
	{"rights", "rights", aboutHost, (*host).rights},
	{"namespaces", "namespaces", aboutHost, (*host).namespaces},
	{"yama", "Yama ptrace_scope", aboutHost, (*host).yama},
	{"daemon", "daemon", aboutHost, (*host).daemon},
	{"cgroup", "cgroup version", aboutHost, (*host).cgroup},
	{"kernel-log", "kernel log", aboutHost, (*host).kernelLog},
	{"debugfs", "debugfs", aboutDriver, (*host).debugfs},
	{"user-queues", "user queues of DRM", aboutDriver, (*host).userQueues},
	{"processes", "processes", aboutMachine, (*host).processes},
	{"jobs", "jobs", aboutMachine, (*host).jobs},
}

// Examine checks a host. It changes no process. What it cannot read is in the report.
func Examine(ctx context.Context, cfg Config) *gpreemptv1.DiagnoseResponse {
	h := collect(ctx, cfg)
	report := &gpreemptv1.DiagnoseResponse{
		ByDaemon: cfg.ByDaemon, Backend: discovery.Backend(cfg.Root), Version: cfg.Version, Gpus: h.gpuMessages(), Processes: h.reports,
	}
	if cfg.Simulated != "" {
		report.Backend = "simulated " + cfg.Simulated
	}
	add := func(id, title string, f finding) {
		report.Checks = append(report.Checks, &gpreemptv1.Check{Id: id, Title: title, Status: f.status, Found: gpreempt.Printable(f.found), Remedy: f.remedy})
	}
	present, none := h.present()
	add("gpu", "AMD GPU", present)
	for _, c := range checks {
		if why := h.skipped(c.about, none); why != "" {
			add(c.id, c.title, skip("%s", why))
			continue
		}
		add(c.id, c.title, c.run(h))
	}
	otherGPUs := false
	if cfg.NVIDIA != nil && cfg.Simulated == "" {
		found, remedy, usable := cfg.NVIDIA()
		f := ok("%s", found)
		if !usable || remedy != "" {
			f = warn(remedy, "%s", found)
		}
		add("nvidia", "NVIDIA (experimental)", f)
		otherGPUs = none && usable
	}
	if cfg.ConfigErr != nil {
		add("config", "config file", h.configFile(cfg.ConfigErr))
	}
	for _, w := range cfg.PrivateKey {
		add("private-key", "private key", warn(w.Remedy, "%s", w.Text))
	}
	conclude(report, cfg, none)
	if otherGPUs {
		report.Verdict = gpreemptv1.Verdict_VERDICT_LIMITED
		report.Summary = "This host has no AMD GPU. gpreempt can suspend offline work on its NVIDIA GPUs by nvchannels, which is experimental."
		report.Remedy = "read docs/nvidia.md, the risks first"
	}
	return report
}

// skipped returns why a check is skipped; "" if it is not.
func (h *host) skipped(about subject, noGPU bool) string {
	switch {
	case noGPU:
		return "no AMD GPU"
	case h.cfg.Simulated != "" && about != aboutMachine:
		return "the machine is simulated"
	case about == aboutHost:
		return ""
	case !h.loaded:
		return "the amdgpu driver is not loaded"
	case len(h.gpus) == 0 && about != aboutDriver:
		return "the driver has no GPU"
	}
	return ""
}

// conclude sets the verdict from the checks.
func conclude(r *gpreemptv1.DiagnoseResponse, cfg Config, noGPU bool) {
	var failed, warned, unchecked []string
	for _, c := range r.Checks {
		switch c.GetStatus() {
		case gpreemptv1.CheckStatus_CHECK_STATUS_FAIL:
			failed = append(failed, c.GetTitle())
		case gpreemptv1.CheckStatus_CHECK_STATUS_WARN:
			warned = append(warned, c.GetTitle())
		case gpreemptv1.CheckStatus_CHECK_STATUS_SKIP:
			if c.GetRemedy() != "" {
				unchecked = append(unchecked, c.GetTitle())
			}
		default:
		}
	}
	switch {
	case cfg.Simulated != "":
		r.Verdict = gpreemptv1.Verdict_VERDICT_SIMULATED
		r.Summary = "Simulated: the daemon serves the machine " + cfg.Simulated + "; nothing was checked of the hardware of the host."
		r.Remedy = "gpreemptd diagnose checks the host itself"
	case noGPU:
		r.Verdict = gpreemptv1.Verdict_VERDICT_NO_GPU
		r.Summary = "This host has no AMD GPU."
		r.Remedy = "kfdemu demo shows gpreempt on an emulated GPU"
	case len(failed) > 0:
		r.Verdict = gpreemptv1.Verdict_VERDICT_NOT_READY
		r.Summary = "gpreempt cannot suspend offline work here yet. Failed: " + strings.Join(failed, ", ") + "."
		r.Remedy = "fix what failed, as its remedy says"
	case len(warned) > 0:
		r.Verdict = gpreemptv1.Verdict_VERDICT_LIMITED
		r.Summary = "gpreempt can suspend offline work here by dbgtrap. Warnings: " + strings.Join(warned, ", ") + "."
		r.Remedy = "read the warnings; each has a remedy"
	case len(unchecked) > 0:
		r.Verdict = gpreemptv1.Verdict_VERDICT_LIMITED
		r.Summary = "gpreempt can suspend offline work here by dbgtrap: no check that this user may make shows a problem."
		r.Remedy = "sudo gpctl doctor checks the rest"
	default:
		r.Verdict = gpreemptv1.Verdict_VERDICT_READY
		r.Summary = "gpreempt can suspend offline work here by dbgtrap. No problem was found."
	}
	if len(unchecked) > 0 {
		r.Summary += " Not checked for lack of rights: " + strings.Join(unchecked, ", ") + "."
	}
}

// hidden reports whether a file could not be read for lack of rights.
func hidden(err error) bool { return errors.Is(err, fs.ErrPermission) }

// absent reports whether a file does not exist.
func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }

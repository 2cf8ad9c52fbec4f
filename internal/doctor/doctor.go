// Package doctor checks whether a host is supported: kernel, driver, GPUs, rights and
// processes.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"unicode"

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
	// Rule is who may debug a process, "thread" or "process", as a session has found out;
	// "" if none has.
	Rule string
	// ProfileRule is the rule of the profile. It is a guess, because stable kernels changed
	// the rule within one interface version.
	ProfileRule string
}

// Hazard is the result of the hazard table for a GPU.
type Hazard struct {
	GPU    gpreempt.GPUID
	Action HazardAction
	// Reason names the public issue; "" if none is known.
	Reason string
	// Mechanisms are those that the row is about.
	Mechanisms []string
}

// HazardAction is what is allowed on a GPU; it has the API's numbers.
type HazardAction int32

// The actions.
const (
	HazardUnknown HazardAction = iota
	HazardAllow
	HazardLimit
	HazardDeny
)

// Process reports how a process of the driver would be suspended.
type Process struct {
	Key gpreempt.ProcessKey
	// Comm is its command name.
	Comm string
	// Offline reports whether it may be suspended.
	Offline bool
	// Mechanism is the chosen one; "" if none can be used.
	Mechanism string
	// Why is the reason for it, or why no mechanism was tried.
	Why string
	// Rejected are the better ones, best first.
	Rejected []Rejection
}

// Rejection is a mechanism that was not chosen.
type Rejection struct {
	Mechanism string
	// Why is what prevents it, Remedy what to do about that; "" for nothing.
	Why, Remedy string
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
	// Version is that of the program.
	Version string
	// OpenDriver opens /dev/kfd and asks for its version, or returns what is known of the
	// driver that is already open. It is not called on a host without a GPU, nor in a
	// simulation. An error that wraps no syscall.Errno means that this build does not
	// support the driver's interface.
	OpenDriver func() (Driver, error)
	// Hazards checks GPUs by the hazard table; nil without one.
	Hazards func([]gpreempt.GPU) []Hazard
	// Processes reports how each process of the driver would be suspended; nil if that is
	// unknown.
	Processes func(context.Context) []Process
	// Lock is the path of the daemon's instance lock.
	Lock string
	// Groups are the groups that have rights by the config file.
	Groups []string
}

// Status is the result of a check; it has the API's numbers.
type Status int32

// The statuses.
const (
	// OK: as it should be.
	OK Status = iota + 1
	// Warn: works with a limitation.
	Warn
	// Fail: prevents suspending.
	Fail
	// Skip: not checked.
	Skip
)

// String returns the word for s.
func (s Status) String() string {
	switch s {
	case OK:
		return "ok"
	case Warn:
		return "warn"
	case Fail:
		return "fail"
	case Skip:
		return "skip"
	}
	return fmt.Sprintf("status(%d)", int32(s))
}

// Check is one thing that was checked.
type Check struct {
	// ID is stable.
	ID, Title string
	Status    Status
	// Found is what was found, or why the check was skipped.
	Found string
	// Remedy is what to do; set for Warn and Fail.
	Remedy string
}

// Verdict is whether the host is supported; it has the API's numbers.
type Verdict int32

// The verdicts.
const (
	// Ready: no problem was found.
	Ready Verdict = iota + 1
	// Limited: it can work, with limits.
	Limited
	// NotReady: something must be fixed first.
	NotReady
	// NoGPU: there is no AMD GPU.
	NoGPU
	// Simulated: nothing was checked of the host.
	Simulated
)

// Sharing is how many processes can be debugged on a GPU at once; it has the
// API's numbers.
type Sharing int32

// The kinds of sharing.
const (
	SharingUnknown Sharing = iota
	SharingOne
	SharingSeveral
)

// GPU is a GPU node with what matters for suspending.
type GPU struct {
	gpreempt.GPU
	// Sharing is how many processes can be debugged on it at once.
	Sharing Sharing
	// ComputeQueues counts the user compute queues, suspended ones included.
	ComputeQueues int
	Hazard        Hazard
}

// Report is the result of an examination.
type Report struct {
	Verdict Verdict
	// Summary is the verdict in a sentence, Remedy what to do about it; "" for nothing.
	Summary, Remedy string
	ByDaemon        bool
	// Backend is "kfd", "simulated MACHINE" or "emulated MACHINE".
	Backend string
	Version string
	// Checks are in reading order; each id once.
	Checks []Check
	// GPUs are ascending by node.
	GPUs []GPU
	// Processes are ascending by pid.
	Processes []Process
}

// finding is the result of a check, with the mechanisms that it rules out.
type finding struct {
	status        Status
	found, remedy string
	blocks        []string
}

// The mechanisms by name, best first.
const (
	byDbgtrap = "dbgtrap"
	byCRIU    = "criu"
	byFreezer = "freezer"
)

func ok(format string, args ...any) finding {
	return finding{status: OK, found: fmt.Sprintf(format, args...)}
}

func skip(format string, args ...any) finding {
	return finding{status: Skip, found: fmt.Sprintf(format, args...)}
}

func warn(remedy, format string, args ...any) finding {
	return finding{status: Warn, found: fmt.Sprintf(format, args...), remedy: remedy}
}

func fail(remedy, format string, args ...any) finding {
	return finding{status: Fail, found: fmt.Sprintf(format, args...), remedy: remedy}
}

// blocking sets the mechanisms that a finding rules out.
func (f finding) blocking(mechanisms ...string) finding {
	f.blocks = mechanisms
	return f
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
	{"permission-rule", "permission rule", aboutGPUs, (*host).permissionRule},
	{"sched-policy", "sched_policy", aboutDriver, (*host).schedPolicy},
	{"cwsr", "cwsr_enable", aboutDriver, (*host).cwsr},
	{"queue-slots", "queue slots", aboutMachine, (*host).queueSlots},
	{"hazards", "known hazards", aboutGPUs, (*host).hazards},
	{"rights", "rights", aboutHost, (*host).rights},
	{"namespaces", "namespaces", aboutHost, (*host).namespaces},
	{"yama", "Yama ptrace_scope", aboutHost, (*host).yama},
	{"lockdown", "kernel lockdown", aboutHost, (*host).lockdown},
	{"debuggers", "other debuggers", aboutDriver, (*host).debuggers},
	{"daemon", "daemon", aboutHost, (*host).daemon},
	{"groups", "groups", aboutHost, (*host).groups},
	{"cgroup", "cgroup version", aboutHost, (*host).cgroup},
	{"kernel-log", "kernel log", aboutHost, (*host).kernelLog},
	{"debugfs", "debugfs", aboutDriver, (*host).debugfs},
	{"processes", "processes", aboutMachine, (*host).processes},
}

// Examine checks a host. It changes no process. What it cannot read is in the report.
func Examine(ctx context.Context, cfg Config) *Report {
	h := collect(ctx, cfg)
	report := &Report{ByDaemon: cfg.ByDaemon, Backend: discovery.Backend(cfg.Root), Version: cfg.Version, GPUs: h.gpus, Processes: h.reports}
	if cfg.Simulated != "" {
		report.Backend = "simulated " + cfg.Simulated
	}
	blocked := map[string]bool{}
	add := func(id, title string, f finding) {
		for _, mechanism := range f.blocks {
			blocked[mechanism] = true
		}
		report.Checks = append(report.Checks, Check{ID: id, Title: title, Status: f.status, Found: clean(f.found), Remedy: f.remedy})
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
	report.conclude(cfg, none, blocked)
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
func (r *Report) conclude(cfg Config, noGPU bool, blocked map[string]bool) {
	var failed, warned []string
	for _, c := range r.Checks {
		switch c.Status {
		case Fail:
			failed = append(failed, c.Title)
		case Warn:
			warned = append(warned, c.Title)
		case OK, Skip:
		}
	}
	switch {
	case cfg.Simulated != "":
		r.Verdict = Simulated
		r.Summary = "Simulated: the daemon serves the machine " + cfg.Simulated + "; nothing was checked of the hardware of the host."
		r.Remedy = "gpreemptd diagnose checks the host itself"
	case noGPU:
		r.Verdict = NoGPU
		r.Summary = "This host has no AMD GPU."
		r.Remedy = "kfdemu demo shows gpreempt on an emulated GPU"
	case len(failed) > 0:
		r.Verdict = NotReady
		r.Summary = "gpreempt cannot suspend offline work here yet. Failed: " + strings.Join(failed, ", ") + ". " + remaining(blocked)
		r.Remedy = "fix what failed, as its remedy says"
	case len(warned) > 0:
		r.Verdict = Limited
		r.Summary = "gpreempt can suspend offline work here by dbgtrap. Warnings: " + strings.Join(warned, ", ") + "."
		r.Remedy = "read the warnings; each has a remedy"
	default:
		r.Verdict = Ready
		r.Summary = "gpreempt can suspend offline work here by dbgtrap. No problem was found."
	}
}

// remaining returns which mechanisms are not ruled out.
func remaining(blocked map[string]bool) string {
	if !blocked[byDbgtrap] {
		return "No check rules out the default mechanism, dbgtrap."
	}
	var others []string
	for _, mechanism := range []string{byCRIU, byFreezer} {
		if !blocked[mechanism] {
			others = append(others, mechanism)
		}
	}
	if len(others) == 0 {
		return "Until then no mechanism can be used."
	}
	return "The default mechanism, dbgtrap, cannot be used; the config key mechanisms may name " + strings.Join(others, " or ") + "."
}

// clean replaces unprintable characters: programs choose their command names.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// hidden reports whether a file could not be read for lack of rights.
func hidden(err error) bool { return errors.Is(err, fs.ErrPermission) }

// absent reports whether a file does not exist.
func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }

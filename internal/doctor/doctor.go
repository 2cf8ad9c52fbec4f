// Package doctor hides what has to hold on a host for gpreempt to work there, and
// how each of it is found out.
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

// Driver is what opening the driver told.
type Driver struct {
	// Version is the interface version, "major.minor", and Minor its second part.
	Version string
	Minor   uint32
	// Profile names the line of drivers it is spoken to as, such as "6.12".
	Profile string
	// Note says what is unusual about the version; "" when it is a known one.
	Note string
	// Rule says whom the driver lets debug a process, "thread" or "process", as a
	// session found out; "" when none has, or in a process without sessions.
	Rule string
	// ProfileRule is the rule of the profile: stable kernels changed it within one
	// interface version, so it is a guess.
	ProfileRule string
}

// Hazard is what the table of known hazards says of a GPU.
type Hazard struct {
	GPU    gpreempt.GPUID
	Action HazardAction
	// Reason names the public issue; "" when nothing is known.
	Reason string
	// Mechanisms are those it is about.
	Mechanisms []string
}

// HazardAction is what may be done on a GPU; it has the API's numbers.
type HazardAction int32

// The actions.
const (
	HazardUnknown HazardAction = iota
	HazardAllow
	HazardLimit
	HazardDeny
)

// Process is a process of the driver, and how it would be suspended.
type Process struct {
	Key gpreempt.ProcessKey
	// Comm is its command name.
	Comm string
	// Offline tells that it may be suspended, as far as is known.
	Offline bool
	// Mechanism is the one chosen; "" when none can be used.
	Mechanism string
	// Why says why that one, or why none was looked for.
	Why string
	// Rejected are the better ones, best first.
	Rejected []Rejection
}

// Rejection is a mechanism that was not chosen.
type Rejection struct {
	Mechanism string
	// Why says what stood in the way, Remedy what to do about it, if anything.
	Why, Remedy string
}

// Config is what an examination needs.
type Config struct {
	// Root is the root directory of the host, os.DirFS("/"), or of a simulated one.
	Root fs.FS
	// Simulated names the simulated machine whose tree Root is; "" for the host.
	Simulated string
	// ByDaemon tells that the daemon itself looks: what this process may do is then
	// what the daemon may do.
	ByDaemon bool
	// Version is that of the program.
	Version string
	// OpenDriver opens /dev/kfd and asks for its version, or gives what is known of
	// the driver already open. It is not called where there is no GPU, nor in a
	// simulation. An error without a syscall.Errno in it says that this build does
	// not speak the driver's interface.
	OpenDriver func() (Driver, error)
	// Hazards judges GPUs; nil: nobody can.
	Hazards func([]gpreempt.GPU) []Hazard
	// Processes describes how each process of the driver would be suspended; nil: it is
	// not known.
	Processes func(context.Context) []Process
	// Lock is the path of the daemon's instance lock.
	Lock string
	// Groups are the groups that the config file gives rights to.
	Groups []string
}

// Status is how a check came out; it has the API's numbers.
type Status int32

// The statuses.
const (
	// OK: as it should be.
	OK Status = iota + 1
	// Warn: works, with a limit worth knowing.
	Warn
	// Fail: stands in the way.
	Fail
	// Skip: not looked at.
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

// Check is one thing that was looked at.
type Check struct {
	// ID is stable.
	ID, Title string
	Status    Status
	// Found says what there is, or why nobody looked.
	Found string
	// Remedy says what to do; set for Warn and Fail.
	Remedy string
}

// Verdict is whether gpreempt can work; it has the API's numbers.
type Verdict int32

// The verdicts.
const (
	// Ready: nothing found stands in the way.
	Ready Verdict = iota + 1
	// Limited: it can work, with limits.
	Limited
	// NotReady: something has to be put right first.
	NotReady
	// NoGPU: there is no AMD GPU.
	NoGPU
	// Simulated: nothing was found out about the host.
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

// GPU is a GPU node as far as suspending goes.
type GPU struct {
	gpreempt.GPU
	// Sharing is how many processes can be debugged on it at once.
	Sharing Sharing
	// ComputeQueues counts the user compute queues, suspended ones included.
	ComputeQueues int
	Hazard        Hazard
}

// Report is whether and how gpreempt can work on a host.
type Report struct {
	Verdict Verdict
	// Summary says it in a sentence, Remedy what to do about it; "" for nothing.
	Summary, Remedy string
	ByDaemon        bool
	// Backend is "kfd", "simulated MACHINE" or "emulated MACHINE".
	Backend string
	Version string
	// Checks are in the order they are best read; each id once.
	Checks []Check
	// GPUs are ascending by node.
	GPUs []GPU
	// Processes are ascending by pid.
	Processes []Process
}

// finding is what a check found, and which mechanisms that rules out.
type finding struct {
	status        Status
	found, remedy string
	blocks        []string
}

// The mechanisms by name, best first.
const (
	dbgtrap = "dbgtrap"
	criu    = "criu"
	freezer = "freezer"
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

// blocking says which mechanisms a finding rules out.
func (f finding) blocking(mechanisms ...string) finding {
	f.blocks = mechanisms
	return f
}

// subject is what a check is about: without it there is nothing to look at.
type subject int

const (
	aboutHost subject = iota
	aboutDriver
	aboutGPUs
	// aboutMachine is what a simulated machine has too.
	aboutMachine
)

// checks are made in this order.
var checks = []struct {
	id, title string
	about     subject
	look      func(*patient) finding
}{
	{"kernel", "kernel", aboutHost, (*patient).kernel},
	{"kfd-interface", "KFD interface", aboutGPUs, (*patient).driverInterface},
	{"debug-firmware", "debug firmware", aboutMachine, (*patient).debugFirmware},
	{"debug-sharing", "debugged processes", aboutMachine, (*patient).debugSharing},
	{"permission-rule", "permission rule", aboutGPUs, (*patient).permissionRule},
	{"sched-policy", "sched_policy", aboutDriver, (*patient).schedPolicy},
	{"cwsr", "cwsr_enable", aboutDriver, (*patient).cwsr},
	{"queue-slots", "queue slots", aboutMachine, (*patient).queueSlots},
	{"hazards", "known hazards", aboutGPUs, (*patient).hazards},
	{"rights", "rights", aboutHost, (*patient).rights},
	{"namespaces", "namespaces", aboutHost, (*patient).namespaces},
	{"yama", "Yama ptrace_scope", aboutHost, (*patient).yama},
	{"lockdown", "kernel lockdown", aboutHost, (*patient).lockdown},
	{"debuggers", "other debuggers", aboutDriver, (*patient).debuggers},
	{"daemon", "daemon", aboutHost, (*patient).daemon},
	{"groups", "groups", aboutHost, (*patient).groups},
	{"cgroup", "cgroup version", aboutHost, (*patient).cgroup},
	{"kernel-log", "kernel log", aboutHost, (*patient).kernelLog},
	{"debugfs", "debugfs", aboutDriver, (*patient).debugfs},
	{"processes", "processes", aboutMachine, (*patient).processes},
}

// Examine looks at the host and reports whether and how gpreempt can work on it. It
// touches no process; where it may not look, the report says so.
func Examine(ctx context.Context, cfg Config) *Report {
	p := see(ctx, cfg)
	report := &Report{ByDaemon: cfg.ByDaemon, Backend: discovery.Backend(cfg.Root), Version: cfg.Version, GPUs: p.gpus, Processes: p.told}
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
	present, none := p.present()
	add("gpu", "AMD GPU", present)
	for _, c := range checks {
		if why := p.why(c.about, none); why != "" {
			add(c.id, c.title, skip("%s", why))
			continue
		}
		add(c.id, c.title, c.look(p))
	}
	report.conclude(cfg, none, blocked)
	return report
}

// why says why a check about something is not made; "" when it is.
func (p *patient) why(about subject, noGPU bool) string {
	switch {
	case noGPU:
		return "there is no AMD GPU"
	case p.cfg.Simulated != "" && about != aboutMachine:
		return "the machine is simulated"
	case about == aboutHost:
		return ""
	case !p.loaded:
		return "the amdgpu driver is not loaded"
	case len(p.gpus) == 0 && about != aboutDriver:
		return "the driver has no GPU"
	}
	return ""
}

// conclude draws the verdict from the checks.
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
		r.Summary = "Everything here is simulated: the daemon serves the machine " + cfg.Simulated + ", and this says nothing about the hardware of the host."
		r.Remedy = "gpreemptd diagnose looks at the host itself"
	case noGPU:
		r.Verdict = NoGPU
		r.Summary = "This host has no AMD GPU: there is nothing here for gpreempt to do."
		r.Remedy = "see it work on a simulated GPU: gpctl demo, or gpreemptd serve --sim mi300x"
	case len(failed) > 0:
		r.Verdict = NotReady
		r.Summary = "gpreempt is not ready to suspend offline work here; what failed: " + strings.Join(failed, ", ") + ". " + remaining(blocked)
		r.Remedy = "put right what failed, as said there"
	case len(warned) > 0:
		r.Verdict = Limited
		r.Summary = "gpreempt can suspend offline work here by dbgtrap, as far as can be seen; what to look at: " + strings.Join(warned, ", ") + "."
		r.Remedy = "read the warnings, each says what to do"
	default:
		r.Verdict = Ready
		r.Summary = "Nothing that can be seen stands in the way of suspending offline work here by dbgtrap."
	}
}

// remaining says which mechanisms are not ruled out.
func remaining(blocked map[string]bool) string {
	if !blocked[dbgtrap] {
		return "Nothing that can be seen rules out the default mechanism, dbgtrap."
	}
	var others []string
	for _, mechanism := range []string{criu, freezer} {
		if !blocked[mechanism] {
			others = append(others, mechanism)
		}
	}
	if len(others) == 0 {
		return "Until then no mechanism can be used."
	}
	return "The default mechanism, dbgtrap, cannot be used; the config key mechanisms may name " + strings.Join(others, " or ") + "."
}

// clean makes text fit to be printed and sent: command names are others' to choose.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// hidden tells that a file could not be read for lack of rights.
func hidden(err error) bool { return errors.Is(err, fs.ErrPermission) }

// absent tells that there is no such file.
func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }

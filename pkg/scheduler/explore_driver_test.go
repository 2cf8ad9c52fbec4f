package scheduler

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// A model of what the driver and a mechanism do with one process, and who debugs it there:
// the rules of emu/driver, from kfd_dbg_trap_enable, kfd_dbg_trap_disable, suspend_queues,
// resume_queues and kfd_process_notifier_release_internal of Linux 6.12.117, with the
// permission rule by process. Another debugger can take the right to debug then.

type debuggedBy uint8

const (
	nobody debuggedBy = iota
	theDaemon
	aForeigner
)

const mostQueues = 2

// modelProcess is a process with queues, and what of it is on its way to the core.
type modelProcess struct {
	alive bool
	// queues is how many it has, and suspended how many of them the driver has suspended:
	// the older ones. born counts all that it ever created, reported those that the core knows.
	queues, suspended, born, reported uint8
	unmanaged                         bool
	away                              bool // by the records of the core

	// enabled: debugging is enabled, by the daemon if ours. debugger has the right to call.
	enabled, ours bool
	debugger      debuggedBy
	foreigner     bool // another debugger is attached to the process
	session       bool // the mechanism holds a session

	// flight is the action of the core that is not answered; done: it took effect, with
	// this result. A detach can follow the action of a process that has left.
	flight ActionKind
	seq    uint64
	done   bool
	result Cause
	// doubted has a bit for each GPU that raised an alarm during the Suspend in flight.
	doubted    uint8
	thenDetach bool

	// inspect is the number of the Inspect that is not answered, since inspectAt.
	inspect   uint64
	inspectAt Time
}

// running returns how many queues are not suspended.
func (p *modelProcess) running() uint8 { return p.queues - p.suspended }

// disable is kfd_dbg_trap_disable, which resumes.
func (p *modelProcess) disable() {
	p.enabled, p.ours, p.debugger, p.suspended = false, false, nobody, 0
}

// mayCall reports whether the driver accepts calls of the daemon. Once the other debugger
// is gone, the daemon takes the right back.
func (p *modelProcess) mayCall() bool {
	if p.debugger == aForeigner && !p.foreigner {
		p.debugger = theDaemon
	}
	return p.debugger == theDaemon
}

// perform lets the action in flight take effect.
func (p *modelProcess) perform() {
	p.done = true
	p.result = ""
	switch {
	case !p.alive:
		p.result = CauseGone
		p.session = p.session && p.flight != ActDetach
	case p.flight == ActAttach && p.enabled:
		p.result = gpreempt.ReasonResisted
	case p.flight == ActAttach:
		p.enabled, p.ours, p.debugger, p.session = true, true, theDaemon, true
		p.reported = p.born
	case p.flight == ActDetach && (!p.enabled || !p.ours):
		p.session = false
	case !p.enabled || !p.ours:
		p.result = CauseReplaced
	case !p.mayCall():
		p.result = gpreempt.ReasonResisted
	case p.flight == ActSuspend:
		p.suspended = p.queues
	case p.flight == ActResume:
		p.suspended = 0
	case p.flight == ActDetach:
		p.disable()
		p.session = false
	}
}

// fail lets the action in flight fail. A mechanism undoes a suspension that failed.
func (p *modelProcess) fail(result Cause) {
	p.done, p.result = true, result
	if p.flight == ActSuspend && p.enabled && p.ours && p.mayCall() {
		p.suspended = 0
	}
}

// die is the end of the process, and replace that of its program: the driver releases both
// with their address space. The new program has created one queue.
func (p *modelProcess) die() {
	p.disable()
	p.alive, p.queues, p.born, p.reported, p.foreigner = false, 0, 0, 0, false
}

func (p *modelProcess) replace() {
	p.disable()
	p.queues = 1
}

// debug is another debugger that attaches. The driver refuses it where debugging is
// enabled already, and gives it the right to debug all the same (kfd_ioctl_set_debug_trap).
func (p *modelProcess) debug() {
	p.foreigner, p.debugger, p.enabled = true, aForeigner, true
}

// undebug is the end of that debugger. The driver disables what it enabled itself: it counts
// for each debugger.
func (p *modelProcess) undebug() {
	p.foreigner = false
	if p.enabled && !p.ours {
		p.disable()
	}
}

// daemonDies is what the driver undoes when the daemon dies at this moment.
func (p *modelProcess) daemonDies() {
	if p.enabled && p.ours && p.debugger == theDaemon {
		p.disable()
	}
}

// knownGap reports whether another debugger has the right over queues that the daemon
// suspended: docs/mechanisms.md, limits of dbgtrap.
func (p *modelProcess) knownGap() bool { return p.enabled && p.ours && p.debugger == aForeigner }

// lostUnnoticed reports whether the driver ended the session and no call has shown it yet.
func (p *modelProcess) lostUnnoticed() bool { return p.session && (!p.enabled || !p.ours) }

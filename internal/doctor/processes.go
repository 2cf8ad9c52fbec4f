package doctor

import (
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// daemonName is the command name of the daemon.
const daemonName = "gpreemptd"

// debuggerNames are those of debuggers that open the driver themselves.
var debuggerNames = []string{"rocgdb", "gdb"}

// running returns the process that holds the instance lock; 0 when none does.
func (p *patient) running() (int32, error) {
	path := strings.TrimPrefix(p.cfg.Lock, "/")
	text, err := p.text(path)
	if err != nil {
		if absent(err) {
			err = nil
		}
		return 0, err
	}
	info, err := fs.Stat(p.cfg.Root, path)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.ParseInt(text, 10, 32)
	st, isFile := info.Sys().(*syscall.Stat_t)
	if err != nil || !isFile {
		return 0, nil //nolint:nilerr // no pid in it: nobody has held it yet
	}
	locks, err := p.read("proc/locks")
	if err != nil || !holdsFlock(locks, st.Ino, int32(pid)) {
		return 0, err
	}
	return int32(pid), nil
}

func (p *patient) daemon() finding {
	holder, err := p.running()
	if err != nil {
		return unread(err)
	}
	var others []string
	for _, proc := range p.seen {
		// Another diagnosis has the driver open for a moment, and suspends nothing.
		words := strings.Fields(proc.Cmdline)
		diagnosis := len(words) > 1 && words[1] == "diagnose"
		if proc.Comm == daemonName && proc.UID == 0 && proc.Key.PID != holder && !diagnosis {
			others = append(others, strconv.Itoa(int(proc.Key.PID)))
		}
	}
	switch {
	case len(others) > 0:
		return fail("let one gpreemptd serve the host, with the host's /run: two would suspend and resume the same queues",
			"gpreemptd has the driver open without holding %s: pid %s", p.cfg.Lock, strings.Join(others, ", "))
	case p.cfg.ByDaemon:
		return ok("this one, pid %d, and no other", p.self.Process)
	case holder != 0:
		return ok("gpreemptd runs, pid %d", holder)
	}
	return warn("systemctl enable --now gpreemptd", "gpreemptd does not run: nothing is suspended")
}

func (p *patient) debuggers() finding {
	if p.seenErr != nil {
		return unread(p.seenErr)
	}
	daemon, err := p.running()
	if err != nil {
		daemon = 0 // then the daemon itself is named, which is no harm
	}
	var found []string
	for _, proc := range p.seen {
		what := fmt.Sprintf("%s (pid %d)", proc.Comm, proc.Key.PID)
		if slices.Contains(debuggerNames, proc.Comm) {
			found = append(found, what+" has the driver open")
		}
		status, err := p.status(strconv.Itoa(int(proc.Key.PID)))
		if err != nil || status.Tracer == 0 {
			continue // it left, or nobody traces it
		}
		// The tracer is a thread; procfs shows those too, by their id.
		tracer, err := p.status(strconv.Itoa(int(status.Tracer)))
		switch {
		case err != nil:
			found = append(found, fmt.Sprintf("%s is traced by thread %d", what, status.Tracer))
		case p.selfErr == nil && tracer.Process == p.self.Process, tracer.Process == daemon:
		default:
			found = append(found, fmt.Sprintf("%s is traced by %s (pid %d)", what, tracer.Name, tracer.Process))
		}
	}
	if len(found) == 0 {
		return ok("none on a process of the driver")
	}
	return warn("end the debugger; a process it holds cannot be held by dbgtrap or criu, and runs on", "%s", strings.Join(found, "; "))
}

func (p *patient) processes() finding {
	if p.seenErr != nil {
		return fail("check that this process may read /"+sysKFD+"/proc", "%v", p.seenErr)
	}
	queues := 0
	for _, proc := range p.seen {
		queues += len(proc.Queues)
	}
	said := fmt.Sprintf("%s with %s", plural(len(p.seen), "process"), plural(queues, "queue"))
	var stuck []string
	for _, proc := range p.told {
		if proc.Offline && proc.Mechanism == "" {
			stuck = append(stuck, fmt.Sprintf("%s (pid %d)", proc.Comm, proc.Key.PID))
		}
	}
	switch {
	case len(stuck) > 0:
		return warn("gpctl target explain PID, or the list of processes here, tells why",
			"%s; no mechanism can suspend %s", said, strings.Join(stuck, ", "))
	case len(p.unseen) > 0:
		return warn("let this process read what is named", "%s; %s", said, strings.Join(p.unseen, "; "))
	}
	return ok("%s", said)
}

package discovery

import (
	"bytes"
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// maxCmdline is where a command line is cut, maxEnviron where an environment is
	// and maxValue where the value of a variable is, in bytes.
	maxCmdline = 4 << 10
	maxEnviron = 256 << 10
	maxValue   = 4 << 10
	// maxReadings is how many processes are being read at the same time, those that
	// hang included: each of these keeps a thread of ours in the kernel.
	maxReadings = 32
	// patience is how long a scan waits for the next answer, longestWait for all.
	patience    = 10 * time.Millisecond
	longestWait = 100 * time.Millisecond
	// slowAfter is after how long a reading that has not ended is a warning.
	slowAfter = time.Second
)

// memory reads what is in the memory of processes: the command line and the
// environment (proc_pid_cmdline_read, environ_read). The kernel fetches the pages
// as the process itself would, and a page may be one that FUSE or a userfaultfd is
// to fill: then the read lasts until whoever owns those says so, and no signal ends
// it. To open the environment can take as long (mm_access waits for an exec). So
// each process is read in a goroutine of its own, one at a time.
//
// Its methods are called under the lock of the FS.
type memory struct {
	tree  tree
	links fs.ReadLinkFS // nil when the root knows no links
	// patience and longestWait are the constants, except in tests.
	patience, longestWait time.Duration
	reading               map[gpreempt.ProcessKey]*reading
	// answers has room for every reading, so that none waits to be heard.
	answers chan *reading
}

func newMemory(t tree, root fs.FS) memory {
	links, _ := root.(fs.ReadLinkFS)
	return memory{
		tree: t, links: links, patience: patience, longestWait: longestWait,
		reading: map[gpreempt.ProcessKey]*reading{}, answers: make(chan *reading, maxReadings),
	}
}

// answered reports whether there is an answer that no snapshot has yet.
func (m *memory) answered() bool { return len(m.answers) > 0 }

// reading is one look into the memory of a process.
type reading struct {
	key   gpreempt.ProcessKey
	inode uint64   // that of KFD's directory of it
	names []string // the variables to look for
	scan  uint64   // which scan asked
	since time.Time

	// other tells that the pid named another process before or after, or none: then
	// what follows is not to be used.
	other        bool
	exe, cmdline string
	env          map[string]string
	// envRead tells that the environment could be read.
	envRead bool
	// problems are warnings.
	problems []string
}

// remembered is what is known of the memory of a process.
type remembered struct {
	// wanted tells that it is to be read, told that it has been.
	wanted, told bool
	// asked are the variables that were looked for last, known those that were found
	// or are known not to be set.
	asked, known []string
	problems     []string
}

// start begins to read a process.
func (m *memory) start(k *known, names []string, scan uint64) {
	r := &reading{key: k.proc.Key, inode: k.inode, names: names, scan: scan, since: time.Now()}
	m.reading[r.key] = r
	go func() {
		r.read(m.tree, m.links)
		m.answers <- r
	}()
}

// readMemories has the memories read that are wanted, and waits for them as Scan
// says. It returns the warnings about them.
func (f *FS) readMemories(found []*known, now time.Time) (warnings []string) {
	var want []*known
	for _, k := range found {
		k.memory.wanted = k.memory.wanted || !slices.Equal(k.memory.asked, f.env)
		if k.memory.wanted && f.memory.reading[k.proc.Key] == nil {
			want = append(want, k)
		}
	}
	if len(want) > 0 {
		want = f.waitForMemories(want)
	}
	hanging := 0
	for _, r := range f.memory.reading {
		if now.Sub(r.since) >= slowAfter {
			hanging++
		}
	}
	for _, k := range found {
		if r := f.memory.reading[k.proc.Key]; r != nil && now.Sub(r.since) >= slowAfter {
			warnings = append(warnings, fmt.Sprintf("command line, program and environment of process %d are %s: reading its memory hangs, "+
				"which whoever serves it can cause with FUSE or userfaultfd", k.proc.Key.PID, k.memory.state()))
		}
		warnings = append(warnings, k.memory.problems...)
	}
	if hanging == maxReadings && len(want) > 0 {
		warnings = append(warnings, fmt.Sprintf("command line, program and environment of %d more processes are not read: %d readings hang, "+
			"and there are never more", len(want), hanging))
	}
	return warnings
}

// state says what a snapshot has of a memory that is being read.
func (r remembered) state() string {
	if r.told {
		return "what they were"
	}
	return "not known"
}

// waitForMemories has those read that are wanted, and gives those for which there
// was no time.
func (f *FS) waitForMemories(want []*known) (left []*known) {
	m := &f.memory
	// First those of which nothing is known.
	slices.SortStableFunc(want, func(a, b *known) int { return cmp.Compare(truth(a.memory.told), truth(b.memory.told)) })
	deadline := time.Now().Add(m.longestWait)
	timer := time.NewTimer(min(m.patience, m.longestWait))
	defer timer.Stop()
	expected := 0
	for {
		for len(want) > 0 && len(m.reading) < maxReadings {
			m.start(want[0], f.env, f.scans)
			want = want[1:]
			expected++
		}
		if expected == 0 { // done, or every place is taken by one that hangs
			return want
		}
		select {
		case r := <-m.answers:
			if r.scan == f.scans {
				expected--
			}
			f.take(r)
			timer.Reset(min(m.patience, time.Until(deadline)))
		case <-timer.C:
			return want
		}
	}
}

func truth(b bool) int {
	if b {
		return 1
	}
	return 0
}

// takeAnswers takes what came in since the last scan.
func (f *FS) takeAnswers() {
	for f.memory.answered() {
		f.take(<-f.memory.answers)
	}
}

// take makes an answer known, when the process it is about is still there and has
// not called exec since it was asked for.
func (f *FS) take(r *reading) {
	delete(f.memory.reading, r.key)
	k := f.known[r.key.PID]
	if r.other || k == nil || k.proc.Key != r.key || k.inode != r.inode {
		return
	}
	p, m := &k.proc.Process, &k.memory
	// A process whose main thread has ended shows neither any more.
	if r.exe != "" || r.cmdline != "" || !m.told {
		p.Exe, p.Cmdline = r.exe, r.cmdline
	}
	if r.envRead {
		// What was read first stands, of variables that were looked for then: programs
		// that show a title in ps write it over their environment.
		for _, name := range m.known {
			delete(r.env, name)
			if value, set := p.Env[name]; set && slices.Contains(r.names, name) {
				r.env[name] = value
			}
		}
		p.Env, m.known = r.env, r.names
		if len(p.Env) == 0 {
			p.Env = nil
		}
	}
	*m = remembered{told: true, asked: r.names, known: m.known, problems: r.problems}
}

// read looks between two looks at the start time. If that stayed, what it read is
// all of one process, which is the one it was asked about.
func (r *reading) read(t tree, links fs.ReadLinkFS) {
	if r.other = !r.lives(t); r.other {
		return
	}
	if links != nil {
		exe, err := links.ReadLink(procPath(r.key.PID, "exe"))
		r.note("program", err)
		// A job goes on when its program is replaced by another version.
		r.exe = text([]byte(strings.TrimSuffix(exe, " (deleted)")))
	}
	buf := make([]byte, maxCmdline)
	n, err := t.read(procPath(r.key.PID, "cmdline"), buf)
	r.note("command line", err)
	r.cmdline = ParseProcCmdline(buf[:n])
	r.readEnv(t)
	r.other = !r.lives(t)
}

func (r *reading) readEnv(t tree) {
	r.env = map[string]string{}
	r.envRead = true
	if len(r.names) == 0 {
		return
	}
	for size := maxEnviron / 16; ; size *= 4 {
		buf := make([]byte, size)
		n, err := t.read(procPath(r.key.PID, "environ"), buf)
		if err != nil {
			r.envRead = vanished(err) // and with it the variables
			r.note("environment", err)
			return
		}
		if n == size && size < maxEnviron {
			continue
		}
		if n == size {
			n = bytes.LastIndexByte(buf, 0) + 1
			r.problems = append(r.problems, fmt.Sprintf("environment of process %d is cut after %d KiB", r.key.PID, maxEnviron>>10))
		}
		maps.Copy(r.env, ParseProcEnviron(buf[:n], r.names))
		return
	}
}

// lives reports whether the pid names the process that was asked about.
func (r *reading) lives(t tree) bool {
	buf := make([]byte, 4<<10)
	n, err := t.read(procPath(r.key.PID, "stat"), buf)
	if err != nil {
		return false
	}
	s, err := ParseProcStat(buf[:n])
	return err == nil && s.Start == r.key.Start && s.Alive()
}

func (r *reading) note(what string, err error) {
	if err != nil && !vanished(err) {
		r.problems = append(r.problems, fmt.Sprintf("%s of process %d left out: %v", what, r.key.PID, err))
	}
}

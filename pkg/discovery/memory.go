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
	// maxCmdline, maxEnviron and maxValue are where a command line, an environment and
	// the value of a variable are cut, in bytes.
	maxCmdline = 4 << 10
	maxEnviron = 256 << 10
	maxValue   = 4 << 10
	// maxReadings is how many processes are read at the same time, including readings
	// that hang: each of these keeps a thread of ours in the kernel.
	maxReadings = 32
	// answerWait is how long a scan waits for the next answer, longestWait for all.
	answerWait  = 10 * time.Millisecond
	longestWait = 100 * time.Millisecond
	// slowAfter is when a reading that has not ended becomes a warning.
	slowAfter = time.Second
)

// memory reads from the memory of processes: the command line and the environment
// (proc_pid_cmdline_read, environ_read). The kernel fetches the pages as the process itself
// would, and FUSE or a userfaultfd may have to fill a page: then the read lasts until
// their owner does so, and no signal ends it. Opening the environment can take as long
// (mm_access waits for an exec). So each process is read in a goroutine of its own, one
// reading at a time.
//
// Its methods are called under the lock of the FS.
type memory struct {
	tree  tree
	links fs.ReadLinkFS // nil when the root has no links
	// answerWait and longestWait are the constants, except in tests.
	answerWait, longestWait time.Duration
	reading                 map[gpreempt.ProcessKey]*reading
	// answers has room for every reading, so that none blocks.
	answers chan *reading
}

func newMemory(t tree, root fs.FS) memory {
	links, _ := root.(fs.ReadLinkFS)
	return memory{
		tree: t, links: links, answerWait: answerWait, longestWait: longestWait,
		reading: map[gpreempt.ProcessKey]*reading{}, answers: make(chan *reading, maxReadings),
	}
}

// answered reports whether an answer is available that no snapshot contains yet.
func (m *memory) answered() bool { return len(m.answers) > 0 }

// reading is one reading of the memory of a process.
type reading struct {
	key   gpreempt.ProcessKey
	inode uint64   // of KFD's directory of the process
	names []string // the variables to look for
	scan  uint64   // which scan started it
	since time.Time

	// other reports that the pid belonged to another process before or after, or to
	// none. Then what follows is not used.
	other        bool
	exe, cmdline string
	env          map[string]string
	// envRead reports that the environment could be read.
	envRead bool
	// problems are warnings.
	problems []string
}

// remembered is the result of reading the memory of a process.
type remembered struct {
	// wanted reports that it is to be read, known that it has been.
	wanted, known bool
	// asked are the variables of the last reading, decided those that were found or
	// are not set.
	asked, decided []string
	problems       []string
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

// readMemories starts the wanted readings and waits for them as described at Scan. It
// returns their warnings.
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
				"which FUSE or userfaultfd can cause", k.proc.Key.PID, k.memory.state()))
		}
		warnings = append(warnings, k.memory.problems...)
	}
	if hanging == maxReadings && len(want) > 0 {
		warnings = append(warnings, fmt.Sprintf("command line, program and environment of %d more processes are not read: %d readings hang, "+
			"which is the maximum", len(want), hanging))
	}
	return warnings
}

// state describes what a snapshot contains of a memory that is being read.
func (r remembered) state() string {
	if r.known {
		return "outdated"
	}
	return "unknown"
}

// waitForMemories reads the wanted ones, and returns those for which there was no time.
func (f *FS) waitForMemories(want []*known) (left []*known) {
	m := &f.memory
	// Those without any result come first.
	slices.SortStableFunc(want, func(a, b *known) int { return cmp.Compare(truth(a.memory.known), truth(b.memory.known)) })
	deadline := time.Now().Add(m.longestWait)
	timer := time.NewTimer(min(m.answerWait, m.longestWait))
	defer timer.Stop()
	expected := 0
	for {
		for len(want) > 0 && len(m.reading) < maxReadings {
			m.start(want[0], f.env, f.scans)
			want = want[1:]
			expected++
		}
		if expected == 0 { // done, or all readings hang
			return want
		}
		select {
		case r := <-m.answers:
			if r.scan == f.scans {
				expected--
			}
			f.take(r)
			timer.Reset(min(m.answerWait, time.Until(deadline)))
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

// take stores an answer if its process still exists and has not called exec since the
// reading started.
func (f *FS) take(r *reading) {
	delete(f.memory.reading, r.key)
	k := f.known[r.key.PID]
	if r.other || k == nil || k.proc.Key != r.key || k.inode != r.inode {
		return
	}
	p, m := &k.proc.Process, &k.memory
	// A process whose main thread has ended has neither any more.
	if r.exe != "" || r.cmdline != "" || !m.known {
		p.Exe, p.Cmdline = r.exe, r.cmdline
	}
	if r.envRead {
		// The first value of a variable stays: programs that show a title in ps overwrite
		// their environment with it.
		for _, name := range m.decided {
			delete(r.env, name)
			if value, set := p.Env[name]; set && slices.Contains(r.names, name) {
				r.env[name] = value
			}
		}
		p.Env, m.decided = r.env, r.names
		if len(p.Env) == 0 {
			p.Env = nil
		}
	}
	*m = remembered{known: true, asked: r.names, decided: m.decided, problems: r.problems}
}

// read reads between two readings of the start time. If that did not change, everything
// belongs to the process that the reading is for.
func (r *reading) read(t tree, links fs.ReadLinkFS) {
	if r.other = !r.lives(t); r.other {
		return
	}
	if links != nil {
		exe, err := links.ReadLink(procPath(r.key.PID, "exe"))
		r.note("program", err)
		// A job continues when its program is replaced by another version.
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
			r.envRead = vanished(err) // and the variables with it
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

// lives reports whether the pid belongs to the process that the reading is for.
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
		r.problems = append(r.problems, fmt.Sprintf("%s of process %d omitted: %v", what, r.key.PID, err))
	}
}

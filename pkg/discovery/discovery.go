// Package discovery hides where and how the kernel reports which GPUs there are,
// which processes use them and which queues those have.
package discovery

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const procsDir = "sys/class/kfd/kfd/proc"

const (
	// maxFile is the most we read of a file, in bytes.
	maxFile = 64 << 10
	// maxWarnings is how many warnings a snapshot names one by one.
	maxWarnings = 32
)

// Snapshot is what one Scan found. Its slices may be shared with other
// snapshots of the same FS and must not be changed.
type Snapshot struct {
	// Processes are ascending by pid.
	Processes []Proc
	// Warnings say what could not be read, why, and what to do about it.
	Warnings []string
}

// Proc is a living KFD process and its queues, if it has any.
type Proc struct {
	gpreempt.Process
	// Queues are ascending by id. A queue of a secondary context has the id
	// ContextQueueID gives.
	Queues []gpreempt.Queue
	// Incarnations tell apart the queues that had the same id one after another:
	// when Incarnations[i] differs from one scan to the next, Queues[i] is another
	// queue although all else may be equal. nil when the file system cannot tell.
	Incarnations []uint64
}

// ContextQueueID returns the id by which a queue of a secondary context is known:
// every context of a process counts its queues from 0. Kernel queue ids are
// below 1024, context numbers below 65535.
func ContextQueueID(context uint16, queue uint32) uint32 {
	return (uint32(context)+1)<<16 | queue
}

// FS reads the kernel's files. Its methods may be called by several goroutines;
// they wait for each other.
type FS struct {
	root fs.FS
	tree tree
	// mu is held through every method and guards everything below.
	mu sync.Mutex
	// scans counts the scans.
	scans uint64
	// listed are the processes in KFD's list as the last scan read it, ascending;
	// scanned tells that it could.
	listed  []entry
	scanned bool
	// unique tells that an inode number says by itself which queue it is.
	unique bool
	// owners are the processes whose directories are listed, by their inode numbers,
	// while those are unique. A directory outlives its process by a while, and
	// another process can have the pid by then: it is not that one's.
	owners map[uint64]gpreempt.ProcessKey
	// incarnations counts the queues that were found.
	incarnations uint64
	// known is what the last scan found, by pid.
	known map[int32]*known
	// env are the names of the variables that are kept, ascending.
	env    []string
	memory memory
	// denied are warnings about topology nodes we may not read.
	denied []string
	// buf is where files are read to, entries where directories are.
	buf     []byte
	entries []entry
}

// entry is a directory whose name is a number.
type entry struct {
	number uint32
	inode  uint64 // 0 when it is not known
}

// NewFS returns a reader of the host whose root directory is root: Host("/"), or a
// simulated tree with sys/class/kfd/kfd and proc. Several goroutines read of root
// at the same time.
func NewFS(root fs.FS) *FS {
	f := &FS{root: root, tree: fsTree{root}, known: map[int32]*known{}, owners: map[uint64]gpreempt.ProcessKey{}, buf: make([]byte, maxFile)}
	if h, ok := root.(*host); ok {
		f.tree = hostTree{host: h, buf: make([]byte, 16<<10)}
	}
	f.memory = newMemory(f.tree, root)
	return f
}

// SetEnv says which variables of their environment the processes are shown with;
// none at first. The next Scan reads them.
func (f *FS) SetEnv(names []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.env = slices.Compact(slices.Sorted(slices.Values(names)))
}

// list reads KFD's list of processes; the directory it is in stays open.
func (f *FS) list() (all []entry, dir directory, err error) {
	dir, err = f.tree.open(procsDir)
	if err == nil {
		err = dir.list(func(name []byte, inode uint64) {
			if pid, err := strconv.ParseInt(string(name), 10, 32); err == nil && pid > 0 {
				all = append(all, entry{number: uint32(pid), inode: inode})
			}
		})
		if err != nil {
			dir.close()
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("list the KFD processes: %w: check that the amdgpu driver is loaded", err)
	}
	slices.SortFunc(all, func(a, b entry) int { return cmp.Compare(a.number, b.number) })
	return all, dir, nil
}

// Changed reports whether a Scan would find processes that came or went since the last
// one, or what that one did not wait for. It costs next to nothing; it does not see
// the queues, nor that a process died whose directory is still there.
func (f *FS) Changed() (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, dir, err := f.list()
	if err != nil {
		return false, err
	}
	dir.close()
	return !f.scanned || !slices.Equal(now, f.listed) || f.memory.answered(), nil
}

// Scan finds every living KFD process. What vanishes meanwhile is left out
// silently; what cannot be read is left out with a warning. The error says that
// KFD's list of processes itself could not be read.
//
// A scan of what has not changed is cheap: queues are recognised by the inode
// number of their directory, which sysfs never uses twice.
//
// The command line, the program and the environment of a process are read beside
// the scan, since that can block for ever. The scan that finds it waits for them
// while they come in: at most 10 ms for each and 100 ms for all. What is not there
// by then is in a later snapshot, and after a second it is a warning.
func (f *FS) Scan() (Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.scanned = false
	listed, dir, err := f.list()
	if err != nil {
		return Snapshot{}, err
	}
	defer dir.close()
	procs, err := f.tree.open("proc")
	if err != nil {
		return Snapshot{}, fmt.Errorf("find the processes: %w: check that /proc is mounted", err)
	}
	defer procs.close()
	f.scanned, f.listed, f.unique = true, listed, f.tree.unique(procsDir)
	f.forgetOwners()
	f.scans++
	f.takeAnswers()
	now := time.Now()
	s := Snapshot{Warnings: slices.Clone(f.denied)}
	found := make([]*known, 0, len(listed))
	for _, e := range listed {
		k, warnings, err := f.process(dirs{listed: dir, procs: procs}, e, now)
		switch {
		case err == nil:
			found = append(found, k)
			s.Warnings = append(s.Warnings, warnings...)
		case errors.Is(err, errOther), vanished(err):
		default:
			s.Warnings = append(s.Warnings, fmt.Sprintf("process %d is left out: %v", e.number, err))
		}
	}
	for pid, k := range f.known { // also what failed half-way
		if k.scan != f.scans {
			delete(f.known, pid)
		}
	}
	s.Warnings = append(s.Warnings, f.readMemories(found, now)...)
	for _, k := range found {
		k.proc.Unread = !k.memory.told || !slices.Equal(k.memory.asked, f.env)
	}
	if len(found) > 0 {
		s.Processes = make([]Proc, len(found))
	}
	for n, k := range found {
		s.Processes[n] = k.proc
	}
	if more := len(s.Warnings) - maxWarnings; more > 0 {
		s.Warnings = append(s.Warnings[:maxWarnings], fmt.Sprintf("%d more warnings of this kind", more))
	}
	return s, nil
}

// Look reads the queues of one process again, and returns it as the next Scan would. It
// returns false when that takes a Scan: the last one did not find the process, or it
// has ended, replaced its program or cannot be read.
func (f *FS) Look(key gpreempt.ProcessKey) (Proc, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	k := f.known[key.PID]
	if k == nil || k.proc.Key != key {
		return Proc{}, false
	}
	listed, dir, err := f.list()
	if err != nil {
		return Proc{}, false
	}
	defer dir.close()
	n, found := slices.BinarySearchFunc(listed, uint32(key.PID), func(e entry, pid uint32) int { return cmp.Compare(e.number, pid) })
	if !found || f.unique && listed[n].inode != k.inode {
		return Proc{}, false
	}
	procs, err := f.tree.open("proc")
	if err != nil {
		return Proc{}, false
	}
	defer procs.close()
	f.scans++
	k, warnings, err := f.process(dirs{listed: dir, procs: procs}, listed[n], time.Now())
	if err != nil || len(warnings) > 0 || k.proc.Key != key {
		return Proc{}, false
	}
	return k.proc, true
}

// forgetOwners forgets those of directories that are not there any more.
func (f *FS) forgetOwners() {
	if len(f.owners) == 0 {
		return
	}
	owners := make(map[uint64]gpreempt.ProcessKey, len(f.listed))
	for _, e := range f.listed {
		if owner, known := f.owners[e.inode]; known && f.unique {
			owners[e.inode] = owner
		}
	}
	f.owners = owners
}

// dirs are open while a scan lasts: KFD's list of processes, and /proc.
type dirs struct{ listed, procs directory }

// errOther reports that a pid now names another process, or one that has ended.
var errOther = errors.New("the pid changed hands")

// known is a process as the last scan found it.
type known struct {
	scan uint64
	// inode is that of its directory. KFD makes another one when the process calls
	// exec.
	inode    uint64
	comm     string // as in /proc/PID/stat
	proc     Proc
	contexts contexts
	queues   map[uint32]*knownQueue
	// due is when its facts are to be read again.
	due    time.Time
	memory remembered
}

// process reads one process. Whatever is read for the first time is read
// between two looks at the start time: if that stayed, it all belongs together.
func (f *FS) process(in dirs, e entry, now time.Time) (*known, []string, error) {
	pid := int32(e.number)
	before, err := f.alive(in.procs, pid)
	if err != nil {
		return nil, nil, err
	}
	key := gpreempt.ProcessKey{PID: pid, Start: before.Start}
	if owner, known := f.owners[e.inode]; known && owner != key {
		return nil, nil, errOther
	}
	k := f.known[pid]
	isNew := k == nil || k.proc.Key != key || f.unique && k.inode != e.inode
	if isNew {
		k = &known{inode: e.inode, proc: Proc{Process: gpreempt.Process{Key: key}}, queues: map[uint32]*knownQueue{}}
	}
	fresh, warnings, err := f.queues(k, in.listed)
	if err != nil {
		return nil, nil, err
	}
	if isNew || k.comm != before.Comm || !now.Before(k.due) {
		fresh = true
		k.comm = before.Comm
		if err := f.facts(&k.proc.Process, before.Comm); err != nil {
			return nil, nil, err
		}
		k.due = nextDue(now, pid, isNew)
		k.memory.wanted = true
	}
	if fresh {
		after, err := f.alive(in.procs, pid)
		if err == nil && after.Start != before.Start {
			err = errOther
		}
		if err != nil {
			return nil, nil, err
		}
	}
	k.scan = f.scans
	f.known[pid] = k
	if f.unique {
		f.owners[e.inode] = key
	}
	return k, warnings, nil
}

// alive reads the stat file of a process that has not ended.
func (f *FS) alive(procs directory, pid int32) (ProcStat, error) {
	n, err := procs.read(strconv.Itoa(int(pid))+"/stat", f.buf)
	if err != nil {
		return ProcStat{}, err
	}
	s, err := ParseProcStat(f.buf[:n])
	if err != nil {
		return ProcStat{}, inFile(procPath(pid, "stat"), err)
	}
	if !s.Alive() {
		return ProcStat{}, errOther
	}
	return s, nil
}

// number reads a file that holds one number.
func (f *FS) number(path string, bits int) (uint64, error) {
	b, err := f.read(path)
	if err != nil {
		return 0, err
	}
	v, err := ParseNumber(b, bits)
	return v, inFile(path, err)
}

// read returns the first maxFile bytes of a file. They are valid until the next read.
func (f *FS) read(path string) ([]byte, error) {
	n, err := f.tree.read(path, f.buf)
	return f.buf[:n], err
}

// inFile adds the file to an error of a parser.
func inFile(path string, err error) error {
	if err == nil {
		return nil
	}
	if parse, ok := errors.AsType[*ParseError](err); ok {
		parse.File = path
		return parse
	}
	return fmt.Errorf("%s: %w", path, err)
}

// vanished tells the errors of a file whose subject went away before it was
// opened, or between that and the reading.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ESRCH)
}

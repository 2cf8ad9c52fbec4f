// Package discovery reads from the kernel's files which GPUs exist, which processes use
// them and which queues these have.
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
	// maxFile is where a file is cut, in bytes.
	maxFile = 64 << 10
	// maxWarnings is how many warnings a snapshot lists individually.
	maxWarnings = 32
)

// Snapshot is the result of one Scan. Its slices may be shared with other snapshots of
// the same FS and must not be changed.
type Snapshot struct {
	// Processes are ascending by pid.
	Processes []Proc
	// Warnings describe what could not be read, why, and what to do about it.
	Warnings []string
}

// Proc is a living KFD process and its queues, if it has any.
type Proc struct {
	gpreempt.Process
	// Driver is that of its GPUs; "" is KFD.
	Driver string
	// Queues are ascending by id. Queues of a secondary context have the id that
	// ContextQueueID returns.
	Queues []gpreempt.Queue
	// Incarnations distinguish queues that had the same id one after another: when
	// Incarnations[i] differs between two scans, Queues[i] is another queue although
	// everything else may be equal. nil when the file system does not support it.
	Incarnations []uint64
	// InOrder reports that Incarnations ascend in the order in which the queues were created.
	InOrder bool
	// DRM are the GPUs on which the process has user queues of DRM, ascending; see UserQueues.
	// DRMAssumed reports that only its environment asks for them, and that the kernel does not
	// show whether it has some: then DRM are all GPUs of the host.
	DRM        []gpreempt.GPUID
	DRMAssumed bool
}

// GPUs returns the GPUs with queues of the process, those of DRM included, ascending.
func (p Proc) GPUs() []gpreempt.GPUID {
	gpus := slices.Clone(p.DRM)
	for _, q := range p.Queues {
		gpus = append(gpus, q.GPU)
	}
	slices.Sort(gpus)
	return slices.Compact(gpus)
}

// ContextQueueID returns our id for a queue of a secondary context: every context of a
// process counts its queues from 0. Kernel queue ids are below 1024, context numbers
// below 65535.
func ContextQueueID(context uint16, queue uint32) uint32 {
	return (uint32(context)+1)<<16 | queue
}

// FS reads the kernel's files. Its methods may be called concurrently; they run one at a
// time.
type FS struct {
	root fs.FS
	tree tree
	omit func(pid int32) bool // nil for none
	// source is another driver; nil for none.
	source Source
	// mu is held through every method and guards everything below.
	mu sync.Mutex
	// scans counts the scans.
	scans uint64
	// listed are the processes in KFD's list as of the last scan, ascending; scanned
	// reports whether that could be read.
	listed  []entry
	scanned bool
	// unique reports that an inode number identifies a queue permanently.
	unique bool
	// owners are the processes of the listed directories by inode number, where those
	// are unique. A directory outlives its process for a while, and another process
	// can have the pid by then: the directory does not belong to it.
	owners map[uint64]gpreempt.ProcessKey
	// incarnations counts the queues found so far.
	incarnations uint64
	// known are the processes of the last scan, by pid.
	known map[int32]*known
	// env are the names of the variables to read, ascending.
	env    []string
	memory memory
	drm    drmState
	// omitted is the result of Omitted, gpusRead that of the topology.
	omitted  []string
	gpusRead []gpreempt.GPU
	// buf receives files, entries directories.
	buf     []byte
	entries []entry
}

// entry is a directory whose name is a number.
type entry struct {
	number uint32
	inode  uint64 // 0 when unknown
}

// NewFS returns a reader of the host with the root directory root: Host("/"), or a
// simulated tree with sys/class/kfd/kfd and proc. It reads from root concurrently.
func NewFS(root fs.FS) *FS {
	f := &FS{root: root, tree: fsTree{root}, known: map[int32]*known{}, owners: map[uint64]gpreempt.ProcessKey{}, buf: make([]byte, maxFile)}
	if h, ok := root.(*host); ok {
		f.tree = hostTree{host: h, buf: make([]byte, 16<<10)}
	}
	f.memory = newMemory(f.tree, root)
	return f
}

// SetEnv sets the environment variables to read of each process, none at first. The next
// Scan reads them.
func (f *FS) SetEnv(names []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.env = slices.Compact(slices.Sorted(slices.Values(names)))
}

// Omit has processes left out that use the driver and are no use of a GPU: those of the
// program that asks. It is called before the first Scan.
func (f *FS) Omit(process func(pid int32) bool) { f.omit = process }

// list reads KFD's list of processes, and returns its open directory.
func (f *FS) list() (all []entry, dir directory, err error) {
	dir, err = f.tree.open(procsDir)
	if err == nil {
		err = dir.list(func(name []byte, inode uint64) {
			if pid, err := strconv.ParseInt(string(name), 10, 32); err == nil && pid > 0 && (f.omit == nil || !f.omit(int32(pid))) {
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

// Changed reports whether a Scan would find processes that appeared or disappeared since
// the last one, or answers for which that one did not wait. It is very cheap. It does not
// detect changes of queues, or the death of a process whose directory still exists.
func (f *FS) Changed() (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, dir, err := f.list()
	switch {
	case f.withoutKFD(err):
	case err != nil:
		return false, err
	default:
		dir.close()
	}
	return !f.scanned || !slices.Equal(now, f.listed) || f.memory.answered(), nil
}

// Scan returns all living KFD processes. Processes and queues that disappear meanwhile are
// omitted silently; those that cannot be read are omitted with a warning. The error is
// that KFD's list of processes could not be read.
//
// Scanning an unchanged host is cheap: queues are recognised by the inode number of their
// directory, which sysfs never reuses.
//
// The command line, the program and the environment of a process are read by another
// goroutine, since reading can block forever. The scan that finds the process waits for
// them, at most 10 ms for each answer and 100 ms for all. Later answers are in a later
// snapshot, and after a second there is a warning.
func (f *FS) Scan() (Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.scanned = false
	listed, dir, err := f.list()
	switch {
	case f.withoutKFD(err):
	case err != nil:
		return Snapshot{}, err
	default:
		defer dir.close()
	}
	procs, err := f.tree.open("proc")
	if err != nil {
		return Snapshot{}, fmt.Errorf("find the processes: %w: check that /proc is mounted", err)
	}
	defer procs.close()
	f.scanned, f.listed, f.unique = true, listed, f.tree.unique(procsDir)
	f.forgetOwners()
	f.scans++
	for f.memory.answered() {
		f.take(<-f.memory.answers)
	}
	now := time.Now()
	var s Snapshot
	found := make([]*known, 0, len(listed))
	for _, e := range listed {
		k, warnings, err := f.process(dirs{listed: dir, procs: procs}, e, now)
		switch {
		case err == nil:
			found = append(found, k)
			s.Warnings = append(s.Warnings, warnings...)
		case errors.Is(err, errOther), vanished(err):
		default:
			s.Warnings = append(s.Warnings, fmt.Sprintf("process %d omitted: %v", e.number, err))
		}
	}
	found, more := f.uses(procs, found, now)
	s.Warnings = append(s.Warnings, more...)
	for pid, k := range f.known { // including those that failed partially
		if k.scan != f.scans {
			delete(f.known, pid)
		}
	}
	f.readDRM(now)
	s.Warnings = append(s.Warnings, f.readMemories(found, now)...)
	for _, k := range found {
		f.drm.assign(&k.proc)
		k.proc.Unread = !k.memory.known || !slices.Equal(k.memory.asked, f.env)
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
// returns false when a Scan is needed: the last one did not find the process, or it has
// ended, replaced its program or cannot be read.
func (f *FS) Look(key gpreempt.ProcessKey) (Proc, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	k := f.known[key.PID]
	if k == nil || k.proc.Key != key {
		return Proc{}, false
	}
	if k.proc.Driver != "" {
		return f.lookAtUse(key)
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

// forgetOwners removes the owners of directories that no longer exist.
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

// dirs are open during a scan: KFD's list of processes, and /proc.
type dirs struct{ listed, procs directory }

// errOther is returned when a pid belongs to another process, or the process has ended.
var errOther = errors.New("the pid belongs to another process")

// known is a process as of the last scan.
type known struct {
	scan uint64
	// inode is the inode number of its directory. KFD creates another directory when the process calls exec.
	inode    uint64
	comm     string // as in /proc/PID/stat
	proc     Proc
	contexts contexts
	queues   map[uint32]*knownQueue
	// due is when its facts are read again.
	due    time.Time
	memory remembered
}

// process reads one process of KFD.
func (f *FS) process(in dirs, e entry, now time.Time) (*known, []string, error) {
	return f.readProcess(in.procs, e, now, func(k *known) (bool, []string, error) { return f.queues(k, in.listed) })
}

// readProcess reads one process; queues updates its queues. First readings are between two readings of the
// start time: if that did not change, they are all of one process.
func (f *FS) readProcess(procs directory, e entry, now time.Time, queues func(*known) (fresh bool, warnings []string, err error)) (*known, []string, error) {
	unique := f.unique && e.inode != 0
	pid := int32(e.number)
	before, err := f.alive(procs, pid)
	if err != nil {
		return nil, nil, err
	}
	key := gpreempt.ProcessKey{PID: pid, Start: before.Start}
	if owner, known := f.owners[e.inode]; unique && known && owner != key {
		return nil, nil, errOther
	}
	k := f.known[pid]
	isNew := k == nil || k.proc.Key != key || unique && k.inode != e.inode
	if isNew {
		k = &known{inode: e.inode, proc: Proc{Process: gpreempt.Process{Key: key}}, queues: map[uint32]*knownQueue{}}
	}
	fresh, warnings, err := queues(k)
	if err != nil {
		return nil, nil, err
	}
	if isNew || k.comm != before.Comm || !now.Before(k.due) {
		fresh = true
		k.comm = before.Comm
		if err := f.facts(&k.proc.Process, before.Comm); err != nil {
			return nil, nil, err
		}
		k.proc.Ancestors = withEarlier(f.ancestors(procs, before), k.proc.Ancestors)
		k.due = factsDue(now, pid, isNew)
		k.memory.wanted = true
	}
	if fresh {
		after, err := f.alive(procs, pid)
		if err == nil && after.Start != before.Start {
			err = errOther
		}
		if err != nil {
			return nil, nil, err
		}
	}
	k.scan = f.scans
	f.known[pid] = k
	if unique {
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

// number reads a file with one number.
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

// vanished reports whether the subject of a file disappeared before it was opened or
// read.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ESRCH)
}

// Package discovery hides where and how the kernel tells which GPUs there are,
// which processes use them and which queues those have.
package discovery

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const procsDir = "sys/class/kfd/kfd/proc"

const (
	// maxFile is the most we read of a file, in bytes.
	maxFile = 64 << 10
	// maxCmdline is where a command line is cut, in bytes.
	maxCmdline = 4096
	// maxWarnings is how many warnings a snapshot names one by one.
	maxWarnings = 32
	// refreshEvery is after how many scans the facts of a known process are read
	// again. An exec shows at once: KFD forgets a process that calls it.
	refreshEvery = 16
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

// ContextQueueID gives the id by which a queue of a secondary context is known:
// every context of a process counts its queues from 0. Kernel queue ids are
// below 1024, context numbers below 65535.
func ContextQueueID(context uint16, queue uint32) uint32 {
	return (uint32(context)+1)<<16 | queue
}

// FS reads the kernel's files. Its methods may be called by several goroutines;
// they wait for each other.
type FS struct {
	root fs.FS
	// mu is held through every GPUs and Scan and guards everything below.
	mu sync.Mutex
	// known is what the last scan found, by pid.
	known map[int32]*known
	// scans counts the scans.
	scans uint64
	// denied are warnings about topology nodes we may not read.
	denied []string
	// buf is where files are read to.
	buf []byte
}

// NewFS gives a reader of the host whose root directory is root: os.DirFS("/"),
// or a simulated tree with sys/class/kfd/kfd and proc.
func NewFS(root fs.FS) *FS {
	return &FS{root: root, known: map[int32]*known{}, buf: make([]byte, maxFile)}
}

// Scan finds every living KFD process. What vanishes meanwhile is left out
// silently; what cannot be read is left out with a warning. The error says that
// KFD's list of processes itself could not be read.
//
// A scan of what has not changed is cheap: queues are recognised by the inode
// number of their directory, which sysfs never uses twice.
func (f *FS) Scan() (Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	entries, err := fs.ReadDir(f.root, procsDir)
	if err != nil {
		return Snapshot{}, fmt.Errorf("list the KFD processes: %w: check that the amdgpu driver is loaded", err)
	}
	f.scans++
	s := Snapshot{Warnings: slices.Clone(f.denied)}
	for _, entry := range entries {
		pid, err := strconv.ParseInt(entry.Name(), 10, 32)
		if err != nil || pid <= 0 {
			continue
		}
		proc, warnings, err := f.process(int32(pid))
		switch {
		case err == nil:
			s.Processes = append(s.Processes, proc)
			s.Warnings = append(s.Warnings, warnings...)
		case errors.Is(err, errOther), vanished(err):
		default:
			s.Warnings = append(s.Warnings, fmt.Sprintf("process %d is left out: %v", pid, err))
		}
	}
	for pid, k := range f.known { // also what failed half-way
		if k.scan != f.scans {
			delete(f.known, pid)
		}
	}
	slices.SortFunc(s.Processes, func(a, b Proc) int { return cmp.Compare(a.Key.PID, b.Key.PID) })
	if more := len(s.Warnings) - maxWarnings; more > 0 {
		s.Warnings = append(s.Warnings[:maxWarnings], fmt.Sprintf("%d more warnings of this kind", more))
	}
	return s, nil
}

// errOther reports that a pid now names another process, or one that has ended.
var errOther = errors.New("the pid changed hands")

// known is a process as the last scan found it.
type known struct {
	scan   uint64
	comm   string // as in /proc/PID/stat
	proc   Proc
	queues map[uint32]knownQueue
}

// knownQueue is a queue as the last scan found it.
type knownQueue struct {
	scan  uint64
	stamp stamp
	queue gpreempt.Queue
}

// stamp is equal for two directories only when they are the same one. On sysfs
// the inode number alone does that; the change time is for other file systems,
// which use inode numbers again.
type stamp struct {
	inode  uint64
	change syscall.Timespec
}

// process reads one process. Whatever is read for the first time is read
// between two looks at the start time: if that stayed, it all belongs together.
func (f *FS) process(pid int32) (Proc, []string, error) {
	before, err := f.alive(pid)
	if err != nil {
		return Proc{}, nil, err
	}
	key := gpreempt.ProcessKey{PID: pid, Start: before.Start}
	k := f.known[pid]
	isNew := k == nil || k.proc.Key != key
	if isNew {
		k = &known{proc: Proc{Process: gpreempt.Process{Key: key}}, queues: map[uint32]knownQueue{}}
	}
	fresh, warnings, err := f.queues(k)
	if err != nil {
		return Proc{}, nil, err
	}
	if isNew || k.comm != before.Comm || (f.scans+uint64(pid))%refreshEvery == 0 {
		fresh = true
		k.comm = before.Comm
		if k.proc.Process, err = f.facts(key, before.Comm); err != nil {
			return Proc{}, nil, err
		}
	}
	if fresh {
		after, err := f.alive(pid)
		if err == nil && after.Start != before.Start {
			err = errOther
		}
		if err != nil {
			return Proc{}, nil, err
		}
	}
	k.scan = f.scans
	f.known[pid] = k
	return k.proc, warnings, nil
}

// alive reads the stat file of a process that has not ended.
func (f *FS) alive(pid int32) (ProcStat, error) {
	path := procPath(pid, "stat")
	b, err := f.read(path, maxFile)
	if err != nil {
		return ProcStat{}, err
	}
	s, err := ParseProcStat(b)
	if err != nil {
		return ProcStat{}, inFile(path, err)
	}
	if !s.Alive() {
		return ProcStat{}, errOther
	}
	return s, nil
}

// facts reads what else is known of a process. Kernels without cgroups have no
// cgroup file, and simulated trees may lack what is only for people.
func (f *FS) facts(key gpreempt.ProcessKey, comm string) (gpreempt.Process, error) {
	p := gpreempt.Process{Key: key, Comm: text([]byte(comm))}
	path := procPath(key.PID, "status")
	b, err := f.read(path, maxFile)
	if err != nil {
		return gpreempt.Process{}, err
	}
	if p.UID, err = ParseProcStatusUID(b); err != nil {
		return gpreempt.Process{}, inFile(path, err)
	}
	// Unlike stat, comm does not escape what is not printable.
	if b, err = f.read(procPath(key.PID, "comm"), maxFile); err == nil {
		p.Comm = strings.TrimSuffix(text(b), "\n")
	} else if !vanished(err) {
		return gpreempt.Process{}, err
	}
	if b, err = f.read(procPath(key.PID, "cmdline"), maxCmdline); err == nil {
		p.Cmdline = ParseProcCmdline(b)
	} else if !vanished(err) {
		return gpreempt.Process{}, err
	}
	if b, err = f.read(procPath(key.PID, "cgroup"), maxFile); err == nil {
		p.Cgroup.Path = ParseProcCgroup(b)
	} else if !vanished(err) {
		return gpreempt.Process{}, err
	}
	return p, nil
}

func procPath(pid int32, file string) string {
	return "proc/" + strconv.Itoa(int(pid)) + "/" + file
}

// number reads a file that holds one number.
func (f *FS) number(path string, bits int) (uint64, error) {
	b, err := f.read(path, maxFile)
	if err != nil {
		return 0, err
	}
	v, err := ParseNumber(b, bits)
	return v, inFile(path, err)
}

// read gives the first limit bytes of a file. They are valid until the next read.
func (f *FS) read(path string, limit int) ([]byte, error) {
	file, err := f.root.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	n := 0
	for n < limit {
		m, err := file.Read(f.buf[n:limit])
		n += m
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
	}
	return f.buf[:n], nil
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

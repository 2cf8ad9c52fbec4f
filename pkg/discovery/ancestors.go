package discovery

import (
	"slices"
	"strconv"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// maxAncestors bounds the ancestors of a process that are read, and those that are remembered:
// a chain of processes can be as long as its owner likes.
const maxAncestors = 32

// ancestors returns the processes that a process descends from, nearest first, without the
// first process of the host.
//
// A parent is not younger than its child: a younger process has the pid of a parent that has
// ended meanwhile. The first process of a container adopts what has lost its parent there, and
// what was started from outside: such a child is in another session, and does not descend
// from it.
func (f *FS) ancestors(procs directory, child ProcStat) (all []gpreempt.ProcessKey) {
	for len(all) < maxAncestors && child.Parent > 1 {
		parent, err := f.alive(procs, child.Parent)
		if err != nil || parent.Start > child.Start || parent.Session != child.Session && f.adopts(procs, parent.PID) {
			break
		}
		all = append(all, gpreempt.ProcessKey{PID: parent.PID, Start: parent.Start})
		child = parent
	}
	return all
}

// adopts reports whether a process is the first of its pid namespace.
func (f *FS) adopts(procs directory, pid int32) bool {
	n, err := procs.read(strconv.Itoa(int(pid))+"/status", f.buf)
	if err != nil {
		return true
	}
	ids, err := ParseProcStatus(f.buf[:n])
	return err != nil || len(ids.NamespacePIDs) > 0 && ids.NamespacePIDs[len(ids.NamespacePIDs)-1] == 1
}

// withEarlier adds the ancestors that a process had earlier: when its parent exits it has
// another one.
func withEarlier(now, earlier []gpreempt.ProcessKey) []gpreempt.ProcessKey {
	for _, key := range earlier {
		if len(now) < 2*maxAncestors && !slices.Contains(now, key) {
			now = append(now, key)
		}
	}
	return now
}

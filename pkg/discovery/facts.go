package discovery

import (
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// refreshEvery is after how long the facts of a known process are read again. An
// exec shows at once: KFD forgets a process that calls it. So does another name.
const refreshEvery = 10 * time.Second

// nextDue spreads the first turns of processes that were found together, and so all
// their turns.
func nextDue(now time.Time, pid int32, isNew bool) time.Time {
	if isNew {
		return now.Add(refreshEvery/2 + time.Duration(pid%64)*refreshEvery/128)
	}
	return now.Add(refreshEvery)
}

// facts reads what is known of a process without asking its memory. Kernels
// without cgroups have no cgroup file, and simulated trees may lack what is only
// for people.
func (f *FS) facts(p *gpreempt.Process, comm string) error {
	path := procPath(p.Key.PID, "status")
	b, err := f.read(path)
	if err != nil {
		return err
	}
	ids, err := ParseProcIDs(b)
	if err != nil {
		return inFile(path, err)
	}
	p.UID, p.GID, p.NamespacePIDs = ids.UID, ids.GID, ids.NamespacePIDs
	// Unlike stat, comm does not escape what is not printable.
	if b, err = f.read(procPath(p.Key.PID, "comm")); err == nil {
		comm = strings.TrimSuffix(string(b), "\n")
	} else if !vanished(err) {
		return err
	}
	p.Comm = text([]byte(comm))
	if b, err = f.read(procPath(p.Key.PID, "cgroup")); err == nil {
		p.Cgroup = ParseCgroup(b)
	} else if !vanished(err) {
		return err
	}
	return nil
}

func procPath(pid int32, file string) string {
	return "proc/" + strconv.Itoa(int(pid)) + "/" + file
}

package discovery

import (
	"bytes"
	"strconv"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// refreshEvery is the interval for reading the facts of a known process again. An exec or
// a new name is detected at once: KFD removes a process that calls exec.
const refreshEvery = 10 * time.Second

// factsDue spreads the readings of processes that were found together.
func factsDue(now time.Time, pid int32, isNew bool) time.Time {
	if isNew {
		return now.Add(refreshEvery/2 + time.Duration(pid%64)*refreshEvery/128)
	}
	return now.Add(refreshEvery)
}

// facts reads what does not need the memory of a process. Kernels without cgroups have no
// cgroup file, and simulated trees may lack files that are only for people.
func (f *FS) facts(p *gpreempt.Process, comm string) error {
	path := procPath(p.Key.PID, "status")
	b, err := f.read(path)
	if err != nil {
		return err
	}
	ids, err := ParseProcStatus(b)
	if err != nil {
		return inFile(path, err)
	}
	p.UID, p.GID, p.NamespacePIDs = ids.UID, ids.GID, ids.NamespacePIDs
	// Unlike stat, comm does not escape what is not printable.
	switch b, err = f.read(procPath(p.Key.PID, "comm")); {
	case err == nil:
		p.Comm = text(bytes.TrimSuffix(b, []byte("\n")))
	case vanished(err):
		p.Comm = text([]byte(comm))
	default:
		return err
	}
	if b, err = f.read(procPath(p.Key.PID, "cgroup")); err == nil {
		p.Cgroup = ParseCgroup(b)
		p.Slurm = f.slurm(p.Cgroup.SlurmJob)
	} else if !vanished(err) {
		return err
	}
	return nil
}

func procPath(pid int32, file string) string {
	return "proc/" + strconv.Itoa(int(pid)) + "/" + file
}

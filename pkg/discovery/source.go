package discovery

import (
	"cmp"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Source finds the GPUs of another driver than KFD, and the processes that use them. Its methods
// are called one at a time.
type Source interface {
	// Driver is its name: the Driver of its GPUs and processes.
	Driver() string
	// GPUs returns them; none without the driver.
	GPUs() ([]gpreempt.GPU, error)
	// Uses returns the processes that have the driver open.
	Uses() (all []Use, warnings []string, err error)
	// Look reads one of them again; false when Uses is needed.
	Look(gpreempt.ProcessKey) (Use, bool)
}

// Use is a process that has a driver open. The fields are as in Proc.
type Use struct {
	Key          gpreempt.ProcessKey
	Queues       []gpreempt.Queue
	Incarnations []uint64
}

// Add has the FS find what another driver has, too. It is called before the first Scan.
func (f *FS) Add(s Source) { f.source = s }

// withoutKFD reports whether an error says that there is no KFD, and another driver may have all.
func (f *FS) withoutKFD(err error) bool { return f.source != nil && vanished(err) }

// addGPUs adds those of the source, behind KFD's.
func (f *FS) addGPUs(gpus []gpreempt.GPU, err error) ([]gpreempt.GPU, error) {
	if f.source == nil || err != nil && !vanished(err) {
		return gpus, err
	}
	more, sourceErr := f.source.GPUs()
	if sourceErr != nil {
		return nil, fmt.Errorf("find the GPUs of %s: %w", f.source.Driver(), sourceErr)
	}
	if len(more) > 0 {
		err = nil
	}
	return append(gpus, more...), err
}

// uses adds the processes of the source to those found. A process of both drivers is KFD's.
func (f *FS) uses(procs directory, found []*known, now time.Time) ([]*known, []string) {
	if f.source == nil {
		return found, nil
	}
	uses, warnings, err := f.source.Uses()
	if err != nil {
		return found, append(warnings, fmt.Sprintf("the processes of %s are not known: %v", f.source.Driver(), err))
	}
	for _, u := range uses {
		listed := slices.ContainsFunc(f.listed, func(e entry) bool { return e.number == uint32(u.Key.PID) })
		if listed || f.omit != nil && f.omit(u.Key.PID) {
			continue
		}
		k, err := f.use(procs, u, now)
		switch {
		case err == nil:
			found = append(found, k)
		case vanished(err):
		default:
			warnings = append(warnings, fmt.Sprintf("process %d omitted: %v", u.Key.PID, err))
		}
	}
	slices.SortFunc(found, func(a, b *known) int { return cmp.Compare(a.proc.Key.PID, b.proc.Key.PID) })
	return found, warnings
}

// use reads the facts of a process of the source.
func (f *FS) use(procs directory, u Use, now time.Time) (*known, error) {
	k, _, err := f.readProcess(procs, entry{number: uint32(u.Key.PID)}, now, func(k *known) (bool, []string, error) {
		fresh := !slices.Equal(k.proc.Queues, u.Queues) || !slices.Equal(k.proc.Incarnations, u.Incarnations)
		k.proc.Driver, k.proc.Queues, k.proc.Incarnations = f.source.Driver(), u.Queues, u.Incarnations
		return fresh, nil, nil
	})
	if err == nil && k.proc.Key != u.Key {
		err = fs.ErrNotExist // the pid is another process's by now
	}
	return k, err
}

// lookAtUse is Look for a process of the source.
func (f *FS) lookAtUse(key gpreempt.ProcessKey) (Proc, bool) {
	u, known := f.source.Look(key)
	procs, err := f.tree.open("proc")
	if !known || err != nil {
		return Proc{}, false
	}
	defer procs.close()
	f.scans++
	k, err := f.use(procs, u, time.Now())
	if err != nil {
		return Proc{}, false
	}
	return k.proc, true
}

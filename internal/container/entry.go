package container

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// key names a container: its id and the path of its cgroup, because what may make cgroups
// somewhere can claim any id there.
type key struct{ id, path string }

// entry is what is known of one container, guarded by Resolver.mu except for the fields
// that never change.
type entry struct {
	key          key
	runtime, pod string // from the cgroup; never change

	// found is the last answer of a runtime that knew it, and ever reports that there was one.
	found gpreempt.Container
	ever  bool
	// state is the result of the last query, err its error.
	state state
	err   error
	// failures is how many queries in a row did not find it.
	failures int
	busy     bool // a query is running
	// due is the time of the next query, used that of the last Lookup.
	due, used time.Time
}

// state is the result of a query, after isFound from better to worse.
type state uint8

const (
	// isFound: a runtime knows it. 0 means no query yet.
	isFound state = iota + 1
	// noSocket: no runtime is there.
	noSocket
	// isUnknown: no runtime knows the container.
	isUnknown
	// unreachable: a runtime that may know it does not answer.
	unreachable
	// refused: a runtime that may know it returned an unusable answer.
	refused
)

// reported is what a runtime returns of a container.
type reported struct {
	container gpreempt.Container
	// pid is the first process, 0 for none, and unsaid if the runtime does not return it.
	pid int32
	// pod is the unique id of its pod, "" if it is not known.
	pod string
}

const unsaid = -1

// answer is the result of a query.
type answer struct {
	state state
	reported
	err error
}

// check compares an answer with the cgroup of the entry. It becomes a conflict where they
// contradict each other, and isUnknown where the runtime has the container without a
// process that could be compared. at returns the cgroup of a process.
func (e *entry) check(a answer, at func(pid int32) (gpreempt.Cgroup, error)) answer {
	conflict := func(format string, args ...any) answer {
		text := "container " + e.key.id[:min(len(e.key.id), 12)] + ", and by its runtime " + fmt.Sprintf(format, args...)
		return answer{state: isFound, reported: reported{container: gpreempt.Container{Conflict: text}}, err: errors.New(text)}
	}
	if a.state != isFound {
		return a
	}
	if a.pod != "" && e.pod != "" && a.pod != e.pod {
		return conflict("that of pod %s, not %s", cut(a.pod, maxText), e.pod)
	}
	if at == nil || a.pid == unsaid {
		return a
	}
	first, err := at(a.pid)
	switch {
	case a.pid == 0 || err != nil:
		return answer{state: isUnknown}
	case first.ContainerID != e.key.id || first.ContainerPath != e.key.path:
		return conflict("that of process %d in %s", a.pid, cut(first.Path, maxText))
	}
	return a
}

// update stores the result of a query, and reports whether that of Lookup changed. A failure keeps
// what is known: a process may outlive its container's record in the runtime.
func (e *entry) update(a answer, now time.Time) (changed bool) {
	e.busy, e.state, e.err = false, a.state, a.err
	if a.state == isFound {
		changed = !e.ever || !a.container.Equal(e.found)
		e.found, e.ever, e.failures = a.container, true, 0
		e.due = now.Add(refreshEvery)
		return changed
	}
	last := retryLast
	if a.state == isUnknown || a.state == noSocket {
		last = unknownLast
	}
	e.due = now.Add(backOff(e.failures, last))
	e.failures++
	return false
}

// backOff returns the pause after a number of failures in a row.
func backOff(failures int, last time.Duration) time.Duration {
	return min(retryFirst<<min(failures, 16), last)
}

// takeDue returns the containers to query now, marked as busy, and the time until the
// next one is due.
func (r *Resolver) takeDue() (due []*entry, next time.Duration) {
	now := r.cfg.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.queries == maxQueries {
		return nil, idleAfter // the end of a query wakes Run
	}
	first := now.Add(idleAfter)
	for k, e := range r.entries {
		switch {
		case e.busy:
		case now.Sub(e.used) >= idleAfter:
			if !e.ever {
				delete(r.entries, k)
			}
		case !e.due.After(now):
			due = append(due, e)
		case e.due.Before(first):
			first = e.due
		}
	}
	slices.SortFunc(due, func(a, b *entry) int { return a.due.Compare(b.due) })
	due = due[:min(len(due), maxQueries-r.queries)]
	r.queries += len(due)
	for _, e := range due {
		e.busy = true
	}
	return due, first.Sub(now)
}

// makeRoom removes the least recently used container if the map is full.
func (r *Resolver) makeRoom() {
	if len(r.entries) < maxEntries {
		return
	}
	var oldest *entry
	for _, e := range r.entries {
		if oldest == nil || e.used.Before(oldest.used) {
			oldest = e
		}
	}
	delete(r.entries, oldest.key)
}

package container

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// key names a container: an id and whose runtime has it, 0 for the host's. A user
// can name cgroups at will below user@UID.service, and so claim any id there.
type key struct {
	id   string
	user uint32
}

// entry is what is known of one container, guarded by Resolver.mu but for the
// fields that never change.
type entry struct {
	key          key
	runtime, pod string    // what the cgroup told; never change
	since        time.Time // when it was first looked up; never changes

	// found is what a runtime said last.
	found gpreempt.Container
	// state is how the last asking ended, err why where it failed.
	state state
	err   error
	// shown is what Lookup gives: found and what the kubelet adds.
	shown gpreempt.Container
	// ever tells that a runtime knew it once, inPod that the kubelet knows its pod.
	ever, inPod bool
	// failures is how many askings in a row did not find it.
	failures int
	busy     bool
	// due is when to ask next, used when it was looked up last.
	due, used time.Time
}

// state is how asking about a container ended. After isFound, the later the worse.
type state uint8

const (
	// isFound: a runtime knows it. 0 is that it was not asked about.
	isFound state = iota + 1
	// noSocket: there is no runtime to ask.
	noSocket
	// isUnknown: all runtimes there are say that there is no such container.
	isUnknown
	// unreachable: a runtime that may know it cannot be asked.
	unreachable
	// refused: a runtime that may know it gave an answer that cannot be used.
	refused
)

// answer is what asking about a container gave.
type answer struct {
	state     state
	container gpreempt.Container
	err       error
}

// known reports whether there is anything to show.
func (e *entry) known() bool { return e.ever || e.inPod }

// take keeps an answer. What was known stays: a process may outlive what its
// runtime remembers of its container.
func (e *entry) take(a answer, now time.Time) {
	e.busy, e.state, e.err = false, a.state, a.err
	if a.state == isFound {
		e.found, e.ever, e.failures = a.container, true, 0
		e.due = now.Add(refreshEvery)
		return
	}
	last := retryLast
	if a.state == isUnknown || a.state == noSocket {
		last = unknownLast
	}
	e.due = now.Add(backOff(e.failures, last))
	e.failures++
}

// show joins what the runtime and the kubelet know, and reports whether that is new.
func (e *entry) show(pods map[string]podFacts) (changed bool) {
	c, was := e.found, e.known()
	facts, found := pods[e.pod]
	e.inPod = found
	if found {
		c.Namespace, c.Pod = cmp.Or(c.Namespace, facts.namespace), cmp.Or(c.Pod, facts.name)
		c.PodLabels, c.PriorityClass = facts.labels, facts.priorityClass
	}
	changed = !c.Equal(e.shown) || e.known() != was
	e.shown = c
	return changed
}

// backOff returns the pause after so many failures in a row.
func backOff(failures int, last time.Duration) time.Duration {
	return min(retryFirst<<min(failures, 16), last)
}

// takeDue marks the containers to ask about now, and returns how long there is
// nothing more to do.
func (r *Resolver) takeDue() (due []*entry, next time.Duration) {
	now := r.cfg.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.asking == maxAsking {
		return nil, idleAfter // when one of them is done, that wakes Run
	}
	first := now.Add(idleAfter)
	for k, e := range r.entries {
		switch {
		case e.busy:
		case now.Sub(e.used) >= idleAfter:
			if !e.known() {
				delete(r.entries, k)
			}
		case !e.due.After(now):
			due = append(due, e)
		case e.due.Before(first):
			first = e.due
		}
	}
	slices.SortFunc(due, func(a, b *entry) int { return a.due.Compare(b.due) })
	due = due[:min(len(due), maxAsking-r.asking)]
	r.asking += len(due)
	for _, e := range due {
		e.busy = true
	}
	return due, first.Sub(now)
}

// makeRoom forgets the container that was not looked up for longest, if there is
// no room for one more.
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

// userOf returns the user below whose service manager a cgroup is, 0 for none.
func userOf(path string) uint32 {
	for name := range strings.SplitSeq(path, "/") {
		if uid, found := strings.CutPrefix(name, "user@"); found {
			if n, err := strconv.ParseUint(strings.TrimSuffix(uid, ".service"), 10, 32); err == nil {
				return uint32(n)
			}
		}
	}
	return 0
}

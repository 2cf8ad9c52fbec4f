package container

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// sureAfter is after how many queries in a row a container counts as unknown: a runtime
// may list it a moment later than the kernel.
const sureAfter = 3

// Warnings returns the present warnings: at most one of each kind, except one for each
// socket; none on a host without containers.
func (r *Resolver) Warnings() []gpreempt.Warning {
	r.mu.Lock()
	var missed bool
	var unknown, unusable []*entry
	for _, e := range r.entries {
		switch {
		case e.state == unreachable:
			missed = true
		case e.state == refused, e.found.Conflict != "":
			unusable = append(unusable, e)
		case (e.state == isUnknown || e.state == noSocket) && !e.ever && e.failures >= sureAfter:
			unknown = append(unknown, e)
		}
	}
	byID := func(a, b *entry) int { return strings.Compare(a.key.id, b.key.id) }
	slices.SortFunc(unknown, byID)
	slices.SortFunc(unusable, byID)
	var refusal error
	if len(unusable) > 0 {
		refusal = unusable[0].err
	}
	var remedy string
	if len(unknown) > 0 {
		remedy = unknown[0].remedy()
	}
	r.mu.Unlock()

	var all []gpreempt.Warning
	warn := func(kind *gpreempt.WarningKind, format string, args ...any) {
		all = append(all, kind.Warn(fmt.Sprintf(format, args...)))
	}
	for _, s := range r.sockets {
		s.mu.Lock()
		err := s.err
		s.mu.Unlock()
		if _, foreign := errors.AsType[*foreignError](err); foreign {
			warn(gpreempt.WarnContainerRuntime, "the container runtime at %s is not queried: %v", s.path, err)
		} else if err != nil && missed {
			warn(gpreempt.WarnContainerRuntime, "the container runtime at %s does not answer: %v", s.path, err)
		}
	}
	if len(unusable) > 0 {
		warn(gpreempt.WarnContainerAnswer, "the answer of a runtime for %s is refused: %v", containers(unusable), refusal)
	}
	if len(unknown) > 0 {
		all = append(all, gpreempt.WarnContainerUnknown.Warn("no container runtime knows "+containers(unknown)).WithRemedy(remedy))
	}
	return all
}

// link is how a runtime is found whose socket is elsewhere.
const link = "make a symbolic link to its runtime's socket at a path where gpreemptd looks for one, such as /run/crio/crio.sock"

// remedy returns what to do about a container that no runtime knows.
func (e *entry) remedy() string {
	switch {
	case e.state == noSocket:
		return link
	case e.runtime == "containerd" && e.pod == "":
		return "containerd lists only Kubernetes containers over the CRI: match those of nerdctl and ctr by container id or cgroup"
	}
	return link + ", or match it by container id or cgroup"
}

// containers describes some containers, the first of them by its id.
func containers(list []*entry) string {
	text := "container " + list[0].key.id[:min(len(list[0].key.id), 12)]
	if len(list) > 1 {
		text += fmt.Sprintf(" and %d more", len(list)-1)
	}
	return text
}

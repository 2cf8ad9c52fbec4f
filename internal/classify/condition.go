package classify

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// field is a property of a process that rules can match.
type field uint8

const (
	comm field = iota
	cmdline
	exe
	uid
	gid
	cgroup
	unit
	slice
	env
	containerID
	containerName
	containerImage
	containerRuntime
	containerLabels
	podNamespace
	podName
	podPriorityClass
	podLabels
	gpu
	queuePriority
	ringAddress
)

// fieldNames are the keys of the config file.
var fieldNames = [...]string{
	comm: "comm", cmdline: "cmdline", exe: "exe", uid: "uid", gid: "gid", cgroup: "cgroup", unit: "unit", slice: "slice", env: "env",
	containerID: "container.id", containerName: "container.name", containerImage: "container.image",
	containerRuntime: "container.runtime", containerLabels: "container.labels",
	podNamespace: "pod.namespace", podName: "pod.name", podPriorityClass: "pod.priority_class", podLabels: "pod.labels",
	gpu: "gpu", queuePriority: "queue_priority", ringAddress: "ring_address",
}

// isMap reports whether the field is a map.
func (f field) isMap() bool { return f == env || f == containerLabels || f == podLabels }

func (f field) ofContainer() bool { return containerID <= f && f <= containerLabels }

func (f field) ofPod() bool { return podNamespace <= f && f <= podLabels }

// condition is one field of a Match that is set.
type condition struct {
	field field
	// key is the variable or label.
	key string
	// pattern and glob are of texts, id of uid and gid, gpus of gpu.
	pattern string
	glob    glob
	id      uint32
	gpus    []selector
	// first and last, both included, are of queue_priority and ring_address.
	first, last uint64
}

// name returns the key of the config file, below match.
func (c *condition) name() string {
	if c.field.isMap() {
		return Member(fieldNames[c.field], c.key)
	}
	return fieldNames[c.field]
}

// wanted returns the value that the field has in the rule.
func (c *condition) wanted() string {
	switch c.field {
	case uid, gid:
		return strconv.FormatUint(uint64(c.id), 10)
	case gpu:
		texts := make([]string, len(c.gpus))
		for n := range c.gpus {
			texts[n] = c.gpus[n].text
		}
		return strings.Join(texts, ",")
	case queuePriority:
		return fmt.Sprintf("%d..%d", c.first, c.last)
	case ringAddress:
		return fmt.Sprintf("%#x..%#x", c.first, c.last)
	default:
		return strconv.Quote(c.pattern)
	}
}

// holds reports whether the condition holds for s. An unknown value does not.
func (c *condition) holds(s *Subject) bool {
	switch c.field {
	case uid:
		return s.UID == c.id
	case gid:
		return s.GID == c.id
	case gpu:
		_, on := c.selected(s)
		return on
	case queuePriority:
		p, known, all := highestPriority(s)
		// An unknown one may be the highest.
		return known && c.includes(uint64(p.Priority)) && (all || c.last >= uint64(gpreempt.MaxPriority))
	case ringAddress:
		_, inside := c.ring(s)
		return inside
	default:
		text, known := c.text(s)
		return known && c.glob.matches(text)
	}
}

// mayHold reports whether a condition that does not hold may hold once more is known
// of s.
func (c *condition) mayHold(s *Subject) bool {
	switch {
	case c.field == cmdline, c.field == exe, c.field == env:
		return s.Unread
	case c.field == containerName, c.field == containerImage, c.field == containerLabels, c.field.ofPod():
		return s.Cgroup.ContainerID != "" && !s.ContainerKnown
	case c.field == queuePriority:
		highest, known, all := highestPriority(s)
		return !all && (!known || uint64(highest.Priority) <= c.last)
	case c.field == ringAddress:
		return slices.ContainsFunc(s.Queues, func(q gpreempt.QueueEntry) bool { return q.Info.RingBase == 0 })
	}
	return false
}

// text returns the value that a glob is compared with.
func (c *condition) text(s *Subject) (text string, known bool) {
	switch c.field {
	case comm:
		return s.Comm, true
	case cmdline:
		return s.Cmdline, !s.Unread
	case cgroup:
		return s.Cgroup.Path, true
	case exe:
		text = s.Exe
	case unit:
		text = s.Cgroup.Unit
	case slice:
		text = s.Cgroup.Slice
	case env:
		text, known = s.Env[c.key]
		return text, known
	case containerID:
		text = s.Cgroup.ContainerID
	case containerName:
		text = s.Container.Name
	case containerImage:
		text = s.Container.Image
	case containerRuntime:
		text = s.Cgroup.Runtime
	case containerLabels:
		text, known = s.Container.Labels[c.key]
		return text, known
	case podNamespace:
		text = s.Container.Namespace
	case podName:
		text = s.Container.Pod
	case podPriorityClass:
		text = s.Container.PriorityClass
	case podLabels:
		text, known = s.Container.PodLabels[c.key]
		return text, known
	default:
	}
	return text, text != ""
}

func (c *condition) includes(n uint64) bool { return c.first <= n && n <= c.last }

// selected returns the first selector of a GPU that has a queue of s.
func (c *condition) selected(s *Subject) (sel *selector, on bool) {
	for n := range s.Queues {
		g := gpuOf(s, s.Queues[n].GPU)
		for i := range c.gpus {
			if c.gpus[i].selects(&g) {
				return &c.gpus[i], true
			}
		}
	}
	return nil, false
}

// gpuOf returns what is known of a GPU, at least its id.
func gpuOf(s *Subject, id gpreempt.GPUID) gpreempt.GPU {
	for n := range s.GPUs {
		if s.GPUs[n].ID == id {
			return s.GPUs[n]
		}
	}
	return gpreempt.GPU{ID: id, Node: -1}
}

// ring returns the address of a ring that begins in the range.
func (c *condition) ring(s *Subject) (address uint64, inside bool) {
	for n := range s.Queues {
		if base := s.Queues[n].Info.RingBase; base != 0 && c.includes(base) {
			return base, true
		}
	}
	return 0, false
}

// utilityRing is the size, in bytes, of the ring that ROCm's runtime creates on each GPU
// for itself. The program does not choose its priority.
const utilityRing = 4096

// highestPriority returns the compute queue with the highest known priority, and whether
// the priorities of all are known.
func highestPriority(s *Subject) (highest gpreempt.QueueInfo, known, all bool) {
	utility := onlyUtility(s)
	all = true
	for n := range s.Queues {
		q := &s.Queues[n]
		switch {
		case q.Type != gpreempt.QueueCompute, q.RingBytes == utilityRing && !utility:
		case !q.Info.PriorityKnown:
			all = false
		case !known || q.Info.Priority > highest.Priority:
			highest, known = q.Info, true
		}
	}
	return highest, known, all
}

// onlyUtility reports whether every compute queue has a ring of that size. Then they
// count, because one of them must be the program's.
func onlyUtility(s *Subject) bool {
	for n := range s.Queues {
		if q := &s.Queues[n]; q.Type == gpreempt.QueueCompute && q.RingBytes != utilityRing {
			return false
		}
	}
	return true
}

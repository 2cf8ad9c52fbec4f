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

// The fields. A rule checks them in this order, so the expensive ones are last.
const (
	comm field = iota
	uid
	gid
	exe
	cgroup
	unit
	slice
	userUnit
	env
	containerID
	containerName
	containerImage
	containerRuntime
	containerLabels
	podNamespace
	podName
	podLabels
	slurmPartition
	slurmAccount
	slurmQOS
	gpu
	queuePriority
	ringAddress
	cmdline
)

// fields has for each field the key of the config file below match, its place in a Match,
// and for texts and maps of texts the value of a process.
var fields = [...]struct {
	name  string
	at    func(*Match) any
	text  func(*Subject) string
	texts func(*Subject) map[string]string
}{
	comm:             {"comm", func(m *Match) any { return &m.Comm }, func(s *Subject) string { return s.Comm }, nil},
	uid:              {"uid", func(m *Match) any { return &m.UID }, nil, nil},
	gid:              {"gid", func(m *Match) any { return &m.GID }, nil, nil},
	exe:              {"exe", func(m *Match) any { return &m.Exe }, func(s *Subject) string { return s.Exe }, nil},
	cgroup:           {"cgroup", func(m *Match) any { return &m.Cgroup }, func(s *Subject) string { return s.Cgroup.Path }, nil},
	unit:             {"unit", func(m *Match) any { return &m.Unit }, func(s *Subject) string { return s.Cgroup.Unit }, nil},
	slice:            {"slice", func(m *Match) any { return &m.Slice }, func(s *Subject) string { return s.Cgroup.Slice }, nil},
	userUnit:         {"user_unit", func(m *Match) any { return &m.UserUnit }, func(s *Subject) string { return s.Cgroup.UserUnit }, nil},
	env:              {"env", func(m *Match) any { return &m.Env }, nil, func(s *Subject) map[string]string { return s.Env }},
	containerID:      {"container.id", func(m *Match) any { return &m.Container.ID }, func(s *Subject) string { return s.Cgroup.ContainerID }, nil},
	containerName:    {"container.name", func(m *Match) any { return &m.Container.Name }, func(s *Subject) string { return s.Container.Name }, nil},
	containerImage:   {"container.image", func(m *Match) any { return &m.Container.Image }, func(s *Subject) string { return s.Container.Image }, nil},
	containerRuntime: {"container.runtime", func(m *Match) any { return &m.Container.Runtime }, func(s *Subject) string { return s.Cgroup.Runtime }, nil},
	containerLabels:  {"container.labels", func(m *Match) any { return &m.Container.Labels }, nil, func(s *Subject) map[string]string { return s.Container.Labels }},
	podNamespace:     {"pod.namespace", func(m *Match) any { return &m.Pod.Namespace }, func(s *Subject) string { return s.Container.Namespace }, nil},
	podName:          {"pod.name", func(m *Match) any { return &m.Pod.Name }, func(s *Subject) string { return s.Container.Pod }, nil},
	podLabels:        {"pod.labels", func(m *Match) any { return &m.Pod.Labels }, nil, func(s *Subject) map[string]string { return s.Container.PodLabels }},
	slurmPartition:   {"slurm.partition", func(m *Match) any { return &m.Slurm.Partition }, func(s *Subject) string { return s.Slurm.Partition }, nil},
	slurmAccount:     {"slurm.account", func(m *Match) any { return &m.Slurm.Account }, func(s *Subject) string { return s.Slurm.Account }, nil},
	slurmQOS:         {"slurm.qos", func(m *Match) any { return &m.Slurm.QOS }, func(s *Subject) string { return s.Slurm.QOS }, nil},
	gpu:              {"gpu", func(m *Match) any { return &m.GPU }, nil, nil},
	queuePriority:    {"queue_priority", func(m *Match) any { return &m.QueuePriority }, nil, nil},
	ringAddress:      {"ring_address", func(m *Match) any { return &m.RingAddress }, nil, nil},
	cmdline:          {"cmdline", func(m *Match) any { return &m.Cmdline }, func(s *Subject) string { return s.Cmdline }, nil},
}

// isMap reports whether the field is a map.
func (f field) isMap() bool { return fields[f].texts != nil }

func (f field) ofContainer() bool { return containerID <= f && f <= containerLabels }

func (f field) ofPod() bool { return podNamespace <= f && f <= podLabels }

func (f field) ofQueues() bool { return gpu <= f && f <= ringAddress }

func (f field) ofSlurm() bool { return slurmPartition <= f && f <= slurmQOS }

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
		return Member(fields[c.field].name, c.key)
	}
	return fields[c.field].name
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
		return slices.ContainsFunc(s.Queues, func(q gpreempt.QueueEntry) bool { return c.selects(gpuOf(s, q.GPU)) })
	case queuePriority:
		p, known, all := highestPriority(s)
		// An unknown one may be the highest.
		return known && c.includes(uint64(p.Priority)) && (all || c.last >= uint64(gpreempt.MaxPriority))
	case ringAddress:
		return slices.ContainsFunc(s.Queues, func(q gpreempt.QueueEntry) bool { return q.Info.RingBase != 0 && c.includes(q.Info.RingBase) })
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
	case c.field.ofSlurm():
		_, known := c.text(s)
		return s.Cgroup.SlurmJob != 0 && !known
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
	f := &fields[c.field]
	if f.texts != nil {
		text, known = f.texts(s)[c.key]
		return text, known
	}
	text = f.text(s)
	switch c.field {
	case comm, cgroup:
		return text, true
	case cmdline:
		return text, !s.Unread
	default:
		return text, text != ""
	}
}

func (c *condition) includes(n uint64) bool { return c.first <= n && n <= c.last }

// selects reports whether one of the selectors names a GPU.
func (c *condition) selects(g gpreempt.GPU) bool {
	return slices.ContainsFunc(c.gpus, func(sel selector) bool { return sel.selects(&g) })
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

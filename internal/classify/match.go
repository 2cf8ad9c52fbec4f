package classify

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Match says which processes a rule is for: those for which every field that is
// set holds. At least one must be set.
//
// The texts are globs for the whole of what they are compared with: * is any
// run of characters, / and none included, ? is any one, [ab0-9] one of these
// and [!ab0-9] or [^ab0-9] one that is none of these. There is no escape: [*] is
// a star. A glob that is "" is not set; in a map it is a mistake.
//
// What is not known of a process matches no glob, not even *; but an unknown
// command name, command line or control group counts as "".
type Match struct {
	// Comm is for the command name, of which the kernel keeps 15 bytes.
	Comm string
	// Cmdline is for the words of the command line with spaces between, of which
	// 4096 bytes are kept.
	Cmdline string
	// Exe is for the path of the program.
	Exe string
	// UID and GID are the effective ids.
	UID, GID *uint32
	// Cgroup is for the control group's path, which begins with /.
	Cgroup string
	// Unit and Slice are for systemd's innermost: train.service, batch.slice.
	Unit, Slice string
	// Env is for variables of the environment the process began with, by name. Each
	// must be set.
	Env       map[string]string
	Container ContainerMatch
	Pod       PodMatch
	// GPU holds when a queue of the process is on one of these: a gpu_id, node:N, a
	// PCI address or renderDN.
	GPU []string
	// QueuePriority is for the highest priority known of its compute queues. The 4 KiB
	// ring ROCm's runtime makes for itself counts only where there is no other.
	QueuePriority *PriorityRange
	// RingAddress holds when the ring of one of its queues begins there.
	RingAddress *AddressRange
}

// ContainerMatch is the part of a Match that is about the container.
type ContainerMatch struct {
	// ID is for the whole id, 64 hexadecimal digits mostly.
	ID string
	// Name and Image are for what the user gave.
	Name, Image string
	// Runtime is for docker, containerd, cri-o or podman.
	Runtime string
	// Labels are by name. Each must be there.
	Labels map[string]string
}

// PodMatch is the part of a Match that is about the Kubernetes pod.
type PodMatch struct {
	Namespace, Name, PriorityClass string
	// Labels are by name. Each must be there.
	Labels map[string]string
}

// PriorityRange is a range of KFD priorities, both ends included.
type PriorityRange struct {
	Min, Max gpreempt.Priority
}

// AddressRange is a range of virtual addresses, both ends included.
type AddressRange struct {
	From, To uint64
}

// IsZero tells that no field is set.
func (m Match) IsZero() bool {
	return len(m.conditions(func(_, _, _ string) {})) == 0
}

// String returns the fields that are set with their values, such as
// `comm="python*" uid=1000`.
func (m Match) String() string {
	var words []string
	for _, c := range m.conditions(func(_, _, _ string) {}) {
		words = append(words, c.name()+"="+c.wanted())
	}
	return strings.Join(words, " ")
}

// Member names an entry of a map in the config file: `env.HOME`, or
// `pod.labels["app.kubernetes.io/name"]` where it is not a plain word.
func Member(field, key string) string {
	plain := key != "" && strings.Trim(key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == ""
	if plain {
		return field + "." + key
	}
	return field + "[" + strconv.Quote(shorten(key)) + "]"
}

// conditions are all that must hold, those first that are cheap to look at. What
// is wrong with them is told to refuse.
func (m *Match) conditions(refuse refusal) []condition {
	var cs []condition
	text := func(f field, pattern string) {
		if pattern != "" {
			cs = append(cs, compileText(f, "", pattern, refuse))
		}
	}
	texts := func(f field, patterns map[string]string) {
		for _, key := range slices.Sorted(maps.Keys(patterns)) {
			cs = append(cs, compileText(f, key, patterns[key], refuse))
		}
	}
	number := func(f field, id *uint32) {
		if id != nil {
			cs = append(cs, condition{field: f, id: *id})
		}
	}
	text(comm, m.Comm)
	number(uid, m.UID)
	number(gid, m.GID)
	text(exe, m.Exe)
	text(cgroup, m.Cgroup)
	text(unit, m.Unit)
	text(slice, m.Slice)
	texts(env, m.Env)
	text(containerID, m.Container.ID)
	text(containerName, m.Container.Name)
	text(containerImage, m.Container.Image)
	text(containerRuntime, m.Container.Runtime)
	texts(containerLabels, m.Container.Labels)
	text(podNamespace, m.Pod.Namespace)
	text(podName, m.Pod.Name)
	text(podPriorityClass, m.Pod.PriorityClass)
	texts(podLabels, m.Pod.Labels)
	if len(m.GPU) > 0 {
		cs = append(cs, compileGPUs(m.GPU, refuse))
	}
	if r := m.QueuePriority; r != nil {
		if r.Max > gpreempt.MaxPriority {
			refuse("queue_priority", fmt.Sprintf("max %d is above %d", r.Max, gpreempt.MaxPriority), "choose 0 to 15; HIP's low, normal and high are 0, 7 and 11")
		} else if r.Min > r.Max {
			refuse("queue_priority", fmt.Sprintf("min %d is above max %d, which no priority can be", r.Min, r.Max), "swap them")
		}
		cs = append(cs, condition{field: queuePriority, first: uint64(r.Min), last: uint64(r.Max)})
	}
	if r := m.RingAddress; r != nil {
		if r.From > r.To {
			refuse("ring_address", fmt.Sprintf("from %#x is above to %#x, where no address is", r.From, r.To), "swap them")
		}
		cs = append(cs, condition{field: ringAddress, first: r.From, last: r.To})
	}
	text(cmdline, m.Cmdline)
	return cs
}

// compileText makes the condition of one glob.
func compileText(f field, key, pattern string, refuse refusal) condition {
	c := condition{field: f, key: key, pattern: pattern}
	switch {
	case f == env && (key == "" || strings.ContainsAny(key, "=\x00")):
		refuse(c.name(), "it is not the name of a variable", "write NAME: value, without =")
	case f.isMap() && key == "":
		refuse(c.name(), "the name of the label is empty", "write NAME: value")
	case f.isMap() && pattern == "":
		refuse(c.name(), "the value is empty", `write "*" if any value will do`)
	}
	var err *globError
	if c.glob, err = compileGlob(pattern); err != nil {
		refuse(c.name(), quoted(pattern)+": "+err.problem, err.remedy)
	} else if problem, remedy := hopeless(f, c.glob, pattern); problem != "" {
		refuse(c.name(), quoted(pattern)+": "+problem, remedy)
	}
	return c
}

// maxComm is how many bytes the kernel keeps of a command name.
const maxComm = 15

// idDigits is the length of a container id, in hexadecimal digits.
const idDigits = 64

// systemd's units that processes can be in, and the runtimes whose paths are known.
var (
	unitEnds = []string{".service", ".scope", ".mount", ".socket", ".swap"}
	runtimes = []string{"docker", "containerd", "cri-o", "podman"}
)

// hopeless reports why a glob matches nothing there can be, and what would; "" when
// it may.
func hopeless(f field, g glob, pattern string) (problem, remedy string) {
	switch f {
	case comm:
		if g.shortest() > maxComm {
			return fmt.Sprintf("it matches no name of %d bytes or less, and the kernel keeps no more", maxComm), "end it in * earlier, or match cmdline"
		}
	case cgroup, exe:
		if first, _ := utf8.DecodeRuneInString(pattern); !strings.ContainsRune("/*?[", first) {
			return "it matches no path, as they begin with /", "begin it with / or *"
		}
	case unit:
		if !slices.ContainsFunc(unitEnds, g.mayEndIn) {
			return "it matches no unit, as they end in .service or .scope", fmt.Sprintf("end it in one of these or in *, such as %q", cut(pattern)+".service")
		}
	case slice:
		if !g.mayEndIn(".slice") {
			return "it matches no slice, as they end in .slice", fmt.Sprintf("end it in that or in *, such as %q", cut(pattern)+".slice")
		}
	case containerID:
		if len(pattern) < idDigits && strings.Trim(pattern, "0123456789abcdef") == "" {
			return fmt.Sprintf("it is a part of an id, and they have %d digits", idDigits), fmt.Sprintf("write %q", pattern+"*")
		}
	case containerRuntime:
		if !slices.ContainsFunc(runtimes, g.matches) {
			return "it matches no runtime", "the runtimes known are " + strings.Join(runtimes, ", ")
		}
	default:
	}
	return "", ""
}

func compileGPUs(selectors []string, refuse refusal) condition {
	c := condition{field: gpu, gpus: make([]selector, len(selectors))}
	for n, text := range selectors {
		sel, ok := parseSelector(text)
		if !ok {
			refuse(fmt.Sprintf("gpu[%d]", n), quoted(text)+" names no GPU", "write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them")
		}
		c.gpus[n] = sel
	}
	return c
}

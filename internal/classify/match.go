package classify

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Match selects processes: those for which every set field holds. At least one field must
// be set.
//
// The texts are globs that must match the whole value: * is any run of characters, also
// none and with /, ? is any one character, [ab0-9] one of these, and [!ab0-9] or [^ab0-9]
// one of the others. There is no escape character: [*] is a star. The glob "" is not set;
// in a map it is an error.
//
// An unknown value matches no glob, not even *; but an unknown command name, command line
// or control group counts as "".
type Match struct {
	// Comm is the command name, of which the kernel keeps 15 bytes.
	Comm string `yaml:"comm"`
	// Cmdline is the words of the command line with spaces between, of which 4096 bytes
	// are kept.
	Cmdline string `yaml:"cmdline"`
	// Exe is the path of the program.
	Exe string `yaml:"exe"`
	// UID and GID are the effective ids. The highest id is -1, which no process has.
	UID *uint32 `yaml:"uid" range:"0 4294967294" write:"write a number from 0 to 4294967294, as id -u USER prints"`
	GID *uint32 `yaml:"gid" range:"0 4294967294" write:"write a number from 0 to 4294967294, as id -g USER prints"`
	// Cgroup is the control group's path, which begins with /.
	Cgroup string `yaml:"cgroup"`
	// Unit is a unit of the system's systemd, train.service, and Slice the innermost that it
	// is in, batch.slice. UserUnit is a unit of a user's systemd, who chooses its name.
	Unit     string `yaml:"unit"`
	Slice    string `yaml:"slice"`
	UserUnit string `yaml:"user_unit"`
	// Env has variables of the initial environment of the process, by name. Each must be
	// set.
	Env       map[string]string `yaml:"env"`
	Container ContainerMatch    `yaml:"container"`
	Pod       PodMatch          `yaml:"pod"`
	Slurm     SlurmMatch        `yaml:"slurm"`
	// GPU holds if a queue of the process is on one of these: a gpu_id, node:N, a PCI
	// address or renderDN.
	GPU []string `yaml:"gpu" write:"write a list of GPUs, such as [renderD128, node:1]: a gpu_id, node:N without a space, a PCI address or renderDN"`
	// QueuePriority is the highest known priority of its compute queues. The 4 KiB ring
	// that ROCm's runtime creates for itself counts only if there is no other.
	QueuePriority *PriorityRange `yaml:"queue_priority"`
	// RingAddress holds if the ring of one of its queues begins in the range.
	RingAddress *AddressRange `yaml:"ring_address"`
}

// ContainerMatch is the part of a Match that is about the container.
type ContainerMatch struct {
	// ID is the whole id, usually 64 hexadecimal digits.
	ID string `yaml:"id"`
	// Name and Image are those that the user chose.
	Name  string `yaml:"name"`
	Image string `yaml:"image"`
	// Runtime is docker, containerd, cri-o or podman.
	Runtime string `yaml:"runtime"`
	// Labels are by name. Each must exist.
	Labels map[string]string `yaml:"labels"`
}

// PodMatch is the part of a Match that is about the Kubernetes pod.
type PodMatch struct {
	Namespace string `yaml:"namespace"`
	Name      string `yaml:"name"`
	// Labels are by name. Each must exist.
	Labels map[string]string `yaml:"labels"`
}

// SlurmMatch is the part of a Match that is about the Slurm job, as the prolog recorded it.
type SlurmMatch struct {
	Partition string `yaml:"partition"`
	Account   string `yaml:"account"`
	QOS       string `yaml:"qos"`
}

// PriorityRange is a range of KFD priorities, both bounds included.
type PriorityRange struct {
	Min gpreempt.Priority `yaml:"min" range:"0 15"`
	Max gpreempt.Priority `yaml:"max" range:"0 15" default:"15"`
}

// AddressRange is a range of virtual addresses, both bounds included.
type AddressRange struct {
	From uint64 `yaml:"from" write:"write hexadecimal digits after 0x, as in 0x7f0000000000, at most 16, or a decimal number"`
	To   uint64 `yaml:"to" write:"write hexadecimal digits after 0x, as in 0x7f0000000000, at most 16, or a decimal number" default:"0xffffffffffffffff"`
}

// String returns the set fields with their values, such as
// `comm="python*" uid=1000`.
func (m Match) String() string {
	var words []string
	for _, c := range m.conditions(func(_, _, _ string) {}) {
		words = append(words, c.name()+"="+c.wanted())
	}
	return strings.Join(words, " ")
}

// Member returns the name of a map entry in the config file: `env.HOME`, or
// `pod.labels["app.kubernetes.io/name"]` if the key is not a plain word.
func Member(field, key string) string {
	plain := key != "" && strings.Trim(key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == ""
	if plain {
		return field + "." + key
	}
	return field + "[" + strconv.Quote(shorten(key)) + "]"
}

// conditions returns the conditions, the cheap ones first. It calls fail for each error.
func (m *Match) conditions(fail reject) []condition {
	var cs []condition
	for n := range fields {
		f := field(n)
		switch at := fields[n].at(m).(type) {
		case *string:
			if *at != "" {
				cs = append(cs, compileText(f, "", *at, fail))
			}
		case *map[string]string:
			for _, key := range slices.Sorted(maps.Keys(*at)) {
				cs = append(cs, compileText(f, key, (*at)[key], fail))
			}
		case **uint32:
			if *at != nil {
				cs = append(cs, condition{field: f, id: **at})
			}
		case *[]string:
			if len(*at) > 0 {
				cs = append(cs, compileGPUs(*at, fail))
			}
		case **PriorityRange:
			if r := *at; r != nil {
				if r.Max > gpreempt.MaxPriority {
					fail("queue_priority", fmt.Sprintf("max %d is above %d", r.Max, gpreempt.MaxPriority), "choose 0 to 15; HIP's low, normal and high are 0, 7 and 11")
				} else if r.Min > r.Max {
					fail("queue_priority", fmt.Sprintf("min %d is above max %d", r.Min, r.Max), "swap them")
				}
				cs = append(cs, condition{field: f, first: uint64(r.Min), last: uint64(r.Max)})
			}
		case **AddressRange:
			if r := *at; r != nil {
				if r.From > r.To {
					fail("ring_address", fmt.Sprintf("from %#x is above to %#x", r.From, r.To), "swap them")
				}
				cs = append(cs, condition{field: f, first: r.From, last: r.To})
			}
		}
	}
	return cs
}

// compileText returns the condition of one glob.
func compileText(f field, key, pattern string, fail reject) condition {
	c := condition{field: f, key: key, pattern: pattern}
	switch {
	case f == env && (key == "" || strings.ContainsAny(key, "=\x00")):
		fail(c.name(), "is not the name of a variable", "write NAME: value, without =")
	case f.isMap() && key == "":
		fail(c.name(), "the name of the label is empty", "write NAME: value")
	case f.isMap() && pattern == "":
		fail(c.name(), "the value is empty", `write "*" to match any value`)
	}
	var err *globError
	if c.glob, err = compileGlob(pattern); err != nil {
		fail(c.name(), quoted(pattern)+": "+err.problem, err.remedy)
	} else if part := regular.FindString(pattern); part != "" {
		fail(c.name(), fmt.Sprintf("%s: %q is of a regular expression, or of a shell; a text is a glob, in which it means itself", quoted(pattern), part),
			"write * for any run of characters, [0-9] for a digit, and a rule for each alternative; for the character itself, put it into []")
	} else if problem, remedy := hopeless(f, c.glob, pattern); problem != "" {
		fail(c.name(), quoted(pattern)+": "+problem, remedy)
	}
	return c
}

// regular finds what has a meaning in regular expressions, or {a,b} of shells, and hardly ever is a part of the texts
// that globs are compared with. That is not so for the \x2d in names of systemd's units.
var regular = regexp.MustCompile(`^\^|\$$|^\.[*+]|/\.\*$|\.\+|\]\+|\(\?|\\[dDwWsSbB.*+?()|^$/-]|[^\s|[]\|[^\s|\]]|\{[\w.*-]+(,[\w.*-]+)+\}`)

// maxComm is how many bytes the kernel keeps of a command name.
const maxComm = 15

// idDigits is the length of a container id, in hexadecimal digits.
const idDigits = 64

// systemd's units that can have processes, and the runtimes whose paths are known.
var (
	unitEnds = []string{".service", ".scope", ".mount", ".socket", ".swap"}
	runtimes = []string{"docker", "containerd", "cri-o", "podman"}
)

// hopeless returns why a glob cannot match any possible value, and what to write; "" if it
// can.
func hopeless(f field, g glob, pattern string) (problem, remedy string) {
	switch f {
	case comm:
		if g.shortest > maxComm {
			return fmt.Sprintf("matches no name of at most %d bytes, which is all that the kernel keeps", maxComm), "shorten it and end it with *, or match cmdline"
		}
	case cgroup, exe:
		if first, _ := utf8.DecodeRuneInString(pattern); !strings.ContainsRune("/*?[", first) {
			return "matches no path: paths begin with /", "begin it with / or *"
		}
	case unit, userUnit:
		if !slices.ContainsFunc(unitEnds, g.mayEndIn) && f == unit && strings.HasSuffix(pattern, ".slice") {
			return "matches no unit: units end in .service or .scope", "match slice in place of unit"
		}
		if !slices.ContainsFunc(unitEnds, g.mayEndIn) {
			return "matches no unit: units end in .service or .scope", fmt.Sprintf("end it with one of these or with *, such as %q", cut(pattern)+".service")
		}
	case slice:
		if slices.ContainsFunc(unitEnds, func(end string) bool { return strings.HasSuffix(pattern, end) }) {
			return "matches no slice: slices end in .slice", "match unit in place of slice"
		}
		if !g.mayEndIn(".slice") {
			return "matches no slice: slices end in .slice", fmt.Sprintf("end it with that or with *, such as %q", cut(pattern)+".slice")
		}
	case containerID:
		if len(pattern) < idDigits && strings.Trim(pattern, "0123456789abcdef") == "" {
			return fmt.Sprintf("is only part of an id: ids have %d digits", idDigits), fmt.Sprintf("write %q", pattern+"*")
		}
	case containerRuntime:
		if !slices.ContainsFunc(runtimes, g.matches) {
			return "matches no runtime", "the known runtimes are " + strings.Join(runtimes, ", ")
		}
	default:
	}
	return "", ""
}

func compileGPUs(selectors []string, fail reject) condition {
	c := condition{field: gpu, gpus: make([]selector, len(selectors))}
	for n, text := range selectors {
		sel, ok := parseSelector(text)
		if !ok {
			fail(fmt.Sprintf("gpu[%d]", n), quoted(text)+" is not the name of a GPU", "write a gpu_id, node:N, a PCI address or renderDN, as `gpctl gpu list` shows them")
		}
		c.gpus[n] = sel
	}
	return c
}

package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (p *parser) rules(n *yaml.Node) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		p.fail(n, "rules", "is "+kindOf(n), "write a list, each rule beginning with `- name: ...`")
		return
	}
	for i, item := range n.Content {
		path := fmt.Sprintf("rules[%d]", i)
		p.nodes[path] = item
		p.config.Rules = append(p.config.Rules, p.rule(item, path))
	}
}

// ruleKeys are those of a rule.
var ruleKeys = []string{"name", "match", "class", "priority"}

func (p *parser) rule(n *yaml.Node, path string) classify.Rule {
	var r classify.Rule
	for _, e := range p.mapping(n, path, ruleKeys) {
		switch at := join(path, e.name); e.name {
		case "name":
			p.value(e.value, at, &r.Name)
		case "match":
			p.slots(e.value, at, matchSlots(&r.Match))
		case "class":
			p.value(e.value, at, &r.Class)
		case "priority":
			p.value(e.value, at, &r.Priority)
		}
	}
	if _, given := p.nodes[path+".class"]; !given && n.Kind == yaml.MappingNode {
		p.fail(n, path+".class", "is missing", "say online, offline or unmanaged")
	}
	return r
}

// slot is a key and where its value goes: a pointer to a field of a Match, or the
// slots of a mapping.
type slot struct {
	name string
	at   any
}

// matchSlots lists every key of match.
func matchSlots(m *classify.Match) []slot {
	return []slot{
		{"comm", &m.Comm},
		{"cmdline", &m.Cmdline},
		{"exe", &m.Exe},
		{"uid", &m.UID},
		{"gid", &m.GID},
		{"cgroup", &m.Cgroup},
		{"unit", &m.Unit},
		{"slice", &m.Slice},
		{"env", &m.Env},
		{"container", []slot{
			{"id", &m.Container.ID},
			{"name", &m.Container.Name},
			{"image", &m.Container.Image},
			{"runtime", &m.Container.Runtime},
			{"labels", &m.Container.Labels},
		}},
		{"pod", []slot{
			{"namespace", &m.Pod.Namespace},
			{"name", &m.Pod.Name},
			{"priority_class", &m.Pod.PriorityClass},
			{"labels", &m.Pod.Labels},
		}},
		{"gpu", &m.GPU},
		{"queue_priority", &m.QueuePriority},
		{"ring_address", &m.RingAddress},
	}
}

func matchKeys() []string { return slotNames(matchSlots(new(classify.Match))) }

func slotNames(slots []slot) []string {
	var names []string
	for _, s := range slots {
		names = append(names, s.name)
	}
	return names
}

// slots reads a mapping into the places given.
func (p *parser) slots(n *yaml.Node, path string, slots []slot) {
	for _, e := range p.mapping(n, path, slotNames(slots)) {
		key := join(path, e.name)
		i := slices.IndexFunc(slots, func(s slot) bool { return s.name == e.name })
		switch at := slots[i].at.(type) {
		case *string:
			p.glob(e.value, key, at)
		case **uint32:
			p.value(e.value, key, at)
		case *map[string]string:
			p.globs(e.value, key, at)
		case *[]string:
			p.gpus(e.value, key, at)
		case **classify.PriorityRange:
			p.priorities(e.value, key, at)
		case **classify.AddressRange:
			p.addresses(e.value, key, at)
		case []slot:
			if p.filled(e.value, key, fmt.Sprintf("{%s: \"...\"}", at[1].name)) {
				p.slots(e.value, key, at)
			}
		}
	}
}

// filled reports whether n is a mapping with something in it. In a rule an empty one
// cannot be meant: all that is in it has to hold.
func (p *parser) filled(n *yaml.Node, key, example string) bool {
	switch {
	case isNull(n) || (n.Kind == yaml.MappingNode && len(n.Content) == 0):
		p.fail(n, key, "is empty", "write what must hold, such as "+example+", or remove the key")
	case n.Kind != yaml.MappingNode:
		p.fail(n, key, "is "+kindOf(n), "write keys and values, such as "+example)
	default:
		return true
	}
	return false
}

// glob reads a text that is not empty.
func (p *parser) glob(n *yaml.Node, key string, into *string) {
	switch {
	case isNull(n) || (isScalar(n, "!!str") && n.Value == ""):
		p.fail(n, key, "is empty", `write "*" if any will do, or remove the key`)
	case isScalar(n, "!!str"):
		*into = n.Value
	case n.Kind == yaml.ScalarNode:
		p.fail(n, key, "is "+kindOf(n), "put it in quotes: "+quoted(n.Value))
	case n.Kind == yaml.SequenceNode:
		p.fail(n, key, "is a list", "write one text, and one more rule for each of the others")
	default:
		p.fail(n, key, "is "+kindOf(n), "write a text in quotes")
	}
}

// globs reads a mapping of names to globs.
func (p *parser) globs(n *yaml.Node, key string, into *map[string]string) {
	if !p.filled(n, key, `{NAME: "*"}`) {
		return
	}
	texts := map[string]string{}
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		at := classify.Member(key, k.Value)
		switch {
		case !isScalar(k, "!!str"):
			p.fail(k, key, "a name is "+kindOf(k), "write a text, in quotes if it looks like something else")
		case lines[k.Value] > 0:
			p.fail(k, at, fmt.Sprintf("is given twice, first on line %d", lines[k.Value]), "keep one of them")
		default:
			lines[k.Value] = k.Line
			p.nodes[at] = v
			var text string
			p.glob(v, at, &text)
			texts[k.Value] = text
		}
	}
	*into = texts
}

func (p *parser) gpus(n *yaml.Node, key string, into *[]string) {
	const forms = "a gpu_id, node:N without a space, a PCI address or renderDN"
	if p.list(n, key, into, "write a list such as [renderD128] or [node:1, node:2]", "write "+forms) && len(*into) == 0 {
		p.fail(n, key, "is empty", "list what names a GPU, "+forms+", or remove the key")
	}
}

// priorities reads a range; the end that is not given is that of all priorities.
func (p *parser) priorities(n *yaml.Node, key string, into **classify.PriorityRange) {
	if !p.filled(n, key, "{min: 0, max: 6}") {
		return
	}
	r := &classify.PriorityRange{Max: gpreempt.MaxPriority}
	for _, e := range p.mapping(n, key, []string{"min", "max"}) {
		u, ok := p.unsigned(e.value, join(key, e.name), uint64(gpreempt.MaxPriority))
		switch {
		case !ok:
		case e.name == "min":
			r.Min = gpreempt.Priority(u)
		default:
			r.Max = gpreempt.Priority(u)
		}
	}
	*into = r
}

// addresses reads a range; the end that is not given is that of all addresses.
func (p *parser) addresses(n *yaml.Node, key string, into **classify.AddressRange) {
	if !p.filled(n, key, "{from: 0x7f0000000000, to: 0x7fffffffffff}") {
		return
	}
	r := &classify.AddressRange{To: 1<<64 - 1}
	for _, e := range p.mapping(n, key, []string{"from", "to"}) {
		u, ok := p.address(e.value, join(key, e.name))
		switch {
		case !ok:
		case e.name == "from":
			r.From = u
		default:
			r.To = u
		}
	}
	*into = r
}

// address reads hexadecimal digits behind 0x, or decimal ones. Zeros before
// decimal digits are refused: who writes them has left out the 0x.
func (p *parser) address(n *yaml.Node, key string) (uint64, bool) {
	const remedy = "write hexadecimal digits behind 0x, as in 0x7f0000000000, at most 16, or a decimal number"
	if n.Kind != yaml.ScalarNode || (!isScalar(n, "!!int") && !isScalar(n, "!!str") && !isScalar(n, "!!float")) {
		p.fail(n, key, "is "+kindOf(n), remedy)
		return 0, false
	}
	digits, base := n.Value, 10
	if rest, found := strings.CutPrefix(strings.ToLower(n.Value), "0x"); found {
		digits, base = rest, 16
	}
	u, err := strconv.ParseUint(digits, base, 64)
	if err != nil || (base == 10 && len(digits) > 1 && digits[0] == '0') {
		p.fail(n, key, quoted(n.Value)+" is not an address", remedy)
		return 0, false
	}
	return u, true
}

// placeInRule says where in a rule a key belongs that is not known at path; "" when
// nowhere, or when path is not in a rule.
func placeInRule(path, name string) string {
	_, rest, found := strings.Cut(path, "]")
	if !found || !strings.HasPrefix(path, "rules[") {
		return ""
	}
	switch rest {
	case "":
		if slices.Contains(matchKeys(), name) {
			return "it belongs under match:"
		}
		return ""
	case ".match", ".match.container", ".match.pod":
	default:
		return ""
	}
	if slices.Contains(matchKeys(), name) {
		return "it belongs under match:"
	}
	var inner []string
	for _, s := range matchSlots(new(classify.Match)) {
		if slots, ok := s.at.([]slot); ok && slices.Contains(slotNames(slots), name) {
			inner = append(inner, s.name+":")
		}
	}
	switch {
	case inner != nil:
		return "it belongs under " + strings.Join(inner, " or ")
	case slices.Contains(ruleKeys, name):
		return "it belongs beside match:, not in it"
	}
	return ""
}

package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (p *parser) rules(n *yaml.Node) {
	if yamlfile.IsNull(n) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		p.Fail(n, "rules", "is "+yamlfile.Kind(n), "write a list, each rule beginning with `- name: ...`")
		return
	}
	for i, item := range n.Content {
		path := fmt.Sprintf("rules[%d]", i)
		p.Set(path, item)
		p.config.Rules = append(p.config.Rules, p.rule(item, path))
	}
}

// ruleKeys are the keys of a rule.
var ruleKeys = []string{"name", "match", "class", "priority", "never_debug", "on_resist"}

func (p *parser) rule(n *yaml.Node, path string) classify.Rule {
	var r classify.Rule
	for _, e := range p.Mapping(n, path, ruleKeys) {
		switch at := yamlfile.Join(path, e.Name); e.Name {
		case "name":
			p.value(e.Value, at, &r.Name)
		case "match":
			p.slots(e.Value, at, matchSlots(&r.Match))
		case "class":
			p.value(e.Value, at, &r.Class)
		case "priority":
			p.value(e.Value, at, &r.Priority)
		case "never_debug":
			p.value(e.Value, at, &r.NeverDebug)
		case "on_resist":
			p.onResist(e.Value, at, &r.OnResist)
		}
	}
	if !p.Given(path+".class") && n.Kind == yaml.MappingNode {
		p.Fail(n, path+".class", "is missing", "write online, offline or unmanaged")
	}
	return r
}

// onResist reads what is done about a process that resists.
func (p *parser) onResist(n *yaml.Node, key string, into *gpreempt.Resistance) {
	const remedy = "write report, stop, or {kill: N}, with the number of refused suspensions"
	switch {
	case yamlfile.IsScalar(n, "!!str") && n.Value == "report":
	case yamlfile.IsScalar(n, "!!str") && n.Value == "stop":
		into.Stop = true
	case n.Kind == yaml.MappingNode && len(n.Content) > 0:
		for _, e := range p.Mapping(n, key, []string{"kill"}) {
			at := yamlfile.Join(key, e.Name)
			after, ok := p.Unsigned(e.Value, at, 1000)
			if ok && after == 0 {
				p.Fail(e.Value, at, "is 0", "write 1 to 1000 refused suspensions, or remove on_resist")
			}
			into.KillAfter = int(after)
		}
	case n.Kind == yaml.ScalarNode:
		p.Fail(n, key, "is "+yamlfile.Quoted(n.Value), remedy)
	default:
		p.Fail(n, key, "is "+yamlfile.Kind(n), remedy)
	}
}

// jobs reads the list of job rules, which replaces the default one.
func (p *parser) jobs(n *yaml.Node) {
	if n.Kind != yaml.SequenceNode {
		p.Fail(n, "jobs", "is "+yamlfile.Kind(n), "write a list, each rule beginning with `- name: ...`, [] for no jobs, or remove the key to use the default")
		return
	}
	p.config.Jobs = []classify.JobRule{}
	for i, item := range n.Content {
		path := fmt.Sprintf("jobs[%d]", i)
		p.Set(path, item)
		var r classify.JobRule
		for _, e := range p.Mapping(item, path, []string{"name", "cgroup", "by"}) {
			switch at := yamlfile.Join(path, e.Name); e.Name {
			case "name":
				p.value(e.Value, at, &r.Name)
			case "cgroup":
				p.glob(e.Value, at, &r.Cgroup)
			case "by":
				p.list(e.Value, at, &r.By, "write a list such as [env.SLURM_JOB_ID]", "write the name of a property")
			}
		}
		p.config.Jobs = append(p.config.Jobs, r)
	}
}

// slot is a key and the destination of its value: a pointer to a field of a Match, or
// the slots of a mapping.
type slot struct {
	name string
	at   any
}

// matchSlots returns every key of match.
func matchSlots(m *classify.Match) (slots []slot) {
	for name, at := range m.Fields() {
		outer, inner, nested := strings.Cut(name, ".")
		i := slices.IndexFunc(slots, func(s slot) bool { return s.name == outer })
		switch {
		case !nested:
			slots = append(slots, slot{outer, at})
		case i < 0:
			slots = append(slots, slot{outer, []slot{{inner, at}}})
		default:
			slots[i].at = append(slots[i].at.([]slot), slot{inner, at})
		}
	}
	return slots
}

func matchKeys() []string { return slotNames(matchSlots(new(classify.Match))) }

func slotNames(slots []slot) []string {
	var names []string
	for _, s := range slots {
		names = append(names, s.name)
	}
	return names
}

// slots reads a mapping into the fields of slots.
func (p *parser) slots(n *yaml.Node, path string, slots []slot) {
	for _, e := range p.Mapping(n, path, slotNames(slots)) {
		key := yamlfile.Join(path, e.Name)
		i := slices.IndexFunc(slots, func(s slot) bool { return s.name == e.Name })
		switch at := slots[i].at.(type) {
		case *string:
			p.glob(e.Value, key, at)
		case **uint32:
			p.value(e.Value, key, at)
		case *map[string]string:
			p.globs(e.Value, key, at)
		case *[]string:
			p.gpus(e.Value, key, at)
		case **classify.PriorityRange:
			p.priorities(e.Value, key, at)
		case **classify.AddressRange:
			p.addresses(e.Value, key, at)
		case []slot:
			if p.filled(e.Value, key, fmt.Sprintf("{%s: \"...\"}", at[1].name)) {
				p.slots(e.Value, key, at)
			}
		}
	}
}

// filled reports whether n is a mapping that is not empty. In a rule an empty one would
// match every process.
func (p *parser) filled(n *yaml.Node, key, example string) bool {
	switch {
	case yamlfile.IsNull(n) || (n.Kind == yaml.MappingNode && len(n.Content) == 0):
		p.Fail(n, key, "is empty", "write a condition, such as "+example+", or remove the key")
	case n.Kind != yaml.MappingNode:
		p.Fail(n, key, "is "+yamlfile.Kind(n), "write keys and values, such as "+example)
	default:
		return true
	}
	return false
}

// glob reads a text that must not be empty.
func (p *parser) glob(n *yaml.Node, key string, into *string) {
	switch {
	case yamlfile.IsNull(n) || (yamlfile.IsScalar(n, "!!str") && n.Value == ""):
		p.Fail(n, key, "is empty", `write "*" to match any value, or remove the key`)
	case yamlfile.IsScalar(n, "!!str"):
		*into = n.Value
	case n.Kind == yaml.ScalarNode:
		p.Fail(n, key, "is "+yamlfile.Kind(n), "put it in quotes: "+yamlfile.Quoted(n.Value))
	case n.Kind == yaml.SequenceNode:
		p.Fail(n, key, "is a list", "write one text, and add a rule for each of the others")
	default:
		p.Fail(n, key, "is "+yamlfile.Kind(n), "write a text in quotes")
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
		case !yamlfile.IsScalar(k, "!!str"):
			p.Fail(k, key, "a name is "+yamlfile.Kind(k), "write a text, in quotes if it looks like something else")
		case lines[k.Value] > 0:
			p.Fail(k, at, fmt.Sprintf("is given twice, first on line %d", lines[k.Value]), "keep one of them")
		default:
			lines[k.Value] = k.Line
			p.Set(at, v)
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
		p.Fail(n, key, "is empty", "list GPUs, each as "+forms+", or remove the key")
	}
}

// priorities reads a range; a missing bound is that of all priorities.
func (p *parser) priorities(n *yaml.Node, key string, into **classify.PriorityRange) {
	if !p.filled(n, key, "{min: 0, max: 6}") {
		return
	}
	r := &classify.PriorityRange{Max: gpreempt.MaxPriority}
	for _, e := range p.Mapping(n, key, []string{"min", "max"}) {
		u, ok := p.Unsigned(e.Value, yamlfile.Join(key, e.Name), uint64(gpreempt.MaxPriority))
		switch {
		case !ok:
		case e.Name == "min":
			r.Min = gpreempt.Priority(u)
		default:
			r.Max = gpreempt.Priority(u)
		}
	}
	*into = r
}

// addresses reads a range; a missing bound is that of all addresses.
func (p *parser) addresses(n *yaml.Node, key string, into **classify.AddressRange) {
	if !p.filled(n, key, "{from: 0x7f0000000000, to: 0x7fffffffffff}") {
		return
	}
	r := &classify.AddressRange{To: 1<<64 - 1}
	for _, e := range p.Mapping(n, key, []string{"from", "to"}) {
		u, ok := p.address(e.Value, yamlfile.Join(key, e.Name))
		switch {
		case !ok:
		case e.Name == "from":
			r.From = u
		default:
			r.To = u
		}
	}
	*into = r
}

// address reads hexadecimal digits after 0x, or decimal ones. Leading zeros without 0x are
// an error, because the 0x is probably missing.
func (p *parser) address(n *yaml.Node, key string) (uint64, bool) {
	const remedy = "write hexadecimal digits after 0x, as in 0x7f0000000000, at most 16, or a decimal number"
	if n.Kind != yaml.ScalarNode || (!yamlfile.IsScalar(n, "!!int") && !yamlfile.IsScalar(n, "!!str") && !yamlfile.IsScalar(n, "!!float")) {
		p.Fail(n, key, "is "+yamlfile.Kind(n), remedy)
		return 0, false
	}
	digits, base := n.Value, 10
	if rest, found := strings.CutPrefix(strings.ToLower(n.Value), "0x"); found {
		digits, base = rest, 16
	}
	u, err := strconv.ParseUint(digits, base, 64)
	if err != nil || (base == 10 && len(digits) > 1 && digits[0] == '0') {
		p.Fail(n, key, yamlfile.Quoted(n.Value)+" is not an address", remedy)
		return 0, false
	}
	return u, true
}

// placeInRule returns where in a rule a key belongs that is unknown at path; "" if
// nowhere, or if path is not in a rule.
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
		return "it belongs next to match:, not in it"
	}
	return ""
}

package safety

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/mechanism"
)

// maxText bounds a sentence, in bytes.
const maxText = 600

// Parse parses a list of rows, the form of hazards.yaml. name is the file's name in
// errors. The error is a yamlfile.Errors with every error in the file.
func Parse(name string, data []byte) ([]Row, error) {
	p := yamlfile.New(name)
	var rows []Row
	if list := p.Document(data); list != nil {
		rows = Decode(p, list, "")
	}
	if err := p.Err(); err != nil {
		return nil, err
	}
	return rows, nil
}

// Decode decodes the list of rows that a file has at key, and adds its errors to p.
func Decode(p *yamlfile.Parser, list *yaml.Node, key string) []Row {
	d := &decoder{p, map[string]int{}}
	if yamlfile.IsNull(list) {
		return nil
	}
	if list.Kind != yaml.SequenceNode {
		p.Fail(list, key, "is "+yamlfile.Kind(list), "write a list, each row beginning with `- id: ...`")
		return nil
	}
	var rows []Row
	for i, item := range list.Content {
		rows = append(rows, d.row(item, fmt.Sprintf("%s[%d]", key, i)))
	}
	return rows
}

type decoder struct {
	*yamlfile.Parser
	ids map[string]int // the line of each
}

var (
	idForm = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,63}$`)
	// searchForm begins with a day that exists, roughly.
	searchForm = regexp.MustCompile(`^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01]): .`)
	issueForm  = regexp.MustCompile(`^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+#[0-9]{1,9}$`)
)

// rowKeys are the keys of a row, in the order the documentation has them. Rows with nvidia have
// none of amdKeys.
var (
	amdKeys = []string{"gfx", "apu", "kernel", "driver", "process", "mes", "mes_kiq", "mec", "sdma", "mechanisms"}
	rowKeys = slices.Concat([]string{"id"}, amdKeys, []string{"nvidia", "model", "action", "why", "issues", "read", "searched", "remedy"})
)

// required are the keys that every row must have.
var required = []struct{ key, remedy string }{
	{"id", "write a unique name, such as site-gfx1100"},
	{"gfx", "list the GPUs, such as [gfx1100] or [gfx11xx]; [gfx*] for all"},
	{"action", "write allow, limit or deny"},
	{"why", "write the reason in a sentence; it is shown to users"},
}

func (d *decoder) row(n *yaml.Node, path string) Row {
	r := Row{Mechanisms: slices.Clone(defaultMechanisms)}
	entries := d.Mapping(n, path, rowKeys)
	nvidia := d.Given(yamlfile.Join(path, "nvidia"))
	for _, e := range entries {
		key := yamlfile.Join(path, e.Name)
		switch {
		case nvidia && slices.Contains(amdKeys, e.Name):
			d.Fail(e.Value, key, "is about GPUs of AMD, and nvidia about others", "remove one of them")
		case !nvidia && e.Name == "model":
			d.Fail(e.Value, key, "is for GPUs of NVIDIA", `add the driver's version, such as nvidia: "=580"`)
		default:
			d.value(&r, e.Name, e.Value, key)
		}
	}
	if nvidia {
		r.Mechanisms = []string{mechanism.NVChannels}
	}
	for _, need := range required {
		if key := yamlfile.Join(path, need.key); !(nvidia && need.key == "gfx") && (n.Kind == yaml.MappingNode || yamlfile.IsNull(n)) && !d.Given(key) {
			d.Fail(n, key, "is missing", need.remedy)
		}
	}
	return r
}

// value decodes the value of one key into the row.
func (d *decoder) value(r *Row, name string, n *yaml.Node, key string) {
	switch name {
	case "id":
		if d.Text(n, key, &r.ID) {
			first := d.ids[r.ID]
			if !idForm.MatchString(r.ID) {
				d.Fail(n, key, yamlfile.Quoted(r.ID)+" is not a valid row name", "use small letters, digits and dashes")
			} else if first > 0 {
				d.Fail(n, key, fmt.Sprintf("%s is also the row on line %d", r.ID, first), "choose for each row a unique name")
			}
			d.ids[r.ID] = n.Line
		}
	case "gfx":
		const remedy = "write names such as gfx942, families such as gfx11xx, spans such as gfx1100-gfx1103, or gfx*"
		for _, item := range d.list(n, key, remedy) {
			x, err := parseGFX(item.Value)
			if err != nil {
				d.Fail(item, key, err.Error(), remedy)
			}
			r.GFX = append(r.GFX, x)
		}
	case "apu":
		var apu bool
		if d.Bool(n, key, &apu) {
			r.APU = &apu
		}
	case "kernel":
		r.Kernel = ranged(d, n, key, parseKernel, `write comparisons such as ">=6.5 <7.0"`)
	case "nvidia":
		r.NVIDIA = ranged(d, n, key, parseKernel, `write comparisons such as "=580" or ">=590.48 <600"`)
	case "model":
		for _, item := range d.list(n, key, "write words of the GPU's name, such as [H100, H200]") {
			r.Models = append(r.Models, item.Value)
		}
	case "mes", "mes_kiq", "mec", "sdma":
		*map[string]*Range{"mes": &r.MES, "mes_kiq": &r.MESKIQ, "mec": &r.MEC, "sdma": &r.SDMA}[name] = ranged(d, n, key, parseFirmware, `write comparisons such as "=0x83" or ">=0x40 <0x80"; 0 means unknown`)
	case "driver":
		d.Word(n, key, []string{InTree, DKMS}, &r.Driver)
	case "process":
		d.Word(n, key, []string{GPUWithoutVM}, &r.Process)
	case "action":
		var word string
		d.Word(n, key, []string{"allow", "limit", "deny", "note"}, &word)
		r.Action = Action(max(0, slices.Index(actionNames, word)))
	case "mechanisms":
		r.Mechanisms = nil
		for _, item := range d.list(n, key, "write a list of "+yamlfile.Or(Mechanisms())) {
			var word string
			if d.Word(item, key, Mechanisms(), &word); slices.Contains(r.Mechanisms, word) {
				d.Fail(item, key, word+" is given twice", "keep one of them")
			}
			r.Mechanisms = append(r.Mechanisms, word)
		}
	case "why":
		d.sentence(n, key, &r.Why)
	case "read":
		d.sentence(n, key, &r.Read)
	case "searched":
		if d.sentence(n, key, &r.Searched); r.Searched != "" && !searchForm.MatchString(r.Searched) {
			d.Fail(n, key, "does not begin with a day", "write the day, the terms and the result, such as `2026-11-28: ...`")
		}
	case "remedy":
		d.sentence(n, key, &r.Remedy)
	case "issues":
		const remedy = "write OWNER/REPOSITORY#NUMBER"
		for _, item := range d.list(n, key, "write a list; "+remedy) {
			if !issueForm.MatchString(item.Value) {
				d.Fail(item, key, yamlfile.Quoted(item.Value)+" is not a public issue", remedy)
			}
			r.Issues = append(r.Issues, item.Value)
		}
	}
}

// ranged parses comparisons. They must be in quotes, because > has another meaning in YAML.
func ranged(d *decoder, n *yaml.Node, key string, parse func(string) (Range, error), remedy string) Range {
	if !yamlfile.IsScalar(n, "!!str") {
		d.Fail(n, key, "is "+yamlfile.Kind(n), remedy)
		return nil
	}
	r, err := parse(yamlfile.Cut(n.Value))
	if err != nil {
		d.Fail(n, key, err.Error(), remedy)
	}
	return r
}

func (d *decoder) sentence(n *yaml.Node, key string, into *string) {
	if !d.Text(n, key, into) {
		return
	}
	if s := *into; strings.TrimSpace(s) == "" || len(s) > maxText || strings.ContainsFunc(s, func(c rune) bool { return !unicode.IsPrint(c) }) {
		d.Fail(n, key, "is not a sentence", fmt.Sprintf("write 1 to %d printable bytes in one line; `>-` folds lines into one", maxText))
	}
}

// list returns the items of a list that must not be empty.
func (d *decoder) list(n *yaml.Node, key, remedy string) []*yaml.Node {
	items, ok := d.Items(n, key, remedy, remedy)
	if ok && len(items) == 0 {
		d.Fail(n, key, "is empty", remedy)
	}
	return items
}

package hazard

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// Error is one mistake in rows: where, what, and the remedy.
type Error struct {
	// File is the name given to Parse; "" from Decode.
	File string
	// Line and Column count from 1; 0 when unknown.
	Line, Column int
	// Key is where in the list: "[2].mes"; "" for the list itself.
	Key     string
	Problem string
	Remedy  string
}

// Error returns "FILE:LINE:COLUMN: KEY: PROBLEM: REMEDY".
func (e *Error) Error() string {
	var b strings.Builder
	if e.File != "" {
		b.WriteString(e.File + ":")
	}
	if e.Line > 0 {
		fmt.Fprintf(&b, "%d:%d:", e.Line, e.Column)
	}
	if b.Len() > 0 {
		b.WriteString(" ")
	}
	if e.Key != "" {
		b.WriteString(e.Key + ": ")
	}
	return b.String() + e.Problem + ": " + e.Remedy
}

// maxErrors bounds how many mistakes Parse tells, maxText a sentence in bytes.
const (
	maxErrors = 20
	maxText   = 600
)

// Parse reads a list of rows: the form of hazards.yaml. name is the file's name in
// errors. The error joins an *Error for each mistake.
func Parse(name string, data []byte) ([]Row, error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	if err == nil {
		if err = dec.Decode(&second); err == nil {
			return nil, &Error{name, second.Line, second.Column, "", "a second YAML document begins here", "keep one document in the file"}
		}
	}
	if !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: not valid YAML: %w: check indentation, colons and quotes there and just above", name, err)
	}
	rows, mistakes := Decode(doc.Content[0])
	if len(mistakes) == 0 {
		return rows, nil
	}
	var errs []error
	for _, e := range mistakes[:min(len(mistakes), maxErrors)] {
		e.File = name
		errs = append(errs, e)
	}
	return nil, errors.Join(errs...)
}

// Decode reads a list of rows in a larger file, and returns every mistake found, in
// the order of the file. The rows are good only without mistakes.
func Decode(list *yaml.Node) ([]Row, []*Error) {
	d := &decoder{ids: map[string]int{}}
	if isNull(list) {
		return nil, nil
	}
	if list.Kind != yaml.SequenceNode {
		d.fail(list, "", "is "+kindOf(list), "write a list, each row beginning with `- id: ...`")
		return nil, d.errs
	}
	var rows []Row
	for i, item := range list.Content {
		rows = append(rows, d.row(item, fmt.Sprintf("[%d]", i)))
	}
	return rows, d.errs
}

type decoder struct {
	errs []*Error
	ids  map[string]int // and the line each is on
}

func (d *decoder) fail(n *yaml.Node, key, problem, remedy string) {
	d.errs = append(d.errs, &Error{Line: n.Line, Column: n.Column, Key: key, Problem: problem, Remedy: remedy})
}

var (
	idForm    = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,63}$`)
	issueForm = regexp.MustCompile(`^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+#[0-9]{1,9}$`)
)

// rowKeys are the keys of a row, in the order the documentation has them.
var rowKeys = []string{
	"id", "gfx", "apu", "kernel", "driver", "mes", "mes_kiq", "mec", "sdma", "mechanisms", "action", "why", "issues", "remedy",
}

// required are the keys no row does without, with what to write.
var required = []struct{ key, remedy string }{
	{"id", "give the row a name of its own, such as site-gfx1100"},
	{"gfx", "list the GPUs it is about, such as [gfx1100] or [gfx11xx]; [gfx*] for all"},
	{"action", "say allow, limit or deny"},
	{"why", "say in a sentence why; it is shown to whoever asks"},
}

func (d *decoder) row(n *yaml.Node, path string) Row {
	r := Row{Mechanisms: slices.Clone(aboutByDefault)}
	if n.Kind != yaml.MappingNode {
		d.fail(n, path, "is "+kindOf(n), "write keys and values, one `key: value` a line")
		return r
	}
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		key := path + "." + shorten(k.Value)
		switch {
		case k.Kind != yaml.ScalarNode:
			d.fail(k, path, "a key is "+kindOf(k), "write a plain word before the colon")
		case !slices.Contains(rowKeys, k.Value):
			d.fail(k, key, "unknown key", "the keys of a row are "+strings.Join(rowKeys, ", "))
		case lines[k.Value] > 0:
			d.fail(k, key, fmt.Sprintf("is given twice, first on line %d", lines[k.Value]), "keep one of them")
		default:
			lines[k.Value] = k.Line
			d.value(&r, k.Value, v, key)
		}
	}
	for _, need := range required {
		if lines[need.key] == 0 {
			d.fail(n, path+"."+need.key, "is missing", need.remedy)
		}
	}
	return r
}

// value reads the value of one key into the row.
func (d *decoder) value(r *Row, name string, n *yaml.Node, key string) {
	switch name {
	case "id":
		if d.text(n, key, &r.ID) {
			first := d.ids[r.ID]
			if !idForm.MatchString(r.ID) {
				d.fail(n, key, quoted(r.ID)+" is no name for a row", "use small letters, digits and dashes")
			} else if first > 0 {
				d.fail(n, key, fmt.Sprintf("%s is the row on line %d too", r.ID, first), "give each row a name of its own")
			}
			d.ids[r.ID] = n.Line
		}
	case "gfx":
		const remedy = "write names such as gfx942, families such as gfx11xx, spans such as gfx1100-gfx1103, or gfx*"
		for _, item := range d.list(n, key, remedy) {
			x, err := parseGFX(item.Value)
			if err != nil {
				d.fail(item, key, err.Error(), remedy)
			}
			r.GFX = append(r.GFX, x)
		}
	case "apu":
		if !isScalar(n, "!!bool") || n.Value != "true" && n.Value != "false" {
			d.fail(n, key, "is "+kindOf(n), "write true or false")
			return
		}
		r.APU = new(n.Value == "true")
	case "kernel":
		r.Kernel = ranged(d, n, key, parseKernel, `write comparisons such as ">=6.5 <7.0"`)
	case "mes":
		r.MES = d.firmware(n, key)
	case "mes_kiq":
		r.MESKIQ = d.firmware(n, key)
	case "mec":
		r.MEC = d.firmware(n, key)
	case "sdma":
		r.SDMA = d.firmware(n, key)
	case "driver":
		d.choice(n, key, []string{InTree, DKMS}, &r.Driver)
	case "action":
		var word string
		d.choice(n, key, []string{"allow", "limit", "deny"}, &word)
		r.Action = Action(max(0, slices.Index(actionNames, word)))
	case "mechanisms":
		r.Mechanisms = nil
		for _, item := range d.list(n, key, "write a list of "+orList(Mechanisms())) {
			var word string
			if d.choice(item, key, Mechanisms(), &word); slices.Contains(r.Mechanisms, word) {
				d.fail(item, key, word+" is given twice", "keep one of them")
			}
			r.Mechanisms = append(r.Mechanisms, word)
		}
	case "why":
		d.sentence(n, key, &r.Why)
	case "remedy":
		d.sentence(n, key, &r.Remedy)
	case "issues":
		const remedy = "write OWNER/REPOSITORY#NUMBER"
		for _, item := range d.list(n, key, "write a list; "+remedy) {
			if !issueForm.MatchString(item.Value) {
				d.fail(item, key, quoted(item.Value)+" is not a public issue", remedy)
			}
			r.Issues = append(r.Issues, item.Value)
		}
	}
}

func (d *decoder) firmware(n *yaml.Node, key string) FirmwareRange {
	return ranged(d, n, key, parseFirmware, `write comparisons such as "=0x83" or ">=0x40 <0x80"; 0 means not known`)
}

// ranged reads comparisons; they are in quotes, as > begins something else in YAML.
func ranged[T any](d *decoder, n *yaml.Node, key string, parse func(string) (T, error), remedy string) T {
	var zero T
	if !isScalar(n, "!!str") {
		d.fail(n, key, "is "+kindOf(n), remedy)
		return zero
	}
	v, err := parse(shorten(n.Value))
	if err != nil {
		d.fail(n, key, err.Error(), remedy)
	}
	return v
}

func (d *decoder) text(n *yaml.Node, key string, into *string) bool {
	if !isScalar(n, "!!str") {
		d.fail(n, key, "is "+kindOf(n), "write a text; put it in quotes if it looks like a number")
		return false
	}
	*into = n.Value
	return true
}

func (d *decoder) sentence(n *yaml.Node, key string, into *string) {
	if !d.text(n, key, into) {
		return
	}
	if s := *into; strings.TrimSpace(s) == "" || len(s) > maxText || strings.ContainsFunc(s, func(c rune) bool { return !unicode.IsPrint(c) }) {
		d.fail(n, key, "is no sentence", fmt.Sprintf("write 1 to %d printable bytes in one line; `>-` folds lines into one", maxText))
	}
}

func (d *decoder) choice(n *yaml.Node, key string, words []string, into *string) {
	switch {
	case !isScalar(n, "!!str"):
		d.fail(n, key, "is "+kindOf(n), "write "+orList(words))
	case !slices.Contains(words, n.Value):
		d.fail(n, key, quoted(n.Value)+" is not known here", "write "+orList(words))
	default:
		*into = n.Value
	}
}

// list returns the texts of a list that has some.
func (d *decoder) list(n *yaml.Node, key, remedy string) []*yaml.Node {
	if n.Kind != yaml.SequenceNode || len(n.Content) == 0 {
		problem := "is " + kindOf(n)
		if n.Kind == yaml.SequenceNode {
			problem = "is empty"
		}
		d.fail(n, key, problem, remedy)
		return nil
	}
	var items []*yaml.Node
	for _, item := range n.Content {
		if !isScalar(item, "!!str") {
			d.fail(item, key, "an item is "+kindOf(item), remedy)
			continue
		}
		items = append(items, item)
	}
	return items
}

func orList(words []string) string {
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}

func isScalar(n *yaml.Node, tag string) bool {
	return n.Kind == yaml.ScalarNode && n.ShortTag() == tag
}

func isNull(n *yaml.Node) bool { return isScalar(n, "!!null") }

// kindOf says what n is, after "is".
func kindOf(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Kind == yaml.AliasNode:
		return "an alias, which this file does not use"
	case isNull(n):
		return "empty"
	default:
		return quoted(n.Value)
	}
}

func quoted(s string) string { return fmt.Sprintf("%q", shorten(s)) }

// shorten keeps what a file says short in an error.
func shorten(s string) string {
	const most = 60
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "..."
	}
	return s
}

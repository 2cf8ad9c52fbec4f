package yamlfile

import (
	"encoding"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/spell"
)

// field is a key of a mapping that is read into a struct.
type field struct {
	name  string
	index []int
	reflect.StructField
}

// fields returns the fields of a struct that have a yaml tag, those of inlined structs included.
func fields(t reflect.Type) (all []field) {
	for f := range t.Fields() {
		name, options, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		switch {
		case options == "inline":
			for _, inner := range fields(f.Type) {
				inner.index = slices.Concat(f.Index, inner.index)
				all = append(all, inner)
			}
		case name != "" && name != "-":
			all = append(all, field{name, f.Index, f})
		}
	}
	return all
}

// Key is a key of a struct's file that holds no keys of its own: a value or a list.
type Key struct {
	// Name is dotted.
	Name  string
	Value reflect.Value
	// Tag has the tags of the field, and those of the structs around it.
	Tag reflect.StructTag
}

// Keys returns the keys of the struct that from points to, in the order of its fields.
func Keys(from any) []Key { return keys("", "", reflect.ValueOf(from).Elem()) }

func keys(path string, outer reflect.StructTag, v reflect.Value) (all []Key) {
	for _, f := range fields(v.Type()) {
		k := Key{join(path, f.name), v.FieldByIndex(f.index), f.Tag + " " + outer}
		if k.Value.Kind() == reflect.Struct {
			all = append(all, keys(k.Name, k.Tag, k.Value)...)
			continue
		}
		all = append(all, k)
	}
	return all
}

// Decode reads n into what into points to, and adds every error. It reads structs, slices, arrays,
// maps of texts, pointers, texts, truth values, numbers, durations, and types with UnmarshalText.
// Keys are the fields with a yaml tag. Their other tags are
//
//	write:"REMEDY"    what to do about a value that cannot be read
//	filled:"REMEDY"   the value, and each value in it, must not be empty; what to do
//	need:"REMEDY"     the key must be given; what to write
//	words:"A,B"       a text is one of these; a number is the index of one
//	range:"MIN MAX"   the bounds of a whole number
//	default:"N"       the whole number of a key that is not given, in items and behind pointers
//	minus:"WORD"      the word for the duration -1
func (p *Parser) Decode(n *yaml.Node, into any) {
	v := reflect.ValueOf(into).Elem()
	p.root = v.Type()
	p.decode(n, "", v, "")
}

func (p *Parser) decode(n *yaml.Node, key string, v reflect.Value, tag reflect.StructTag) {
	if p.Custom != nil && p.Custom(n, key, v.Addr().Interface()) {
		return
	}
	empty := isScalar(n, "!!null")
	if filled := tag.Get("filled"); filled != "" && (empty || n.Kind != yaml.ScalarNode && len(n.Content) == 0 || isScalar(n, "!!str") && n.Value == "") {
		p.Fail(n, key, "is empty", filled)
		return
	}
	kind := v.Kind()
	text, isText := reflect.TypeAssert[encoding.TextUnmarshaler](v.Addr())
	switch {
	case kind == reflect.Struct && !isText:
		p.structure(n, key, v, tag)
		return
	case empty && kind == reflect.Slice && v.Len() == 0: // a list whose items are all comments
		return
	case empty:
		p.Fail(n, key, "has no value", "give one, or remove the key to use the default")
		return
	}
	if isText {
		problem := "is " + Kind(n)
		if isScalar(n, "!!str") {
			err := text.UnmarshalText([]byte(n.Value))
			if err == nil {
				return
			}
			problem = err.Error()
		}
		p.Fail(n, key, problem, tag.Get("write"))
		return
	}
	switch kind {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		p.decode(n, key, v.Elem(), tag)
	case reflect.Slice, reflect.Array:
		p.list(n, key, v, tag)
	case reflect.Map:
		p.named(n, key, v, tag)
	default:
		p.scalar(n, key, v, tag)
	}
}

// remedy is that of the tag, or else another.
func remedy(tag reflect.StructTag, other string) string {
	if write := tag.Get("write"); write != "" {
		return write
	}
	return other
}

func (p *Parser) structure(n *yaml.Node, key string, v reflect.Value, tag reflect.StructTag) {
	all := fields(v.Type())
	var known []string
	for _, f := range all {
		known = append(known, f.name)
		if unset := f.Tag.Get("default"); unset != "" {
			number, _ := strconv.ParseUint(unset, 0, 64) // a test reads each default
			setWhole(v.FieldByIndex(f.index), number)
		}
	}
	given := p.mapping(n, key, known)
	for _, f := range all {
		at := join(key, f.name)
		i := slices.IndexFunc(given, func(e entry) bool { return e.name == f.name })
		if i < 0 {
			if need := f.Tag.Get("need"); need != "" && p.nodes[at] == nil && (n.Kind == yaml.MappingNode || isScalar(n, "!!null")) {
				p.Fail(n, at, "is missing", need)
			}
			continue
		}
		inner := f.Tag
		if filled := tag.Get("filled"); filled != "" && inner.Get("filled") == "" {
			inner += reflect.StructTag(" filled:" + strconv.Quote(filled))
		}
		p.decode(given[i].value, at, v.FieldByIndex(f.index), inner)
	}
}

func (p *Parser) list(n *yaml.Node, key string, v reflect.Value, tag reflect.StructTag) {
	if n.Kind != yaml.SequenceNode {
		p.Fail(n, key, "is "+Kind(n), remedy(tag, "write a list, such as [0, 1] or lines that begin with a dash"))
		return
	}
	if v.Kind() == reflect.Slice {
		v.Set(reflect.Zero(v.Type()))
		if len(n.Content) > 0 {
			v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		}
	} else if v.Len() != len(n.Content) {
		p.Fail(n, key, fmt.Sprintf("has %d items", len(n.Content)), remedy(tag, fmt.Sprintf("write %d", v.Len())))
		return
	}
	for i, item := range n.Content {
		at := fmt.Sprintf("%s[%d]", key, i)
		p.nodes[at] = item
		if v.Type().Elem().Kind() == reflect.String && isScalar(item, "!!int") && tag.Get("words") == "" { // ids stand beside names
			v.Index(i).SetString(item.Value)
			continue
		}
		p.decode(item, at, v.Index(i), tag)
	}
}

// named reads a map, whose keys are texts of the file's author.
func (p *Parser) named(n *yaml.Node, key string, v reflect.Value, tag reflect.StructTag) {
	if n.Kind != yaml.MappingNode {
		p.Fail(n, key, "is "+Kind(n), remedy(tag, "write names and values, such as {NAME: value}"))
		return
	}
	v.Set(reflect.MakeMap(v.Type()))
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, value := n.Content[i], n.Content[i+1]
		if at := member(key, k.Value); p.once(k, value, key, at) {
			item := reflect.New(v.Type().Elem()).Elem()
			p.decode(value, at, item, tag)
			v.SetMapIndex(reflect.ValueOf(k.Value), item)
		}
	}
}

// member returns the key of a name in a map: env.HOME, or pod.labels["a/b"].
func member(key, name string) string {
	if name != "" && strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == "" {
		return key + "." + name
	}
	return key + "[" + Quoted(name) + "]"
}

func (p *Parser) scalar(n *yaml.Node, key string, v reflect.Value, tag reflect.StructTag) {
	problem := "is " + Kind(n)
	if words := tag.Get("words"); words != "" {
		all := strings.Split(words, ",")
		at := slices.Index(all, n.Value)
		switch {
		case !isScalar(n, "!!str"):
		case at < 0:
			problem = Quoted(n.Value) + " is not known here"
		case v.Kind() == reflect.String:
			v.SetString(n.Value)
			return
		default:
			setWhole(v, uint64(at))
			return
		}
		p.Fail(n, key, problem, Choose(n.Value, all))
		return
	}
	var other string
	switch v.Kind() {
	case reflect.String:
		if isScalar(n, "!!str") {
			v.SetString(n.Value)
			return
		}
		other = "write a text; put it in quotes if it looks like a number"
		if list, _, inItem := strings.Cut(key, "["); n.Kind == yaml.SequenceNode && inItem {
			other = "write one text, and another item of " + list + " for another"
		} else if n.Kind == yaml.SequenceNode {
			other = "write one text"
		}
	case reflect.Bool:
		if isScalar(n, "!!bool") && (n.Value == "true" || n.Value == "false") {
			v.SetBool(n.Value == "true")
			return
		}
		other = "write true or false"
	case reflect.Float64:
		if isScalar(n, "!!float") || isScalar(n, "!!int") {
			f, err := strconv.ParseFloat(n.Value, 64)
			if err == nil {
				v.SetFloat(f)
				return
			}
			problem = Cut(n.Value) + " is not a decimal number"
		}
		other = "write a number such as 0.25"
		if percent, err := strconv.ParseFloat(strings.TrimSuffix(n.Value, "%"), 64); err == nil && strings.HasSuffix(n.Value, "%") {
			other = fmt.Sprintf("write %v", percent/100)
		}
	case reflect.Int64:
		if v.Type() != reflect.TypeFor[time.Duration]() {
			panic(fmt.Sprintf("yamlfile: %s is read into a %v", key, v.Type()))
		}
		if word := tag.Get("minus"); word != "" && n.Value == word {
			v.SetInt(-1)
			return
		}
		if problem = duration(n, v); problem == "" {
			return
		}
		other = "write a number with its unit, such as 20ms, 1.5s or 1m"
		if word := tag.Get("minus"); word != "" {
			other += ", or " + word
		}
	default:
		if problem, other = whole(n, v, tag.Get("range")); problem == "" {
			return
		}
	}
	if bare := (&yaml.Node{Kind: yaml.ScalarNode, Value: n.Value}); isScalar(n, "!!str") && v.Kind() != reflect.String && v.Kind() != reflect.Int64 && bare.ShortTag() != "!!str" {
		other = "write it without quotes"
	}
	p.Fail(n, key, problem, remedy(tag, other))
}

// duration reads a duration with its unit, or 0. It returns what is wrong.
func duration(n *yaml.Node, v reflect.Value) (problem string) {
	switch d, err := time.ParseDuration(n.Value); {
	case isScalar(n, "!!float"), isScalar(n, "!!int") && n.Value != "0":
		return Cut(n.Value) + " has no unit"
	case !isScalar(n, "!!str") && !isScalar(n, "!!int"):
		return "is " + Kind(n)
	case err != nil:
		return Quoted(n.Value) + " is not a duration"
	case d < 0:
		return Cut(n.Value) + " is negative"
	default:
		v.SetInt(int64(d))
		return ""
	}
}

// whole reads a whole number, decimal or hexadecimal after 0x. It returns what is wrong, and the remedy.
func whole(n *yaml.Node, v reflect.Value, bounds string) (problem, remedy string) {
	least, most := uint64(0), uint64(math.MaxInt32)
	switch v.Kind() {
	case reflect.Uint64:
		most = math.MaxUint64
	case reflect.Uint32:
		most = math.MaxUint32
	default:
	}
	if bounds != "" {
		if _, err := fmt.Sscan(bounds, &least, &most); err != nil {
			panic("yamlfile: the range " + bounds)
		}
	}
	remedy = fmt.Sprintf("write a whole number from %d to %d", least, most)
	digits, base := n.Value, 10
	if hex, found := strings.CutPrefix(n.Value, "0x"); found {
		digits, base = hex, 16
	}
	switch u, err := strconv.ParseUint(digits, base, 64); {
	case !isScalar(n, "!!int") && !(isScalar(n, "!!float") && err == nil): // more than 64 bits
		return "is " + Kind(n), remedy
	case base == 10 && len(digits) > 1 && digits[0] == '0': // perhaps 0x is missing
		return Cut(n.Value) + " begins with 0", remedy
	case err != nil || u < least || u > most:
		return fmt.Sprintf("%s is outside %d to %d", Cut(n.Value), least, most), remedy
	default:
		setWhole(v, u)
		return "", ""
	}
}

func setWhole(v reflect.Value, u uint64) {
	if v.CanUint() {
		v.SetUint(u)
	} else {
		v.SetInt(int64(u))
	}
}

// Choose returns the remedy for a word that is not among some.
func Choose(word string, words []string) string {
	if near := spell.Nearest(word, words); near != "" {
		return "did you mean " + near + "?"
	}
	return "write " + Or(words)
}

// Or returns "a, b or c".
func Or(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}

// isScalar reports whether n is a scalar of a type such as "!!str".
func isScalar(n *yaml.Node, tag string) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == tag }

// Kind describes n, to follow "is".
func Kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias (*" + Cut(n.Value) + "), which this file does not use"
	default:
	}
	switch tag := n.ShortTag(); tag {
	case "!!str":
		return "the text " + Quoted(n.Value)
	case "!!int", "!!float":
		return "the number " + Cut(n.Value)
	case "!!bool":
		return "the truth value " + Cut(n.Value)
	case "!!null":
		return "empty"
	case "!!timestamp":
		return "the date " + Cut(n.Value)
	default:
		return "of the type " + Cut(tag) + ", which this file does not use"
	}
}

package yamlfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/spell"
)

const (
	// MaxSize bounds a file, in bytes.
	MaxSize = 1 << 20
	// MaxErrors bounds the number of errors that are reported.
	MaxErrors = 50
)

// Parser collects the errors of one file. Not safe for concurrent use.
type Parser struct {
	// Custom reads the values of types with a form of their own; false for others. It may be nil.
	Custom func(n *yaml.Node, key string, into any) bool

	file  string
	errs  Errors
	nodes map[string]*yaml.Node // values by key
	lines map[string]int        // of keys
	root  reflect.Type          // of what is read
}

// New returns a parser. file is the name of the file in errors.
func New(file string) *Parser {
	return &Parser{file: file, nodes: map[string]*yaml.Node{}, lines: map[string]int{}}
}

// Fail adds an error at n, which may be nil.
func (p *Parser) Fail(n *yaml.Node, key, problem, remedy string) {
	e := &Error{File: p.file, Key: key, Problem: problem, Remedy: remedy}
	if n != nil {
		e.Line, e.Column = n.Line, n.Column
	}
	p.errs = append(p.errs, e)
}

// Given reports whether the file has a key.
func (p *Parser) Given(key string) bool { return p.nodes[key] != nil }

// Place adds an error that was found in a value later, at that value or at the section
// that would contain it. It does nothing if the value could not be read, because that
// has been reported, nor after MaxErrors: those are to be fixed first.
func (p *Parser) Place(e *Error) {
	if len(p.errs) > MaxErrors || slices.ContainsFunc(p.errs, func(o *Error) bool { return within(o.Key, e.Key) || within(e.Key, o.Key) }) {
		return
	}
	p.Places().Put(e)
	p.errs = append(p.errs, e)
}

// Place is where a value begins.
type Place struct {
	File         string
	Line, Column int
}

// Places are those of the values in a file, by key.
type Places map[string]Place

// Places returns those of all values that were read.
func (p *Parser) Places() Places {
	all := Places{"": {File: p.file}}
	for key, n := range p.nodes {
		all[key] = Place{p.file, n.Line, n.Column}
	}
	return all
}

// Put sets the place of an error: that of its key, or of the section that would contain it.
func (ps Places) Put(e *Error) {
	at, found := ps[e.Key]
	for key := e.Key; !found && key != ""; at, found = ps[key] {
		key = key[:max(0, strings.LastIndexAny(key, ".["))]
	}
	e.File, e.Line, e.Column = at.File, at.Line, at.Column
}

// within reports whether key is outer or a key inside it.
func within(key, outer string) bool {
	rest, inside := strings.CutPrefix(key, outer)
	return inside && outer != "" && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// Err returns the errors in the order of the file, at most MaxErrors and one that has the
// number of the others; nil without errors.
func (p *Parser) Err() error {
	if len(p.errs) == 0 {
		return nil
	}
	p.errs.Sort()
	if more := len(p.errs) - MaxErrors; more > 0 {
		p.errs = append(p.errs[:MaxErrors], &Error{
			File: p.file, Problem: fmt.Sprintf("%d more errors", more), Remedy: "fix these first",
		})
	}
	return p.errs
}

// Document returns the root of the only YAML document in data, or nil if data is empty.
func (p *Parser) Document(data []byte) *yaml.Node {
	if len(data) > MaxSize {
		p.Fail(nil, "", fmt.Sprintf("the file is larger than %d bytes", MaxSize), "is it the right file?")
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		p.syntax(data, err)
		return nil
	}
	switch err := dec.Decode(&second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		p.syntax(data, err)
	default:
		p.Fail(&second, "", "a second YAML document begins here", "keep one document in the file")
	}
	return doc.Content[0]
}

var (
	yamlLine      = regexp.MustCompile(`^line (\d+): `)
	noSpace       = regexp.MustCompile(`^[ -]*[a-z_]+:[^\s/]\S*$`)
	unknownAnchor = regexp.MustCompile(`^unknown anchor '(.*)' referenced$`)
)

func (p *Parser) syntax(data []byte, err error) {
	problem := strings.TrimPrefix(err.Error(), "yaml: ")
	// The library names no line where it means the first.
	e := &Error{File: p.file, Line: 1, Remedy: "check indentation, colons and quotes there and just above"}
	if m := yamlLine.FindStringSubmatch(problem); m != nil {
		e.Line, _ = strconv.Atoi(m[1])
		problem = problem[len(m[0]):]
	}
	// A glob that begins with * and has no quotes is an alias.
	const quotes = "put a text that begins with * in quotes"
	if m := unknownAnchor.FindStringSubmatch(problem); m != nil {
		e.Remedy = quotes
		if at := bytes.Index(data, []byte("*"+m[1])); at >= 0 {
			e.Line = 1 + bytes.Count(data[:at], []byte("\n"))
			e.Column = 1 + utf8.RuneCount(data[bytes.LastIndexByte(data[:at], '\n')+1:at])
		}
	} else if problem == "did not find expected alphabetic or numeric character" {
		e.Remedy = quotes
	} else {
		lines := strings.Split(string(data), "\n")
		for i := max(e.Line-2, 0); i < min(e.Line, len(lines)); i++ {
			switch {
			case strings.HasPrefix(strings.TrimLeft(lines[i], " "), "\t"):
				e.Line, e.Remedy = i+1, "indent with spaces: a tab is not permitted"
			case noSpace.MatchString(lines[i]):
				e.Line, e.Remedy = i+1, "put a space after the colon that follows a key"
			}
		}
	}
	e.Problem = "not valid YAML: " + Cut(problem)
	p.errs = append(p.errs, e)
}

// entry is one key of a mapping with its value.
type entry struct {
	name  string
	value *yaml.Node
}

// mapping returns the entries of n whose keys are among known, and adds an error for each
// other key. An empty value counts as an empty mapping: a section whose lines are all
// comments.
func (p *Parser) mapping(n *yaml.Node, path string, known []string) (entries []entry) {
	if isScalar(n, "!!null") {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		keys := ""
		if n.Kind == yaml.ScalarNode {
			keys = "; the keys here are " + strings.Join(known, ", ")
		}
		p.Fail(n, path, "is "+Kind(n), "write keys and values, one `key: value` a line"+keys)
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		at := join(path, k.Value)
		if k.Kind == yaml.ScalarNode && !slices.Contains(known, k.Value) {
			p.Fail(k, join(path, Cut(k.Value)), "unknown key", p.belongs(path, k.Value, known))
		} else if p.once(k, v, path, at) {
			entries = append(entries, entry{k.Value, v})
		}
	}
	return entries
}

// once records the value of a key, and adds an error if the key is no text or has one already.
func (p *Parser) once(k, v *yaml.Node, path, at string) bool {
	switch first := p.lines[at]; {
	case !isScalar(k, "!!str"):
		p.Fail(k, path, "a key is "+Kind(k), "write a word before the colon, in quotes if it looks like something else")
	case first > 0:
		p.Fail(k, at, fmt.Sprintf("is given twice, first on line %d", first), "keep one of them")
	default:
		p.nodes[at], p.lines[at] = v, k.Line
		return true
	}
	return false
}

// belongs returns what to do about an unknown key.
func (p *Parser) belongs(path, name string, known []string) string {
	if outer, inner, dotted := strings.Cut(name, "."); dotted && slices.Contains(known, outer) {
		return fmt.Sprintf("write %s: and below it, indented, %s:", outer, Cut(inner))
	}
	if near := spell.Nearest(name, known); near != "" {
		return "did you mean " + near + "?"
	}
	top, _, _ := strings.Cut(path, ".")
	top, _, _ = strings.Cut(top, "[")
	places := owners(p.root, top, "", name)
	if places == nil {
		places = owners(p.root, "", "", name)
	}
	switch {
	case places == nil:
		return "the keys here are " + strings.Join(known, ", ")
	case places[0] == "":
		return "it belongs at the top of the file"
	}
	return "it belongs under " + Or(places)
}

// owners returns the keys, each with its colon, of the mappings in a type in which a name is a key:
// "" for the top. With in, only those inside that key.
func owners(t reflect.Type, in, at, name string) (found []string) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	for _, f := range fields(t) {
		if in != "" && f.name != in {
			continue
		}
		if in == "" && f.name == name {
			found = append(found, at)
		}
		found = append(found, owners(f.Type, "", f.name+":", name)...)
	}
	return found
}

// join returns the key of an entry in the mapping at path.
func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

package yamlfile

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

const (
	// MaxSize bounds a file, in bytes.
	MaxSize = 1 << 20
	// MaxErrors bounds the number of errors that are reported.
	MaxErrors = 50
)

// Parser collects the errors of one file. Not safe for concurrent use.
type Parser struct {
	// Unknown returns the remedy for an unknown key, or "" for that of Mapping. It may be
	// nil.
	Unknown func(path, name string, known []string) string

	file  string
	errs  Errors
	nodes map[string]*yaml.Node // values by key
}

// New returns a parser. file is the name of the file in errors.
func New(file string) *Parser { return &Parser{file: file, nodes: map[string]*yaml.Node{}} }

// Fail adds an error at n, which may be nil.
func (p *Parser) Fail(n *yaml.Node, key, problem, remedy string) {
	e := &Error{File: p.file, Key: key, Problem: problem, Remedy: remedy}
	if n != nil {
		e.Line, e.Column = n.Line, n.Column
	}
	p.errs = append(p.errs, e)
}

// Set records the value of a key, for Place and Given.
func (p *Parser) Set(key string, n *yaml.Node) { p.nodes[key] = n }

// Given reports whether the file has a key.
func (p *Parser) Given(key string) bool { return p.nodes[key] != nil }

// Place adds an error that was found in a value later, at that value or at the section
// that would contain it. It does nothing if the value could not be read, because that
// has been reported.
func (p *Parser) Place(e *Error) {
	if slices.ContainsFunc(p.errs, func(o *Error) bool { return within(o.Key, e.Key) || within(e.Key, o.Key) }) {
		return
	}
	n := p.nodes[e.Key]
	for key := e.Key; n == nil && key != ""; n = p.nodes[key] {
		key = key[:max(0, strings.LastIndexAny(key, ".["))]
	}
	p.Fail(n, e.Key, e.Problem, e.Remedy)
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
	slices.SortStableFunc(p.errs, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
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
	}
	e.Problem = "not valid YAML: " + Cut(problem)
	p.errs = append(p.errs, e)
}

// Entry is one key of a mapping with its value.
type Entry struct {
	Name  string
	Value *yaml.Node
}

// Mapping returns the entries of n whose keys are among known, and adds an error for each
// other key. An empty value counts as an empty mapping: a section whose lines are all
// comments.
func (p *Parser) Mapping(n *yaml.Node, path string, known []string) []Entry {
	if IsNull(n) {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		p.Fail(n, path, "is "+Kind(n), "write keys and values, one `key: value` a line")
		return nil
	}
	lines := map[string]int{}
	var entries []Entry
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		at := Join(path, k.Value)
		switch {
		case k.Kind != yaml.ScalarNode:
			p.Fail(k, path, "a key is "+Kind(k), "write a plain word before the colon")
		case !slices.Contains(known, k.Value):
			p.unknown(k, path, known)
		case lines[k.Value] > 0:
			p.Fail(k, at, fmt.Sprintf("is given twice, first on line %d", lines[k.Value]), "keep one of them")
		default:
			lines[k.Value] = k.Line
			p.nodes[at] = v
			entries = append(entries, Entry{k.Value, v})
		}
	}
	return entries
}

func (p *Parser) unknown(k *yaml.Node, path string, known []string) {
	remedy := ""
	if p.Unknown != nil {
		remedy = p.Unknown(path, k.Value, known)
	}
	if remedy == "" {
		remedy = "the keys here are " + strings.Join(known, ", ")
		if near := Nearest(k.Value, known); near != "" {
			remedy = "did you mean " + near + "?"
		}
	}
	p.Fail(k, Join(path, Cut(k.Value)), "unknown key", remedy)
}

// Join returns the key of an entry in the mapping at path.
func Join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

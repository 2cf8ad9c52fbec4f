package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/hazard"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// maxFile bounds what is read, in bytes: a file of rules is a few kilobytes.
const maxFile = 1 << 20

// maxErrors bounds how many mistakes are told at once.
const maxErrors = 50

// Load reads and parses the file at path. Errors: those of Parse, and when the
// file cannot be read one in which errors.Is finds what the system said, such as
// fs.ErrNotExist.
func Load(path string) (Config, error) {
	f, err := os.Open(path)
	if err != nil {
		remedy := "check the path and its permissions"
		if errors.Is(err, fs.ErrNotExist) {
			remedy = "create it (an empty file means every default) or name another"
		}
		return Config{}, fmt.Errorf("configuration: %w: %s", err, remedy)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return Config{}, fmt.Errorf("configuration: %w: name a regular file", err)
	}
	return Parse(path, data)
}

// Parse reads a configuration; what the file leaves out has its default. name is
// the file's name in errors. The error is an Errors with every mistake found.
func Parse(name string, data []byte) (Config, error) {
	p := &parser{file: name, config: Default(), nodes: map[string]*yaml.Node{}}
	if root := p.document(data); root != nil {
		p.root(root)
	}
	if _, given := p.nodes["discovery.idle_interval"]; !given {
		// Who asks for fewer looks asks for no more when nothing happens.
		d := &p.config.Discovery
		d.IdleInterval = max(d.IdleInterval, d.Interval)
	}
	for _, e := range p.config.problems() {
		p.place(e)
	}
	if len(p.errs) > 0 {
		return Config{}, p.finish()
	}
	p.config.Policy = p.config.Policy.Normalize()
	return p.config, nil
}

// parser collects the configuration and the mistakes of one file.
type parser struct {
	file   string
	config Config
	errs   Errors
	// nodes holds the value of every key met, to tell where a mistake found later is.
	nodes map[string]*yaml.Node
}

func (p *parser) fail(n *yaml.Node, key, problem, remedy string) {
	e := &Error{File: p.file, Key: key, Problem: problem, Remedy: remedy}
	if n != nil {
		e.Line, e.Column = n.Line, n.Column
	}
	p.errs = append(p.errs, e)
}

// place adds a mistake in a value, at that value or at the section it would be in.
// What could not be read has been told of already, with all that is in it.
func (p *parser) place(e *Error) {
	if slices.ContainsFunc(p.errs, func(o *Error) bool { return within(o.Key, e.Key) || within(e.Key, o.Key) }) {
		return
	}
	n := p.nodes[e.Key]
	for key := e.Key; n == nil && key != ""; n = p.nodes[key] {
		key = key[:max(0, strings.LastIndexAny(key, ".["))]
	}
	p.fail(n, e.Key, e.Problem, e.Remedy)
}

// within reports whether key is outer or a key inside it.
func within(key, outer string) bool {
	rest, inside := strings.CutPrefix(key, outer)
	return inside && outer != "" && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

func (p *parser) finish() Errors {
	slices.SortStableFunc(p.errs, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	if more := len(p.errs) - maxErrors; more > 0 {
		p.errs = append(p.errs[:maxErrors], &Error{
			File: p.file, Problem: fmt.Sprintf("%d more mistakes", more), Remedy: "correct these first",
		})
	}
	return p.errs
}

var yamlLine = regexp.MustCompile(`^line (\d+): `)

// document returns the root of the only YAML document, or nil when there is none.
func (p *parser) document(data []byte) *yaml.Node {
	if len(data) > maxFile {
		p.fail(nil, "", fmt.Sprintf("the file is larger than %d bytes", maxFile), "is it the right file?")
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
		p.fail(&second, "", "a second YAML document begins here", "keep one document in the file")
	}
	return doc.Content[0]
}

var unknownAnchor = regexp.MustCompile(`^unknown anchor '(.*)' referenced$`)

func (p *parser) syntax(data []byte, err error) {
	problem := strings.TrimPrefix(err.Error(), "yaml: ")
	e := &Error{File: p.file, Remedy: "check indentation, colons and quotes there and just above"}
	if m := yamlLine.FindStringSubmatch(problem); m != nil {
		e.Line, _ = strconv.Atoi(m[1])
		problem = problem[len(m[0]):]
	}
	// Who forgets the quotes of a glob that begins with * has written an alias.
	const quotes = "put a text that begins with * in quotes"
	if m := unknownAnchor.FindStringSubmatch(problem); m != nil {
		e.Remedy = quotes
		if at := bytes.Index(data, []byte("*"+m[1])); at >= 0 && e.Line == 0 {
			e.Line = 1 + bytes.Count(data[:at], []byte("\n"))
			e.Column = 1 + utf8.RuneCount(data[bytes.LastIndexByte(data[:at], '\n')+1:at])
		}
	} else if problem == "did not find expected alphabetic or numeric character" {
		e.Remedy = quotes
	}
	e.Problem = "not valid YAML: " + cut(problem)
	p.errs = append(p.errs, e)
}

// entry is one key of a mapping with its value.
type entry struct {
	name       string
	key, value *yaml.Node
}

// mapping returns the entries of n whose keys are among known, and tells of the
// others. An empty value counts as an empty mapping: what is in a section whose
// lines are all commented out.
func (p *parser) mapping(n *yaml.Node, path string, known []string) []entry {
	if isNull(n) {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		p.fail(n, path, "is "+kindOf(n), "write keys and values, one `key: value` a line")
		return nil
	}
	lines := map[string]int{}
	var entries []entry
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		at := join(path, k.Value)
		switch {
		case k.Kind != yaml.ScalarNode:
			p.fail(k, path, "a key is "+kindOf(k), "write a plain word before the colon")
		case !slices.Contains(known, k.Value):
			p.unknown(k, path, known)
		case lines[k.Value] > 0:
			p.fail(k, at, fmt.Sprintf("is given twice, first on line %d", lines[k.Value]), "keep one of them")
		default:
			lines[k.Value] = k.Line
			p.nodes[at] = v
			entries = append(entries, entry{k.Value, k, v})
		}
	}
	return entries
}

func (p *parser) unknown(k *yaml.Node, path string, known []string) {
	remedy := "the keys here are " + strings.Join(known, ", ")
	if place := placeInRule(path, k.Value); place != "" {
		remedy = place
	} else if outer, inner, dotted := strings.Cut(k.Value, "."); dotted && slices.Contains(known, outer) {
		remedy = fmt.Sprintf("write %s: and below it, further in, %s:", outer, cut(inner))
	} else if near := nearest(k.Value, known); near != "" {
		remedy = "did you mean " + near + "?"
	} else if i := slices.IndexFunc(keys, func(key string) bool { return strings.HasSuffix("."+key, "."+k.Value) }); i >= 0 {
		remedy = "it belongs at the top of the file"
		if s := section(keys[i]); s != "" {
			remedy = "it belongs under " + s + ":"
		}
	}
	p.fail(k, join(path, cut(k.Value)), "unknown key", remedy)
}

func (p *parser) root(n *yaml.Node) {
	for _, e := range p.mapping(n, "", children("")) {
		switch {
		case e.name == "rules":
			p.rules(e.value)
		case e.name == "safety":
			p.safety(e.value)
		case sections[e.name] != "":
			p.section(e.name, e.value)
		default:
			p.field(e.name, e.value)
		}
	}
}

func (p *parser) section(name string, n *yaml.Node) {
	entries := p.mapping(n, name, children(name))
	if name == "policy" {
		// A preset sets every knob: it goes first, wherever it stands.
		if i := slices.IndexFunc(entries, func(e entry) bool { return e.name == "preset" }); i >= 0 {
			p.preset(entries[i].value)
			entries = slices.Delete(entries, i, i+1)
		}
	}
	for _, e := range entries {
		p.field(join(name, e.name), e.value)
	}
}

func (p *parser) preset(n *yaml.Node) {
	const key = policyPrefix + "preset"
	var name string
	if !p.value(n, key, &name) {
		return
	}
	policy, err := scheduler.PresetByName(name)
	if err != nil {
		remedy := "choose one of " + strings.Join(scheduler.PresetNames(), ", ")
		if name == scheduler.PresetCustom {
			remedy = "name the preset to begin from, then the knobs that differ; " + remedy
		} else if near := nearest(name, scheduler.PresetNames()); near != "" {
			remedy = "did you mean " + near + "?"
		}
		p.fail(n, key, quoted(name)+" is no preset", remedy)
		return
	}
	p.config.Policy = policy
}

func (p *parser) field(key string, n *yaml.Node) {
	i := slices.IndexFunc(fields, func(f field) bool { return f.key == key })
	p.value(n, key, fields[i].at(&p.config))
}

// safety reads the rows of hazards in the table's own form, and tells of mistakes
// in them as of others.
func (p *parser) safety(n *yaml.Node) {
	for _, e := range p.mapping(n, "safety", children("safety")) {
		rows, mistakes := hazard.Decode(e.value)
		p.config.Safety.Hazards = rows
		for _, m := range mistakes {
			p.errs = append(p.errs, &Error{
				File: p.file, Line: m.Line, Column: m.Column, Key: "safety.hazards" + m.Key, Problem: m.Problem, Remedy: m.Remedy,
			})
		}
	}
}

// children lists the keys of a section, or those at the top for "".
func children(parent string) []string {
	var names []string
	for _, key := range keys {
		name := key
		switch s := section(key); {
		case s == parent:
			name = strings.TrimPrefix(name, parent+".")
		case parent == "":
			name = s
		default:
			continue
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

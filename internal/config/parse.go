package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/regular"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Load reads and parses the file at path. It returns the errors of Parse, or wraps the
// system's error, such as fs.ErrNotExist.
func Load(path string) (Config, error) {
	data, err := regular.ReadSoon(path, yamlfile.MaxSize)
	if err != nil {
		remedy := "check the path and its permissions"
		switch {
		case errors.Is(err, fs.ErrNotExist):
			remedy = "create it (an empty file has every default) or name another file"
		case errors.Is(err, regular.ErrKind), errors.Is(err, regular.ErrSize), errors.Is(err, os.ErrDeadlineExceeded):
			remedy = "name a regular file of this host"
		}
		return Config{}, fmt.Errorf("configuration: %w: %s", err, remedy)
	}
	return Parse(path, data)
}

// Parse parses a configuration; keys that the file does not have have their defaults.
// name is the file's name in errors. The error is a yamlfile.Errors with every error in
// the file.
func Parse(name string, data []byte) (Config, error) { return parse(name, data, Default()) }

func parse(name string, data []byte, defaults Config) (Config, error) {
	p := &parser{Parser: yamlfile.New(name), config: defaults}
	p.Unknown = unknownKey
	if root := p.Document(data); root != nil {
		p.root(root)
	}
	for _, e := range p.config.problems() {
		p.Place(e)
	}
	if err := p.Err(); err != nil {
		return Config{}, err
	}
	p.config.Policy = p.config.Policy.Normalize()
	leases := &p.config.Limits.Leases
	leases.LeasesPerClient = (leases.LeasesPerUser + 1) / 2 // a server has one for each request in flight
	return p.config, nil
}

// parser collects the configuration and the errors of one file.
type parser struct {
	*yamlfile.Parser
	config Config
}

// unknownKey returns where an unknown key belongs.
func unknownKey(path, name string, known []string) string {
	if place := placeInRule(path, name); place != "" {
		return place
	}
	if outer, inner, dotted := strings.Cut(name, "."); dotted && slices.Contains(known, outer) {
		return fmt.Sprintf("write %s: and below it, indented, %s:", outer, yamlfile.Cut(inner))
	}
	if yamlfile.Nearest(name, known) != "" {
		return ""
	}
	i := slices.IndexFunc(keys, func(key string) bool { return strings.HasSuffix("."+key, "."+name) })
	switch {
	case i < 0:
		return ""
	case section(keys[i]) != "":
		return "it belongs under " + section(keys[i]) + ":"
	}
	return "it belongs at the top of the file"
}

func (p *parser) root(n *yaml.Node) {
	for _, e := range p.Mapping(n, "", children("")) {
		switch {
		case e.Name == "rules":
			p.rules(e.Value)
		case e.Name == "jobs":
			p.jobs(e.Value)
		case e.Name == "safety":
			p.safety(e.Value)
		case children(e.Name) != nil:
			p.section(e.Name, e.Value)
		default:
			p.field(e.Name, e.Value)
		}
	}
}

func (p *parser) section(name string, n *yaml.Node) {
	entries := p.Mapping(n, name, children(name))
	if name == "policy" {
		// The preset sets every knob, so it is read first.
		if i := slices.IndexFunc(entries, func(e yamlfile.Entry) bool { return e.Name == "preset" }); i >= 0 {
			p.preset(entries[i].Value)
			entries = slices.Delete(entries, i, i+1)
		}
	}
	for _, e := range entries {
		p.field(yamlfile.Join(name, e.Name), e.Value)
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
			remedy = "name the preset to start from, then the knobs that differ; " + remedy
		} else if near := yamlfile.Nearest(name, scheduler.PresetNames()); near != "" {
			remedy = "did you mean " + near + "?"
		}
		p.Fail(n, key, yamlfile.Quoted(name)+" is not a preset", remedy)
		return
	}
	p.config.Policy = policy
}

func (p *parser) field(key string, n *yaml.Node) {
	i := slices.IndexFunc(fields, func(f field) bool { return f.key == key })
	p.value(n, key, fields[i].at(&p.config))
}

// safety reads the rows of hazards.
func (p *parser) safety(n *yaml.Node) {
	for _, e := range p.Mapping(n, "safety", children("safety")) {
		p.config.Safety.Hazards = safety.Decode(p.Parser, e.Value, "safety.hazards")
	}
}

// children returns the keys of a section, or those at the top for "".
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

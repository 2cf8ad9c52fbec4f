package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/regular"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/internal/spell"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Load reads and parses the file at path. It returns the errors of Parse, or wraps the
// system's error, such as fs.ErrNotExist. An empty file is an error: it may be half written.
func Load(path string) (Config, error) {
	data, err := regular.ReadSoon(path, yamlfile.MaxSize)
	if err != nil {
		remedy := "check the path and its permissions"
		switch {
		case errors.Is(err, fs.ErrNotExist):
			remedy = "write one: gpreemptd config default > FILE"
		case errors.Is(err, regular.ErrKind), errors.Is(err, regular.ErrSize), errors.Is(err, os.ErrDeadlineExceeded):
			remedy = "name a regular file of this host"
		}
		return Config{}, fmt.Errorf("configuration: %w: %s", err, remedy)
	}
	if len(data) == 0 { // as while an editor, or a disk that is full, has truncated it
		return Config{}, fmt.Errorf("configuration: %s is empty: write it, and a comment alone for every default", path)
	}
	return Parse(path, data)
}

// Parse parses a configuration; keys that the file does not have have their defaults.
// name is the file's name in errors. The error is a yamlfile.Errors with every error in
// the file.
func Parse(name string, data []byte) (Config, error) { return parse(name, data, Default()) }

func parse(name string, data []byte, c Config) (Config, error) {
	p := yamlfile.New(name)
	p.Custom = func(n *yaml.Node, key string, into any) bool {
		r, ok := into.(*gpreempt.Resistance)
		if ok {
			onResist(p, n, key, r)
		}
		return ok
	}
	if root := p.Document(data); root != nil {
		preset(p, root, &c.Policy)
		p.Decode(root, &c)
	}
	safety.Check(p, "safety.hazards", c.Safety.Hazards)
	for _, e := range c.problems() {
		p.Place(e)
	}
	if err := p.Err(); err != nil {
		return Config{}, err
	}
	c.Policy, c.Places = c.Policy.Normalize(), p.Places()
	leases := &c.Limits.Leases
	leases.LeasesPerClient = (leases.LeasesPerUser + 1) / 2 // a server has one for each request in flight
	return c, nil
}

// preset sets the policy to the preset of the file, which sets every knob and is therefore read
// first.
func preset(p *yamlfile.Parser, root *yaml.Node, into *scheduler.Policy) {
	n := value(value(root, "policy"), "preset")
	if n == nil || n.Kind != yaml.ScalarNode || n.ShortTag() != "!!str" {
		return // Decode reports what it is
	}
	policy, err := scheduler.PresetByName(n.Value)
	if err != nil {
		remedy := "choose one of " + strings.Join(scheduler.PresetNames(), ", ")
		if n.Value == scheduler.PresetCustom {
			remedy = "name the preset to start from, then the knobs that differ; " + remedy
		} else if near := spell.Nearest(n.Value, scheduler.PresetNames()); near != "" {
			remedy = "did you mean " + near + "?"
		}
		p.Fail(n, "policy.preset", yamlfile.Quoted(n.Value)+" is not a preset", remedy)
		return
	}
	*into = policy
}

// value returns the value of a key in a mapping; nil without one.
func value(mapping *yaml.Node, name string) *yaml.Node {
	if mapping == nil || mapping.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == name {
			return mapping.Content[i+1]
		}
	}
	return nil
}

// onResist reads what is done about a process that resists: a word, or the number of refusals.
func onResist(p *yamlfile.Parser, n *yaml.Node, key string, into *gpreempt.Resistance) {
	after, err := 0, error(nil)
	if kill := value(n, "kill"); kill != nil && len(n.Content) == 2 {
		after, err = strconv.Atoi(kill.Value)
	}
	switch {
	case n.Value == "report":
	case n.Value == "stop":
		into.Stop = true
	case err == nil && after >= 1 && after <= 1000:
		into.KillAfter = after
	default:
		p.Fail(n, key, "is "+yamlfile.Kind(n), "write report, stop, or {kill: N}, with the number of refused suspensions, 1 to 1000")
	}
}

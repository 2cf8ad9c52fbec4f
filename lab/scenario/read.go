package scenario

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/regular"
)

// Read reads and parses the file at path, and the traces that it names. The error is that of
// Parse or Load, or wraps the system's, such as fs.ErrNotExist.
func Read(path string) (Scenario, error) {
	data, err := regular.Read(path, yamlfile.MaxSize)
	if err != nil {
		return Scenario{}, fmt.Errorf("scenario: %w: name a scenario of the library or a YAML file", err)
	}
	s, err := Parse(path, data)
	if err != nil {
		return Scenario{}, err
	}
	return s, s.Load(filepath.Dir(path))
}

// Parse parses a scenario. name is the file's name in errors. The error is a yamlfile.Errors
// with every error in the file. Arrivals of a trace have no requests before Load.
func Parse(name string, data []byte) (Scenario, error) {
	p := yamlfile.New(name)
	s := Scenario{GPUs: 1}
	root := p.Document(data)
	switch {
	case p.Err() != nil: // no YAML
	case root == nil || root.ShortTag() == "!!null":
		p.Fail(nil, "", "the file is empty", "begin with `version: 1` and `name: ...`; docs/reference/scenarios.md has the format")
	default:
		if p.Decode(root, &s); p.Err() != nil {
			break // what is missing because of that needs no error
		}
		s.Normalize()
		for _, e := range s.problems() {
			p.Place(e)
		}
	}
	if err := p.Err(); err != nil {
		return Scenario{}, err
	}
	return s, nil
}

// YAML returns the scenario as a file that Parse reads: the one as it is run, with the figures
// of its models and with its defaults.
func (s Scenario) YAML() ([]byte, error) { return yaml.Marshal(s) }

// Load reads the traces of all arrivals. Paths that are not absolute are relative to dir. The
// error names the file, and the line.
func (s *Scenario) Load(dir string) error {
	for _, a := range s.arrivals() {
		if a.Kind != Trace || a.Points != nil {
			continue
		}
		path := a.Trace
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		points, err := readTrace(path)
		if err != nil {
			return err
		}
		a.Points = points
	}
	return s.needTokens()
}

// UseTrace replaces the arrivals of every service with LLM by the trace at path, slower or faster
// so that the mean rate remains that of the arrivals before.
func (s *Scenario) UseTrace(path string) error {
	points, err := readTrace(path)
	if err != nil {
		return err
	}
	found := false
	for i := range s.Online {
		if o := &s.Online[i]; o.LLM != nil {
			speed := cmp.Or(o.Arrivals.Speed, 1)
			if length := points[len(points)-1].At; o.Arrivals.Rate > 0 && length > 0 {
				speed = o.Arrivals.Rate * length.Seconds() / float64(len(points))
			}
			o.Arrivals = Arrivals{Kind: Trace, Trace: path, Speed: speed, Points: points}
			found = true
		}
	}
	if !found {
		return fmt.Errorf("scenario %s has no service with llm: to replay a trace elsewhere, write arrivals: {kind: trace, trace: %s}", s.Name, path)
	}
	return s.needTokens()
}

// needTokens returns an error when neither a trace nor its service says how many tokens a
// request has.
func (s *Scenario) needTokens() error {
	for i, o := range s.Online {
		if o.LLM == nil || o.Arrivals.Kind != Trace || o.LLM.PromptTokens > 0 && o.LLM.OutputTokens > 0 {
			continue
		}
		if n := slices.IndexFunc(o.Arrivals.Points, func(a Arrival) bool { return a.Prompt == 0 || a.Output == 0 }); n >= 0 {
			return &yamlfile.Error{
				Key:     fmt.Sprintf("online[%d].llm", i),
				Problem: fmt.Sprintf("request %d of the trace %s has no tokens", n+1, o.Arrivals.Trace),
				Remedy:  "set prompt_tokens and output_tokens, for the requests without their own",
			}
		}
	}
	return nil
}

// arrivals returns all arrivals, of services and jobs.
func (s *Scenario) arrivals() []*Arrivals {
	var all []*Arrivals
	for i := range s.Online {
		all = append(all, &s.Online[i].Arrivals)
	}
	for i := range s.Offline {
		if a := s.Offline[i].Arrivals; a != nil {
			all = append(all, a)
		}
	}
	return all
}

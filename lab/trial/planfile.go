package trial

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/regular"
)

//go:embed plans/*.yaml
var planFiles embed.FS

// PlanNames returns the names of the plans that gpreempt brings, sorted.
func PlanNames() []string {
	files, err := fs.Glob(planFiles, "plans/*.yaml")
	if err != nil {
		panic(err) // the pattern is invalid
	}
	for i, file := range files {
		files[i] = strings.TrimSuffix(path.Base(file), ".yaml")
	}
	return files
}

// ReadPlan returns the text of a plan by its name, or of the file at a path: a text with a slash
// or the ending .yaml is a path. file is the name of the file for Parse.
func ReadPlan(nameOrPath string) (file string, text []byte, err error) {
	if strings.Contains(nameOrPath, "/") || strings.HasSuffix(nameOrPath, ".yaml") {
		if text, err = regular.Read(nameOrPath, yamlfile.MaxSize); err != nil {
			return "", nil, fmt.Errorf("cannot read the plan: %w", err)
		}
		return nameOrPath, text, nil
	}
	if text, err = planFiles.ReadFile("plans/" + nameOrPath + ".yaml"); err != nil {
		return "", nil, fmt.Errorf("there is no plan %q: use %s, or the path of a YAML file", nameOrPath, yamlfile.Or(PlanNames()))
	}
	return nameOrPath + ".yaml", text, nil
}

// planFile is the file of a plan.
type planFile struct {
	Version int `yaml:"version" need:"write version: 1"`
	Plan    `yaml:",inline"`
}

// Parse parses a plan, without checking whether it is complete: see Check. name is the file's
// name in errors. The error is a yamlfile.Errors with every error in the file.
func Parse(name string, data []byte) (Plan, error) {
	p := yamlfile.New(name)
	var file planFile
	if root := p.Document(data); root != nil {
		p.Decode(root, &file)
	} else if p.Err() == nil {
		p.Fail(nil, "", "it is empty", "write version, name and the work")
	}
	if file.Version != Version {
		p.Place(&yamlfile.Error{Key: "version", Problem: fmt.Sprintf("version %d is not known", file.Version), Remedy: fmt.Sprintf("this gplab reads version %d", Version)})
	}
	if err := p.Err(); err != nil {
		return Plan{}, err
	}
	return file.Plan, nil
}

// YAML returns the plan as a file that Parse reads.
func (p *Plan) YAML() string {
	text, err := yaml.Marshal(planFile{Version, *p})
	if err != nil {
		panic("trial: " + err.Error()) // every plan can be written
	}
	return string(text)
}

// Check sets the defaults of a plan and returns its errors, as a yamlfile.Errors.
func (p *Plan) Check() error {
	p.Normalize()
	var errs yamlfile.Errors
	for _, e := range p.problems() {
		errs = append(errs, &yamlfile.Error{Key: e.key, Problem: e.problem, Remedy: e.remedy})
	}
	if errs == nil {
		return nil
	}
	return errs
}

package scenario

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/spell"
)

//go:embed library/*.yaml
var library embed.FS

// Library returns the scenarios that gpreempt has, by name. They need no other file.
func Library() []Scenario {
	var all []Scenario
	for _, name := range names() {
		s, err := ByName(name)
		if err != nil {
			panic("scenario: " + err.Error()) // a test reads all of them
		}
		all = append(all, s)
	}
	return all
}

// ByName returns a scenario of the library. The error names one with a similar name.
func ByName(name string) (Scenario, error) {
	file := path.Join("library", name+".yaml")
	data, err := fs.ReadFile(library, file)
	if err != nil {
		remedy := "gplab sim list shows them"
		if near := spell.Nearest(name, names()); near != "" {
			remedy = "did you mean " + near + "?"
		}
		return Scenario{}, fmt.Errorf("the library has no scenario %s: %s", yamlfile.Quoted(name), remedy)
	}
	return Parse(file, data)
}

// names returns the names of the library, sorted.
func names() []string {
	entries, err := fs.ReadDir(library, "library")
	if err != nil {
		panic("scenario: " + err.Error()) // embedded
	}
	var all []string
	for _, e := range entries {
		all = append(all, strings.TrimSuffix(e.Name(), ".yaml"))
	}
	return all
}

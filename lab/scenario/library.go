package scenario

import (
	"embed"
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

// UnknownError says that the library has no scenario of a name. Near is the most similar one that it has, "" for none.
type UnknownError struct{ Name, Near string }

func (e *UnknownError) Error() string {
	return "the library has no scenario " + yamlfile.Quoted(e.Name)
}

// ByName returns a scenario of the library, or an UnknownError.
func ByName(name string) (Scenario, error) {
	file := path.Join("library", name+".yaml")
	data, err := fs.ReadFile(library, file)
	if err != nil {
		return Scenario{}, &UnknownError{Name: name, Near: spell.Nearest(name, names())}
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

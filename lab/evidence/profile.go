package evidence

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/regular"
)

// profileVersion is the version of the format of profiles.
const profileVersion = 1

// DefaultProfile is the name of the profile that is used when no other is chosen, and NoProfile that of
// none: no verdict.
const (
	DefaultProfile = "default"
	NoProfile      = "none"
)

// DefaultProfileOf is DefaultProfile, or that of an emulated machine, whose high percentiles say
// something about this host only.
func DefaultProfileOf(origin Origin) string {
	if origin == Emulated {
		return string(Emulated)
	}
	return DefaultProfile
}

// Profile is a set of limits for the figures of a run.
type Profile struct {
	Name  string
	About string
	// Limits by the name of a criterion: see Criteria.
	Limits map[string]float64
}

//go:embed profiles/*.yaml
var profileFiles embed.FS

// ProfileNames returns the names of the profiles that gpreempt brings, sorted.
func ProfileNames() []string {
	files, err := fs.Glob(profileFiles, "profiles/*.yaml")
	if err != nil {
		panic(err) // the pattern is invalid
	}
	for i, file := range files {
		files[i] = strings.TrimSuffix(path.Base(file), ".yaml")
	}
	slices.Sort(files) // "-" is before "."
	return files
}

// LoadProfile returns a profile by its name, or from a file: a text with a slash or the ending
// .yaml is a path.
func LoadProfile(nameOrPath string) (Profile, error) {
	if strings.Contains(nameOrPath, "/") || strings.HasSuffix(nameOrPath, ".yaml") {
		text, err := regular.Read(nameOrPath, yamlfile.MaxSize)
		if err != nil {
			return Profile{}, fmt.Errorf("cannot read the profile: %w", err)
		}
		return ParseProfile(nameOrPath, text)
	}
	text, err := profileFiles.ReadFile("profiles/" + nameOrPath + ".yaml")
	if errors.Is(err, fs.ErrNotExist) {
		return Profile{}, fmt.Errorf("there is no profile %q: use %s, or the path of a YAML file", nameOrPath, yamlfile.Or(ProfileNames()))
	}
	if err != nil {
		return Profile{}, err
	}
	return ParseProfile(nameOrPath+".yaml", text)
}

// ParseProfile parses a profile. name is the file's name in errors. The error is a
// yamlfile.Errors with every error in the file.
func ParseProfile(name string, data []byte) (Profile, error) {
	p := yamlfile.New(name)
	var file struct {
		Version int                `yaml:"version" need:"write version: 1"`
		Name    string             `yaml:"name" need:"write a name"`
		About   string             `yaml:"about"`
		Limits  map[string]float64 `yaml:"limits" need:"write at least one limit"`
	}
	if root := p.Document(data); root != nil {
		p.Decode(root, &file)
	} else {
		p.Fail(nil, "", "it is empty", "write version, name and limits")
	}
	fail := func(key, problem, remedy string) {
		p.Place(&yamlfile.Error{Key: key, Problem: problem, Remedy: remedy})
	}
	if file.Version != profileVersion {
		fail("version", fmt.Sprintf("version %d is not known", file.Version), fmt.Sprintf("this gplab reads version %d", profileVersion))
	}
	known := slices.Sorted(maps.Keys(criteria))
	if len(file.Limits) == 0 {
		fail("limits", "is empty", "write at least one of "+yamlfile.Or(known))
	}
	for limit, v := range file.Limits {
		if c, ok := criteria[limit]; !ok {
			fail("limits."+limit, "unknown key", yamlfile.Choose(limit, known))
		} else if !finite(v) || v <= 0 {
			fail("limits."+limit, fmt.Sprintf("is the number %v", v), "write a number above 0 in "+c.unit)
		}
	}
	if err := p.Err(); err != nil {
		return Profile{}, err
	}
	return Profile{file.Name, file.About, file.Limits}, nil
}

// CriterionHelp describes a criterion that a profile may have a limit for.
type CriterionHelp struct {
	Name, Unit, Meaning string
	// AtLeast: the limit is the least value; otherwise the figure must be below it.
	AtLeast bool
}

// Criteria describes all criteria, sorted by name.
func Criteria() []CriterionHelp {
	var all []CriterionHelp
	for _, name := range slices.Sorted(maps.Keys(criteria)) {
		c := criteria[name]
		all = append(all, CriterionHelp{name, c.unit, c.meaning, c.atLeast})
	}
	return all
}

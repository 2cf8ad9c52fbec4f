package evidence

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/regular"
)

// profileVersion is the version of the format of profiles.
const profileVersion = 1

// DefaultProfile is the name of the profile that is used when no other is chosen.
const DefaultProfile = "default"

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
	profile := Profile{Limits: map[string]float64{}}
	root := p.Document(data)
	if root == nil {
		p.Fail(nil, "", "it is empty", "write version, name and limits")
		return Profile{}, p.Err()
	}
	for _, e := range p.Mapping(root, "", []string{"version", "name", "about", "limits"}) {
		switch e.Name {
		case "version":
			if v, ok := p.Unsigned(e.Value, e.Name, 1<<16); ok && v != profileVersion {
				p.Fail(e.Value, e.Name, fmt.Sprintf("version %d is not known", v), fmt.Sprintf("this gplab reads version %d", profileVersion))
			}
		case "name":
			p.Text(e.Value, e.Name, &profile.Name)
		case "about":
			p.Text(e.Value, e.Name, &profile.About)
		case "limits":
			for _, limit := range p.Mapping(e.Value, e.Name, slices.Sorted(maps.Keys(criteria))) {
				key := yamlfile.Join(e.Name, limit.Name)
				v, err := strconv.ParseFloat(limit.Value.Value, 64)
				if !yamlfile.IsScalar(limit.Value, "!!int") && !yamlfile.IsScalar(limit.Value, "!!float") || err != nil || !finite(v) || v <= 0 {
					p.Fail(limit.Value, key, "is "+yamlfile.Kind(limit.Value), "write a number above 0 in "+criteria[limit.Name].unit)
					continue
				}
				profile.Limits[limit.Name] = v
			}
		}
	}
	for key, remedy := range map[string]string{
		"version": fmt.Sprintf("write version: %d", profileVersion), "name": "write a name", "limits": "write at least one limit",
	} {
		if !p.Given(key) {
			p.Fail(root, key, "is missing", remedy)
		}
	}
	if len(profile.Limits) == 0 && p.Err() == nil {
		p.Fail(root, "limits", "is empty", "write at least one of "+yamlfile.Or(slices.Sorted(maps.Keys(criteria))))
	}
	if err := p.Err(); err != nil {
		return Profile{}, err
	}
	return profile, nil
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

package main

import (
	"fmt"
	"regexp"
	"strings"
)

// described matches the output of git describe --tags --dirty: the tag, the commits since
// and the commit's short name if it is not the tag's.
var described = regexp.MustCompile(`^v([0-9]+\.[0-9]+\.[0-9]+)(?:-([0-9A-Za-z.]+))??(?:-([0-9]+)-(g[0-9a-f]+))?(-dirty)?$`)

// packageVersion returns the version of the packages, in a form that dpkg and rpm order as
// Semantic Versioning does, with the commits after a tag behind it:
//
//	v1.2.0-rc.1  1.2.0~rc.1      v1.2.0-5-gabc1234  1.2.0+5.gabc1234
//	v1.2.0       1.2.0           v1.2.0-dirty       1.2.0+0.dirty
//
// A commit without an earlier tag, whose version is its name, is before all tags, ordered by
// the number of commits up to it.
func packageVersion(version string, commits int) (string, error) {
	m := described.FindStringSubmatch(version)
	if m == nil {
		name, dirty := strings.CutSuffix(version, "-dirty")
		if !regexp.MustCompile(`^[0-9a-z]+$`).MatchString(name) {
			return "", fmt.Errorf("version %q is neither a tag vMAJOR.MINOR.PATCH[-PRERELEASE] with the suffix of git describe nor a commit", version)
		}
		out := fmt.Sprintf("0.0.0+%d.g%s", commits, name)
		if dirty {
			out += ".dirty"
		}
		return out, nil
	}
	out := m[1]
	if m[2] != "" {
		out += "~" + m[2]
	}
	switch {
	case m[3] != "":
		out += "+" + m[3] + "." + m[4]
	case m[5] != "":
		out += "+0"
	}
	if m[5] != "" {
		out += ".dirty"
	}
	return out, nil
}

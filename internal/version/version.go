// Package version hides where the version of a binary comes from.
package version

import "runtime/debug"

// Version is the released version, such as "v0.3.0", set when linking:
//
//	go build -ldflags "-X github.com/gpreempt/gpreempt/internal/version.Version=v0.3.0"
//
// Empty in other builds; read it through String.
var Version string

// String returns Version; else the commit the binary was built from, as
// "devel-0123456789ab", with "-dirty" when files had changed; else "devel".
func String() string {
	if Version != "" {
		return Version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	return fromBuild(info.Settings)
}

func fromBuild(settings []debug.BuildSetting) string {
	var revision, dirty string
	for _, s := range settings {
		switch {
		case s.Key == "vcs.revision" && s.Value != "":
			revision = "-" + s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "-dirty"
		}
	}
	if revision == "" {
		return "devel"
	}
	return "devel" + revision + dirty
}

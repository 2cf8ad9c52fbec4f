package api

import "runtime/debug"

// Version is the released version, such as "v0.3.0", set when linking:
//
//	go build -ldflags "-X github.com/gpreempt/gpreempt/internal/api.Version=v0.3.0"
//
// It is empty in other builds; VersionString describes those too.
var Version string

// VersionString returns Version; without one, the commit the binary was built
// from, as "devel-0123456789ab", with "-dirty" when files had changed; without
// that, "devel".
func VersionString() string {
	if Version != "" {
		return Version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	return versionOf(info.Settings)
}

// versionOf returns the version of a build that was not released.
func versionOf(settings []debug.BuildSetting) string {
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

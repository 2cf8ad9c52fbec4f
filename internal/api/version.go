package api

import "runtime/debug"

// Version is the released version, such as "v0.3.0", set when linking:
//
//	go build -ldflags "-X github.com/gpreempt/gpreempt/internal/api.Version=v0.3.0"
//
// It is empty in other builds; VersionString describes those too.
var Version string

// VersionString returns Version; without one, the version that go build has derived from the commit,
// with "+dirty" when files had changed; without that, "devel".
func VersionString() string {
	if Version != "" {
		return Version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "devel"
}

package api

import (
	"runtime/debug"
	"testing"
)

func TestLinkedVersionWins(t *testing.T) {
	Version = "v1.2.3"
	defer func() { Version = "" }()
	if got := VersionString(); got != "v1.2.3" {
		t.Errorf("VersionString() = %q, want v1.2.3", got)
	}
}

func TestBuildRevisionNamesTheCommit(t *testing.T) {
	const rev = "0123456789abcdef0123456789abcdef01234567"
	tests := []struct {
		name     string
		settings []debug.BuildSetting
		want     string
	}{
		{"no vcs", nil, "devel"},
		{"clean", []debug.BuildSetting{{Key: "vcs.revision", Value: rev}, {Key: "vcs.modified", Value: "false"}}, "devel-0123456789ab"},
		{"changed", []debug.BuildSetting{{Key: "vcs.modified", Value: "true"}, {Key: "vcs.revision", Value: rev}}, "devel-0123456789ab-dirty"},
		{"short", []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}}, "devel-abc"},
	}
	for _, tt := range tests {
		if got := versionOf(tt.settings); got != tt.want {
			t.Errorf("%s: versionOf = %q, want %q", tt.name, got, tt.want)
		}
	}
}

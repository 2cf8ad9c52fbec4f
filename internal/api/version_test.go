package api

import "testing"

func TestLinkedVersionWins(t *testing.T) {
	Version = "v1.2.3"
	defer func() { Version = "" }()
	if got := VersionString(); got != "v1.2.3" {
		t.Errorf("VersionString() = %q, want v1.2.3", got)
	}
}

func TestBuildThatWasNotReleasedHasAVersion(t *testing.T) {
	if got := VersionString(); got == "" || got == "(devel)" {
		t.Errorf("VersionString() = %q", got)
	}
}

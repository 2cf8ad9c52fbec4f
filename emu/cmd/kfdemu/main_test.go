package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The programs of a build find each other, and a folder that is in PATH keeps its place.
func TestFolderOfTheEmulatorIsInPATH(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(self)
	got := map[string]string{}
	want := map[string]string{"/venv:/bin": dir + ":/venv:/bin", "/venv:" + dir: "/venv:" + dir}
	for path := range want {
		t.Setenv("PATH", path)
		if found, err := lookBeside(); err != nil || found != self {
			t.Errorf("%s, %v, want %s", found, err, self)
		}
		got[path] = os.Getenv("PATH")
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

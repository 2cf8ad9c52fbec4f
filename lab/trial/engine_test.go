package trial

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// enginesWith makes the only directory of PATH one that has the engines with these scripts.
func enginesWith(t *testing.T, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
}

func TestEnginesAreAskedForTheIDOfAContainer(t *testing.T) {
	const (
		asked   = `[ "$*" = "container inspect -- train" ] || { echo "asked $*" >&2; exit 2; }; `
		unknown = `echo "Error: no such container: train" >&2; echo more >&2; exit 1`
	)
	runs := asked + `echo '[{"Id": "0123abcd", "Name": "/train", "State": {"Running": true, "Pid": 7}}]'`
	for name, tc := range map[string]struct {
		engines map[string]string
		id, err string
	}{
		"docker":            {engines: map[string]string{"docker": runs}, id: "0123abcd"},
		"the second":        {engines: map[string]string{"docker": asked + unknown, "podman": runs}, id: "0123abcd"},
		"the third":         {engines: map[string]string{"docker": unknown, "podman": unknown, "nerdctl": runs}, id: "0123abcd"},
		"none":              {err: errNoEngine.Error()},
		"unknown":           {engines: map[string]string{"podman": unknown, "nerdctl": "exit 3"}, err: "podman: Error: no such container: train; nerdctl: exit status 3"},
		"stopped":           {engines: map[string]string{"docker": strings.Replace(runs, "true", "false", 1), "podman": runs}, err: errStopped.Error()},
		"no JSON":           {engines: map[string]string{"docker": "echo hello"}, err: "docker: its answer is not understood: invalid character 'h' looking for beginning of value"},
		"without container": {engines: map[string]string{"docker": "echo []"}, err: "docker: its answer has 0 containers"},
	} {
		t.Run(name, func(t *testing.T) {
			enginesWith(t, tc.engines)
			id, err := containerID(t.Context(), "train")
			said := ""
			if err != nil {
				said = err.Error()
			}
			if id != tc.id || said != tc.err {
				t.Errorf("%q, %q, want %q, %q", id, said, tc.id, tc.err)
			}
		})
	}
}

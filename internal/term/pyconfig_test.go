package term

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWhatAProcessIsCalledDoesNotBecomePython(t *testing.T) {
	const name = "x\nimport os\r\u0085\u2028coding: rot13"
	got := pythonText([]PythonQueue{{PID: 1}}, []string{name})
	want := pythonMagic + `#
# x?import os???coding: rot13

queues = [
    {'addr': None, 'queue_id': None, 'pid': 1, 'is_active': None},
]
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPythonFilesAreReplacedCompletely(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "conf.py")
	for _, queues := range [][]PythonQueue{nil, {{PID: 1}}} {
		content := pythonText(queues, nil)
		if err := WritePython(path, queues, nil); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != content {
			t.Errorf("%v, %q, want %q", err, got, content)
		}
	}
	// Opening a pipe without a writer must not wait.
	pipe := filepath.Join(dir, "pipe.py")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := WritePython(pipe, nil, nil); err == nil || err.Error() != "cannot replace "+pipe+": it is not a regular file" {
		t.Errorf("a pipe: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if diff := cmp.Diff([]string{"conf.py", "pipe.py"}, names); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

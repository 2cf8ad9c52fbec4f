package daemon

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/mechanism"
)

// The error once said that the process was resumed.
func TestCleanupReportsProcessesThatItDoesNotResume(t *testing.T) {
	host := Host{RunDir: t.TempDir()}
	dir := journalDir(host.RunDir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]os.FileMode{"4000001-11.later": 0o600, "4000002-22.freezer": 0o666} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, nil, mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	err := cleanUp(t.Context(), &out, host)
	bad := func(name, problem, pid string) string {
		return "journal of pauses: " + filepath.Join(dir, name) + ": " + problem + "; it is ignored, and process " + pid +
			", from its name, is not resumed: check that it runs, and restart it if not; then remove the file"
	}
	want := bad("4000001-11.later", "it is damaged: it is empty", "4000001") + "\n" +
		bad("4000002-22.freezer", "it is not an entry of this journal: its mode is -rw-rw-rw-: other users may write to it", "4000002")
	if _, ok := errors.AsType[*mechanism.BadEntry](err); !ok {
		t.Fatalf("error %v", err)
	}
	if diff := cmp.Diff([]string{want, "nothing was left paused\n"}, []string{err.Error(), out.String()}); diff != "" {
		t.Errorf("error and output (-want +got):\n%s", diff)
	}
}

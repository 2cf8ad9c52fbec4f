package evidence

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/gpreempt/gpreempt/internal/regular"
)

func TestAFolderHasRegularFilesOfBoundedSizeOnly(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "file"), []byte("text"), 0o600), syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
		os.WriteFile(filepath.Join(dir, "large"), nil, 0o600), os.Truncate(filepath.Join(dir, "large"), MaxFile+1)); err != nil {
		t.Fatal(err)
	}
	if data, err := fs.ReadFile(folder(dir), "file"); err != nil || string(data) != "text" {
		t.Errorf("a file: %q, %v", data, err)
	}
	for name, want := range map[string]error{"fifo": regular.ErrKind, "large": regular.ErrSize, "../file": fs.ErrInvalid, "/etc/passwd": fs.ErrInvalid, "": fs.ErrInvalid, "none": fs.ErrNotExist} {
		if _, err := fs.ReadFile(folder(dir), name); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", name, err, want)
		}
	}
}

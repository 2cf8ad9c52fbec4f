package evidence

import (
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/gpreempt/gpreempt/internal/regular"
)

// folder is os.DirFS for regular files of at most MaxFile bytes: Open refuses others.
type folder string

func (f folder) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	file, err := regular.Open(filepath.Join(string(f), name), MaxFile)
	if err != nil {
		if failed, ok := errors.AsType[*fs.PathError](err); ok {
			failed.Path = name
		}
		return nil, err
	}
	return file, nil
}

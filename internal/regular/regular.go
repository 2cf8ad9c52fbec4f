// Package regular reads regular files whose path somebody chose: a FIFO in the place of one, a
// device, an endless file or a file system that hangs must not stop the reader.
package regular

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// ErrKind reports that a path names no regular file.
var ErrKind = errors.New("it is not a regular file")

// ErrSize reports that a file is larger than its reader takes.
var ErrSize = errors.New("it is too large")

// Open opens a regular file of at most most bytes. It never waits for another program, as
// opening a FIFO does. The errors are of type *fs.PathError and wrap ErrKind, ErrSize or the
// error of the system.
func Open(path string, most int64) (*os.File, error) {
	// Opening a device can have effects, so the kind is looked at first, and again in case
	// that the file was replaced meanwhile.
	info, err := os.Stat(path)
	if err != nil {
		if failed, ok := errors.AsType[*fs.PathError](err); ok {
			failed.Op = "open"
		}
		return nil, err
	}
	if err := check(path, info, most); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	if info, err = f.Stat(); err == nil {
		err = check(path, info, most)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func check(path string, info fs.FileInfo, most int64) error {
	switch {
	case !info.Mode().IsRegular():
		return &fs.PathError{Op: "open", Path: path, Err: fmt.Errorf("%w: %s", ErrKind, kind(info.Mode()))}
	case info.Size() > most:
		return tooLarge(path, most)
	}
	return nil
}

func tooLarge(path string, most int64) error {
	return &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w: it has more than %d bytes", ErrSize, most)}
}

// kind describes what is not a regular file.
func kind(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeNamedPipe != 0:
		return "a FIFO"
	case mode&fs.ModeSocket != 0:
		return "a socket"
	case mode&fs.ModeDevice != 0:
		return "a device"
	}
	return mode.Type().String()
}

// Read returns the content of a regular file of at most most bytes. The errors are those of Open.
func Read(path string, most int64) ([]byte, error) {
	f, err := Open(path, most)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, most+1)) // it may grow
	if err == nil && int64(len(data)) > most {
		err = tooLarge(path, most)
	}
	if err != nil {
		return nil, err
	}
	return data, nil
}

// readTime is how long ReadSoon waits. Files of the kinds that it is for are read in
// milliseconds.
const readTime = 10 * time.Second

// pending are the paths whose reading has not returned.
var pending sync.Map

// ReadSoon is Read that gives up after ten seconds, with an error that wraps
// os.ErrDeadlineExceeded: no flag makes the kernel return from a network file system whose
// server does not answer. The call remains until the kernel returns, and while it does others
// for its path fail at once.
func ReadSoon(path string, most int64) ([]byte, error) { return soon(path, most, readTime, Read) }

func soon(path string, most int64, readTime time.Duration, read func(string, int64) ([]byte, error)) ([]byte, error) {
	late := &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w: its file system does not answer", os.ErrDeadlineExceeded)}
	if _, hangs := pending.LoadOrStore(path, true); hangs {
		return nil, late
	}
	type result struct {
		data []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		data, err := read(path, most)
		pending.Delete(path)
		done <- result{data, err}
	}()
	timer := time.NewTimer(readTime)
	defer timer.Stop()
	select {
	case r := <-done:
		return r.data, r.err
	case <-timer.C:
		return nil, late
	}
}

// DirFS is os.DirFS for regular files of at most most bytes: Open refuses others.
func DirFS(dir string, most int64) fs.FS { return dirFS{dir, most} }

type dirFS struct {
	dir  string
	most int64
}

func (d dirFS) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	f, err := Open(filepath.Join(d.dir, name), d.most)
	if err != nil {
		if failed, ok := errors.AsType[*fs.PathError](err); ok {
			failed.Path = name
		}
		return nil, err
	}
	return f, nil
}

// Package regular reads regular files whose path somebody chose: a FIFO in the place of one, a
// device, an endless file or a file system that hangs must not stop the reader.
package regular

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"
)

// ErrKind reports that a path names no regular file.
var ErrKind = errors.New("it is not a regular file")

// ErrSize reports that a file is larger than its reader takes.
var ErrSize = errors.New("it is too large")

// File is an open regular file. A read that would have to wait, as of some files of procfs, and
// one beyond the bound are errors.
type File struct {
	f *os.File
	// path is that of errors, and left how many of most bytes may still be read.
	path       string
	left, most int64
}

// Stat returns what the system says of the file.
func (f *File) Stat() (fs.FileInfo, error) { return f.f.Stat() }

// Close closes the file.
func (f *File) Close() error { return f.f.Close() }

// Read reads without waiting in the runtime, which waits where the system says "try again".
func (f *File) Read(p []byte) (n int, err error) {
	raw, err := f.f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		for {
			if n, failed = syscall.Read(int(fd), p); failed != syscall.EINTR {
				return true
			}
		}
	})
	n = max(n, 0)
	switch f.left -= int64(n); {
	case err != nil:
		return 0, err
	case failed == syscall.EAGAIN:
		return 0, &fs.PathError{Op: "read", Path: f.path, Err: fmt.Errorf("%w: it waits for data", ErrKind)}
	case failed != nil:
		return 0, &fs.PathError{Op: "read", Path: f.path, Err: failed}
	case f.left < 0:
		return 0, tooLarge(f.path, f.most)
	case n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return n, nil
}

// Open opens a regular file of at most most bytes. It never waits for another program, as
// opening a FIFO does. The errors, as those of Read, are of type *fs.PathError and wrap ErrKind,
// ErrSize or the error of the system.
func Open(path string, most int64) (*File, error) {
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
	return &File{f: f, path: path, left: most, most: most}, nil
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
	data, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	return data, nil
}

// readTime is how long ReadSoon waits. Files of the kinds that it is for are read in
// milliseconds.
const readTime = 10 * time.Second

// late counts, for each path, the calls of ReadSoon that gave up on a read that has not returned.
var late = struct {
	sync.Mutex
	reads map[string]int
}{reads: make(map[string]int)}

// ReadSoon is Read that gives up after ten seconds, with an error that wraps
// os.ErrDeadlineExceeded: no flag makes the kernel return from a network file system whose
// server does not answer. The read remains until the kernel returns, and while one does others of
// its path fail at once. It is safe for concurrent use.
func ReadSoon(path string, most int64) ([]byte, error) { return soon(path, most, readTime, Read) }

func soon(path string, most int64, readTime time.Duration, read func(string, int64) ([]byte, error)) ([]byte, error) {
	hangs := &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w: its file system does not answer", os.ErrDeadlineExceeded)}
	late.Lock()
	others := late.reads[path]
	late.Unlock()
	if others > 0 {
		return nil, hangs
	}
	type result struct {
		data []byte
		err  error
	}
	done := make(chan result, 1)
	gaveUp := false // guarded by late
	go func() {
		data, err := read(path, most)
		late.Lock()
		defer late.Unlock()
		done <- result{data, err}
		if !gaveUp {
			return
		}
		if late.reads[path]--; late.reads[path] == 0 {
			delete(late.reads, path)
		}
	}()
	timer := time.NewTimer(readTime)
	defer timer.Stop()
	select {
	case r := <-done:
		return r.data, r.err
	case <-timer.C:
	}
	late.Lock()
	defer late.Unlock()
	select {
	case r := <-done:
		return r.data, r.err
	default:
	}
	gaveUp = true
	late.reads[path]++
	return nil, hangs
}

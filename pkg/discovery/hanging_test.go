package discovery_test

import (
	"io/fs"
	"sync"
	"testing/fstest"
)

// hanging is a tree with files that hang when they are read, like those of a process
// whose memory is on FUSE.
type hanging struct {
	mu     sync.Mutex // guards all below
	files  fstest.MapFS
	hang   map[string]func() // called when a file is read
	opened map[string]int
}

func newHanging(m fstest.MapFS) *hanging {
	return &hanging{files: m, hang: map[string]func(){}, opened: map[string]int{}}
}

func (h *hanging) put(path, text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.files[path] = &fstest.MapFile{Data: []byte(text)}
}

// at makes a file hang when it is read, until release is called.
func (h *hanging) at(path string) (release func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	released := make(chan struct{})
	h.hang[path] = func() { <-released }
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.hang, path)
		close(released)
	}
}

func (h *hanging) Open(path string) (fs.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.opened[path]++
	file, err := h.files.Open(path)
	if hang := h.hang[path]; hang != nil && err == nil {
		return hangingFile{file, hang}, nil
	}
	return file, err
}

func (h *hanging) ReadLink(path string) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.files.ReadLink(path)
}

func (h *hanging) Lstat(path string) (fs.FileInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.files.Lstat(path)
}

func (h *hanging) times(path string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.opened[path]
}

type hangingFile struct {
	fs.File
	hang func()
}

func (f hangingFile) Read(b []byte) (int, error) {
	f.hang()
	return f.File.Read(b)
}

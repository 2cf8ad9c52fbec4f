package gpusim

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"
)

// node is a file or a directory of the tree. A directory has either entries, or
// names and find when what is in it changes.
type node struct {
	data    []byte
	entries map[string]*node
	names   func() []string
	find    func(name string) *node
}

func file(text string) *node { return &node{data: []byte(text)} }

func dir(entries map[string]*node) *node { return &node{entries: entries} }

func (n *node) isDir() bool { return n.entries != nil || n.find != nil }

func (n *node) child(name string) *node {
	if n.find != nil {
		return n.find(name)
	}
	return n.entries[name]
}

func (n *node) list() []string {
	var names []string
	if n.names != nil {
		names = n.names()
	} else {
		for name := range n.entries {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// FS is the machine's file tree, rooted at "/": what of sysfs and /proc tells of
// GPUs and GPU processes, in the formats of Linux 6.12. Every call renders the
// state of that moment; a file that has been opened keeps its content.
type FS struct {
	// with calls its argument while the machine may be looked at.
	with func(func(*Machine))
}

// FS gives the machine's file tree.
func (m *Machine) FS() *FS { return &FS{with: func(look func(*Machine)) { look(m) }} }

var (
	_ fs.ReadFileFS = (*FS)(nil)
	_ fs.ReadDirFS  = (*FS)(nil)
	_ fs.StatFS     = (*FS)(nil)
)

// entry is a file or directory as it was at one moment.
type entry struct {
	name     string
	dir      bool
	data     []byte
	children []child
}

type child struct {
	name string
	dir  bool
}

// get renders what name stands for.
func (f *FS) get(op, name string) (entry, error) {
	if !fs.ValidPath(name) {
		return entry{}, &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	var e entry
	found := false
	f.with(func(m *Machine) {
		n := m.root()
		if name != "." {
			for part := range strings.SplitSeq(name, "/") {
				if n = n.child(part); n == nil {
					return
				}
			}
		}
		found = true
		e = entry{name: path.Base(name), dir: n.isDir(), data: bytes.Clone(n.data)}
		if e.dir {
			for _, name := range n.list() {
				e.children = append(e.children, child{name, n.child(name).isDir()})
			}
		}
	})
	if !found {
		return entry{}, &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
	}
	return e, nil
}

// Open implements fs.FS.
func (f *FS) Open(name string) (fs.File, error) {
	e, err := f.get("open", name)
	if err != nil {
		return nil, err
	}
	if e.dir {
		return &openDir{path: name, entry: e, rest: f.dirEntries(name, e)}, nil
	}
	return &openFile{Reader: bytes.NewReader(e.data), entry: e}, nil
}

// ReadFile implements fs.ReadFileFS.
func (f *FS) ReadFile(name string) ([]byte, error) {
	e, err := f.get("open", name)
	if err != nil {
		return nil, err
	}
	if e.dir {
		return nil, &fs.PathError{Op: "read", Path: name, Err: errIsDir}
	}
	return e.data, nil
}

// ReadDir implements fs.ReadDirFS.
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	e, err := f.get("open", name)
	if err != nil {
		return nil, err
	}
	if !e.dir {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: errNotDir}
	}
	return f.dirEntries(name, e), nil
}

// Stat implements fs.StatFS.
func (f *FS) Stat(name string) (fs.FileInfo, error) {
	e, err := f.get("stat", name)
	if err != nil {
		return nil, err
	}
	return e.info(), nil
}

var (
	errIsDir  = errors.New("is a directory")
	errNotDir = errors.New("not a directory")
)

func (f *FS) dirEntries(name string, e entry) []fs.DirEntry {
	entries := make([]fs.DirEntry, 0, len(e.children))
	for _, c := range e.children {
		entries = append(entries, dirEntry{fs: f, path: path.Join(name, c.name), child: c})
	}
	return entries
}

// dirEntry renders its Info only when asked: the tree may have changed by then.
type dirEntry struct {
	child
	fs   *FS
	path string
}

func (d dirEntry) Name() string { return d.name }
func (d dirEntry) IsDir() bool  { return d.dir }

func (d dirEntry) Type() fs.FileMode {
	if d.dir {
		return fs.ModeDir
	}
	return 0
}

func (d dirEntry) Info() (fs.FileInfo, error) { return d.fs.Stat(d.path) }
func (d dirEntry) String() string             { return fs.FormatDirEntry(d) }

func (e entry) info() fs.FileInfo { return info{name: e.name, size: int64(len(e.data)), dir: e.dir} }

type info struct {
	name string
	size int64
	dir  bool
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.size }
func (i info) IsDir() bool        { return i.dir }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) Sys() any           { return nil }
func (i info) String() string     { return fs.FormatFileInfo(i) }

func (i info) Mode() fs.FileMode {
	if i.dir {
		return fs.ModeDir | 0o555
	}
	return 0o444
}

type openFile struct {
	*bytes.Reader
	entry entry
}

func (f *openFile) Stat() (fs.FileInfo, error) { return f.entry.info(), nil }
func (f *openFile) Close() error               { return nil }

type openDir struct {
	path  string
	entry entry
	rest  []fs.DirEntry
}

func (d *openDir) Stat() (fs.FileInfo, error) { return d.entry.info(), nil }
func (d *openDir) Close() error               { return nil }

func (d *openDir) Read([]byte) (int, error) {
	return 0, &fs.PathError{Op: "read", Path: d.path, Err: errIsDir}
}

// ReadDir implements fs.ReadDirFile.
func (d *openDir) ReadDir(n int) ([]fs.DirEntry, error) {
	if n <= 0 {
		all := d.rest
		d.rest = nil
		return all, nil
	}
	if len(d.rest) == 0 {
		return nil, io.EOF
	}
	n = min(n, len(d.rest))
	some := d.rest[:n:n]
	d.rest = d.rest[n:]
	return some, nil
}

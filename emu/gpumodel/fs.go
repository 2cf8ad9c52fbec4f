package gpumodel

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

// node is a file, a link or a directory of the tree. A directory has either entries, or
// names and find when what is in it changes.
type node struct {
	data []byte
	// show, when set, reads the machine and returns a function that renders the file's
	// content without the machine. As in debugfs, such a file has no size.
	show func() func() []byte
	// link is where a link leads.
	link    string
	entries map[string]*node
	names   func() []string
	find    func(name string) *node
}

func file(text string) *node { return &node{data: []byte(text)} }

func dir(entries map[string]*node) *node { return &node{entries: entries} }

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

// FS is the machine's file tree, rooted at "/": the parts of sysfs and /proc
// about GPUs and GPU processes, in the formats of the kernel that was set. Every call renders
// the state of that moment; a file that has been opened keeps its content. Its links
// are those to the programs of processes: they lead to the host's files, and opening one
// opens an empty file.
type FS struct {
	// with calls its argument while the machine may be read.
	with func(func(*Machine))
}

// FS returns the machine's file tree.
func (m *Machine) FS() *FS { return &FS{with: func(look func(*Machine)) { look(m) }} }

var (
	_ fs.ReadFileFS = (*FS)(nil)
	_ fs.ReadDirFS  = (*FS)(nil)
	_ fs.StatFS     = (*FS)(nil)
	_ fs.ReadLinkFS = (*FS)(nil)
)

// entry is a file, link or directory as it was at one moment.
type entry struct {
	child
	// link is where a link leads, size what Stat says.
	link     string
	size     int64
	data     []byte
	children []child
}

// child is an entry of a directory. typ is a file's, a directory's or a link's.
type child struct {
	name string
	typ  fs.FileMode
}

func (n *node) child(name string) *node {
	if n.find != nil {
		return n.find(name)
	}
	return n.entries[name]
}

func (n *node) typ() fs.FileMode {
	switch {
	case n.entries != nil || n.find != nil:
		return fs.ModeDir
	case n.link != "":
		return fs.ModeSymlink
	}
	return 0
}

// follow returns an empty file for a link, and other entries as they are.
func (e entry) follow() entry {
	if e.typ == fs.ModeSymlink {
		return entry{child: child{name: e.name}}
	}
	return e
}

// get renders the entry name, with the content of a file if content is set.
func (f *FS) get(op, name string, content bool) (entry, error) {
	if !fs.ValidPath(name) {
		return entry{}, &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	var e entry
	var text func() []byte
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
		e = entry{child: child{path.Base(name), n.typ()}, link: n.link, size: int64(len(n.data)), data: bytes.Clone(n.data)}
		if e.typ.IsDir() {
			for _, name := range n.list() {
				e.children = append(e.children, child{name, n.child(name).typ()})
			}
		}
		if n.show != nil && content {
			text = n.show()
		}
	})
	if !found {
		return entry{}, &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
	}
	if text != nil {
		e.data = text()
	}
	return e, nil
}

// Open implements fs.FS.
func (f *FS) Open(name string) (fs.File, error) {
	e, err := f.get("open", name, true)
	if err != nil {
		return nil, err
	}
	if e.typ.IsDir() {
		return &openDir{path: name, entry: e, rest: f.dirEntries(name, e)}, nil
	}
	return &openFile{Reader: bytes.NewReader(e.data), entry: e.follow()}, nil
}

// ReadFile implements fs.ReadFileFS.
func (f *FS) ReadFile(name string) ([]byte, error) {
	e, err := f.get("open", name, true)
	if err != nil {
		return nil, err
	}
	if e.typ.IsDir() {
		return nil, &fs.PathError{Op: "read", Path: name, Err: errIsDir}
	}
	return e.data, nil
}

// ReadDir implements fs.ReadDirFS.
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	e, err := f.get("open", name, false)
	if err != nil {
		return nil, err
	}
	if !e.typ.IsDir() {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: errNotDir}
	}
	return f.dirEntries(name, e), nil
}

// Stat implements fs.StatFS.
func (f *FS) Stat(name string) (fs.FileInfo, error) {
	e, err := f.get("stat", name, false)
	if err != nil {
		return nil, err
	}
	return e.follow().info(), nil
}

// Lstat implements fs.ReadLinkFS.
func (f *FS) Lstat(name string) (fs.FileInfo, error) {
	e, err := f.get("lstat", name, false)
	if err != nil {
		return nil, err
	}
	return e.info(), nil
}

// ReadLink implements fs.ReadLinkFS.
func (f *FS) ReadLink(name string) (string, error) {
	e, err := f.get("readlink", name, false)
	if err != nil {
		return "", err
	}
	if e.typ != fs.ModeSymlink {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrInvalid}
	}
	return e.link, nil
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

func (d dirEntry) Name() string               { return d.name }
func (d dirEntry) IsDir() bool                { return d.typ.IsDir() }
func (d dirEntry) Type() fs.FileMode          { return d.typ }
func (d dirEntry) Info() (fs.FileInfo, error) { return d.fs.Lstat(d.path) }
func (d dirEntry) String() string             { return fs.FormatDirEntry(d) }

func (e entry) info() fs.FileInfo { return info{child: e.child, size: e.size} }

type info struct {
	child
	size int64
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.size }
func (i info) IsDir() bool        { return i.typ.IsDir() }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) Sys() any           { return nil }
func (i info) String() string     { return fs.FormatFileInfo(i) }

func (i info) Mode() fs.FileMode {
	switch {
	case i.typ.IsDir():
		return i.typ | 0o555
	case i.typ == fs.ModeSymlink:
		return i.typ | 0o777
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

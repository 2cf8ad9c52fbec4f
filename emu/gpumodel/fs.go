package gpumodel

import (
	"io/fs"
	"path"
	"strings"
	"testing/fstest"
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

func (n *node) child(name string) *node {
	if n.find != nil {
		return n.find(name)
	}
	return n.entries[name]
}

// mapFile returns the node without what it has to be asked for.
func (n *node) mapFile() *fstest.MapFile {
	switch {
	case n.entries != nil || n.find != nil:
		return &fstest.MapFile{Mode: fs.ModeDir | 0o555}
	case n.link != "":
		return &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte(n.link)}
	}
	return &fstest.MapFile{Mode: 0o444, Data: n.data}
}

// snapshot returns the entry name as it is now, with the entries of a directory. With follow,
// a link is an empty file. text renders the content of a file that has no size, nil for
// others.
func (f *FS) snapshot(op, name string, follow bool) (entries fstest.MapFS, text func() []byte, err error) {
	if !fs.ValidPath(name) {
		return nil, nil, &fs.PathError{Op: op, Path: name, Err: fs.ErrInvalid}
	}
	f.with(func(m *Machine) {
		n := m.root()
		if name != "." {
			for part := range strings.SplitSeq(name, "/") {
				if n = n.child(part); n == nil {
					return
				}
			}
		}
		file := n.mapFile()
		if follow && n.link != "" {
			file = &fstest.MapFile{Mode: 0o444}
		}
		entries = fstest.MapFS{name: file}
		if file.Mode.IsDir() {
			for _, child := range n.list() {
				entries[path.Join(name, child)] = n.child(child).mapFile()
			}
		}
		if n.show != nil {
			text = n.show()
		}
	})
	if entries == nil {
		return nil, nil, &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
	}
	return entries, text, nil
}

// Open implements fs.FS.
func (f *FS) Open(name string) (fs.File, error) {
	entries, text, err := f.snapshot("open", name, true)
	if err != nil {
		return nil, err
	}
	if text == nil {
		return entries.Open(name)
	}
	info, err := entries.Stat(name)
	if err != nil {
		return nil, err
	}
	entries[name] = &fstest.MapFile{Mode: 0o444, Data: text()}
	file, err := entries.Open(name)
	return unsized{file, info}, err
}

// unsized is an open file without a size.
type unsized struct {
	fs.File
	info fs.FileInfo
}

func (u unsized) Stat() (fs.FileInfo, error) { return u.info, nil }

// ReadFile implements fs.ReadFileFS.
func (f *FS) ReadFile(name string) ([]byte, error) {
	entries, text, err := f.snapshot("open", name, true)
	if err != nil {
		return nil, err
	}
	if text != nil {
		return text(), nil
	}
	return entries.ReadFile(name)
}

// ReadDir implements fs.ReadDirFS.
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, _, err := f.snapshot("open", name, true)
	if err != nil {
		return nil, err
	}
	list, err := entries.ReadDir(name)
	for i, e := range list {
		list[i] = dirEntry{DirEntry: e, fs: f, path: path.Join(name, e.Name())}
	}
	return list, err
}

// Stat implements fs.StatFS.
func (f *FS) Stat(name string) (fs.FileInfo, error) {
	entries, _, err := f.snapshot("stat", name, true)
	if err != nil {
		return nil, err
	}
	return entries.Stat(name)
}

// Lstat implements fs.ReadLinkFS.
func (f *FS) Lstat(name string) (fs.FileInfo, error) {
	entries, _, err := f.snapshot("lstat", name, false)
	if err != nil {
		return nil, err
	}
	return entries.Lstat(name)
}

// ReadLink implements fs.ReadLinkFS.
func (f *FS) ReadLink(name string) (string, error) {
	entries, _, err := f.snapshot("readlink", name, false)
	if err != nil {
		return "", err
	}
	return entries.ReadLink(name)
}

// dirEntry finds its Info only when asked: the tree may have changed by then.
type dirEntry struct {
	fs.DirEntry
	fs   *FS
	path string
}

func (d dirEntry) Info() (fs.FileInfo, error) { return d.fs.Lstat(d.path) }

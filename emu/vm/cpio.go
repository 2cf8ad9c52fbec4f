package main

import (
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
)

// Archive writes a cpio archive in the format of an initramfs (newc, see Documentation/driver-api/early-userspace/buffer-format.rst). It is not
// safe for concurrent use.
type Archive struct {
	w     io.Writer
	inode int
	size  int
	dirs  map[string]bool
}

// NewArchive returns an empty archive that writes to w.
func NewArchive(w io.Writer) *Archive { return &Archive{w: w, dirs: map[string]bool{"/": true}} }

// File adds a file and its parent directories. name is absolute.
func (a *Archive) File(name string, perm fs.FileMode, data []byte) error {
	if err := a.Dir(path.Dir(name)); err != nil {
		return err
	}
	return a.entry(name, 0o100000|uint32(perm.Perm()), data)
}

// Dir adds a directory and its parents.
func (a *Archive) Dir(name string) error {
	if a.dirs[name] {
		return nil
	}
	a.dirs[name] = true
	if err := a.Dir(path.Dir(name)); err != nil {
		return err
	}
	return a.entry(name, 0o040755, nil)
}

// Tree adds the files of a tree below root.
func (a *Archive) Tree(root string, tree fs.FS) error {
	return fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return a.File(path.Join(root, name), info.Mode(), data)
	})
}

// Close writes the trailer. It does not close the writer.
func (a *Archive) Close() error { return a.entry("/TRAILER!!!", 0, nil) }

func (a *Archive) entry(name string, mode uint32, data []byte) error {
	a.inode++
	name = strings.TrimPrefix(name, "/") + "\x00"
	// magic, inode, mode, uid, gid, links, time, size, device and rdev as major and
	// minor, length of the name, checksum.
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
	for _, part := range []string{header + name, string(data)} {
		if err := a.padded(part); err != nil {
			return err
		}
	}
	return nil
}

// padded writes s and pads to a multiple of four bytes.
func (a *Archive) padded(s string) error {
	n, err := io.WriteString(a.w, s)
	a.size += n
	if err != nil {
		return err
	}
	n, err = io.WriteString(a.w, "\x00\x00\x00"[:-a.size&3])
	a.size += n
	return err
}

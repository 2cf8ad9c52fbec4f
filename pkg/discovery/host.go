package discovery

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// tree reads below the root of a scan.
type tree interface {
	open(dir string) (directory, error)
	// unique reports whether the file system of a directory never reuses an inode number.
	unique(dir string) bool
	// stamp distinguishes a directory from earlier ones with its name.
	stamp(dir string) (stamp, error)
	// read reads a file from its beginning until it ends or buf is full.
	read(name string, buf []byte) (int, error)
}

// directory is an open directory.
type directory interface {
	// list calls each with every name in it, which is valid during the call, and its inode
	// number, 0 when unknown.
	list(each func(name []byte, inode uint64)) error
	// subdirectories returns a number that changes with the number of subdirectories of a
	// directory in it, or 0 when unknown.
	subdirectories(name string) uint64
	open(path string) (directory, error)
	// read is tree.read, relative to the directory.
	read(path string, buf []byte) (int, error)
	close()
}

// stamp is equal for two directories only when they are the same; the inode is 0 when the
// file system has none. The change time is for file systems that reuse inode numbers, on
// the assumption that they do not within a tick of the clock.
type stamp struct {
	inode  uint64
	change syscall.Timespec
}

// fsTree is any file system.
type fsTree struct{ fs.FS }

func (t fsTree) open(dir string) (directory, error) { return fsDir{t.FS, dir}, nil }

func (t fsTree) unique(string) bool { return false }

func (t fsTree) read(name string, buf []byte) (int, error) { return readFS(t.FS, name, buf) }

func readFS(root fs.FS, name string, buf []byte) (int, error) {
	file, err := root.Open(name)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	n, err := io.ReadFull(file, buf)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil
	}
	return n, err
}

func (t fsTree) stamp(dir string) (stamp, error) {
	info, err := fs.Stat(t.FS, dir)
	if err != nil {
		return stamp{}, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{}, nil
	}
	return stamp{inode: st.Ino, change: st.Ctim}, nil
}

// fsDir is a directory of any file system. Its errors occur when it is listed.
type fsDir struct {
	root fs.FS
	path string
}

func (d fsDir) list(each func(name []byte, inode uint64)) error {
	entries, err := fs.ReadDir(d.root, d.path)
	for _, entry := range entries {
		each([]byte(entry.Name()), 0)
	}
	return err
}

func (d fsDir) open(path string) (directory, error) { return fsDir{d.root, d.path + "/" + path}, nil }

func (d fsDir) read(path string, buf []byte) (int, error) {
	return readFS(d.root, d.path+"/"+path, buf)
}
func (d fsDir) subdirectories(string) uint64 { return 0 }
func (d fsDir) close()                       {}

// dirFS is what os.DirFS returns.
type dirFS interface {
	fs.StatFS
	fs.ReadFileFS
	fs.ReadDirFS
	fs.ReadLinkFS
}

// host is a directory as a root. It is the file system of os.DirFS; scans read it with
// fewer system calls and without garbage.
type host struct {
	dirFS
	root string
}

// hostTree reads a host for one FS.
type hostTree struct {
	*host
	// buf receives directories, under the lock of the FS.
	buf []byte
}

// Host returns the directory root as a file system: os.DirFS(root), which an FS scans at a
// fraction of the cost.
func Host(root string) fs.FS {
	files, ok := os.DirFS(root).(dirFS)
	if !ok {
		panic("os.DirFS differs from its documentation")
	}
	return &host{dirFS: files, root: root}
}

// Magic numbers of file systems (include/uapi/linux/magic.h).
const (
	sysfsMagic = 0x62656572
	tmpfsMagic = 0x01021994
)

// unique reports true for sysfs and tmpfs.
//
// On sysfs an inode number is the id of the kernfs node, in the directory
// (kernfs_fop_readdir) as in the inode (kernfs_get_inode): 64 bits of which the
// lower 32 wrap around and the upper ones count the rounds (__kernfs_new_node), so that
// none is reused; before Linux 5.5 there were the lower ones only. tmpfs counts up too,
// in 32 or 64 bits (shmem_reserve_inode).
func (h *host) unique(dir string) bool {
	var st syscall.Statfs_t
	err := again(func() error { return syscall.Statfs(h.path(dir), &st) })
	return err == nil && (st.Type == sysfsMagic || st.Type == tmpfsMagic)
}

// again makes a system call until no signal interrupts it.
func again(call func() error) error {
	for {
		if err := call(); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// The offsets in struct linux_dirent64 (include/linux/dirent.h).
const (
	direntInode  = 0
	direntLength = 16
	direntName   = 19
)

// parseDirents calls each with the entries in b, as getdents64 writes them, except "." and
// "..". It reports whether b contains complete entries only.
func parseDirents(b []byte, each func(name []byte, inode uint64)) bool {
	for len(b) > 0 {
		if len(b) <= direntName {
			return false
		}
		length := int(binary.NativeEndian.Uint16(b[direntLength:]))
		if length <= direntName || length > len(b) {
			return false
		}
		name, _, ended := bytes.Cut(b[direntName:length], []byte{0})
		if !ended || len(name) == 0 {
			return false
		}
		if string(name) != "." && string(name) != ".." {
			each(name, binary.NativeEndian.Uint64(b[direntInode:]))
		}
		b = b[length:]
	}
	return true
}

func (h *host) read(name string, buf []byte) (int, error) {
	n, op, err := readAt(atCWD, h.path(name), buf)
	if err != nil {
		return 0, &fs.PathError{Op: op, Path: name, Err: err}
	}
	return n, nil
}

// readAt opens a file and reads once. Files of procfs and sysfs, like regular files, then
// return everything, or as much as fits (seq_read_iter of single_open,
// kernfs_fop_read_iter, proc_pid_cmdline_read, environ_read). op is the call that failed.
func readAt(dir int, name string, buf []byte) (n int, op string, err error) {
	fd, err := openAt(dir, name, 0)
	if err != nil {
		return 0, "open", err
	}
	defer syscall.Close(fd)
	err = again(func() (err error) {
		n, err = syscall.Read(fd, buf)
		return err
	})
	return n, "read", err
}

func (h *host) stamp(dir string) (stamp, error) {
	var st syscall.Stat_t
	if err := again(func() error { return syscall.Stat(h.path(dir), &st) }); err != nil {
		return stamp{}, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	return stamp{inode: st.Ino, change: st.Ctim}, nil
}

func (h *host) path(name string) string { return h.root + "/" + name }

// openAt opens a name below a directory.
func openAt(dir int, name string, flags int) (fd int, err error) {
	err = again(func() (err error) {
		fd, err = syscall.Openat(dir, name, syscall.O_RDONLY|syscall.O_CLOEXEC|flags, 0)
		return err
	})
	return fd, err
}

// atCWD is AT_FDCWD (include/uapi/linux/fcntl.h): names are relative to the working directory.
const atCWD = -100

func (h hostTree) open(dir string) (directory, error) {
	fd, err := openAt(atCWD, h.path(dir), syscall.O_DIRECTORY)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	root, err := os.OpenRoot(h.path(dir))
	if err != nil {
		_ = syscall.Close(fd) // it was only read
		return nil, err
	}
	return &hostDir{fd: fd, root: root, name: dir, buf: h.buf}, nil
}

// hostDir is an open directory of a host. Its entries are opened relative to it: sysfs
// looks up each part of a path slowly (kernfs_dop_revalidate).
type hostDir struct {
	fd int
	// root is set for a directory that was opened by its path, else nil.
	root   *os.Root
	parent *hostDir // nil for one that was opened by its path
	name   string
	buf    []byte
}

// list reads the inode numbers from the directory itself; os.ReadDir would stat each
// entry. It is called once.
func (d *hostDir) list(each func(name []byte, inode uint64)) error {
	for {
		n, err := syscall.ReadDirent(d.fd, d.buf)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return &fs.PathError{Op: "readdirent", Path: d.path(), Err: err}
		case n == 0:
			return nil
		case !parseDirents(d.buf[:n], each):
			return &fs.PathError{Op: "readdirent", Path: d.path(), Err: syscall.EBADMSG}
		}
	}
}

// subdirectories returns the number of links to a directory: each subdirectory adds one by
// its "..", where the file system counts them.
func (d *hostDir) subdirectories(name string) uint64 {
	if d.root == nil {
		return 0
	}
	info, err := d.root.Lstat(name)
	if err != nil {
		return 0
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink >= 2 {
		return uint64(st.Nlink) //nolint:unconvert // 32 bits wide on arm64
	}
	return 0
}

func (d *hostDir) open(path string) (directory, error) {
	fd, err := openAt(d.fd, path, syscall.O_DIRECTORY)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: d.path() + "/" + path, Err: err}
	}
	return &hostDir{fd: fd, parent: d, name: path, buf: d.buf}, nil
}

func (d *hostDir) read(path string, buf []byte) (int, error) {
	n, op, err := readAt(d.fd, path, buf)
	if err != nil {
		return 0, &fs.PathError{Op: op, Path: d.path() + "/" + path, Err: err}
	}
	return n, nil
}

func (d *hostDir) close() { // it was only read
	_ = syscall.Close(d.fd)
	if d.root != nil {
		_ = d.root.Close()
	}
}

func (d *hostDir) path() string {
	if d.parent == nil {
		return d.name
	}
	return d.parent.path() + "/" + d.name
}

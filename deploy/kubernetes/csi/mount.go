package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// publish mounts the directory source read only at target, unless it is mounted there. The parent
// of target exists. The mount appears complete or not at all: a kill at any point leaves nothing
// that a pod could write to.
func publish(source, target string) error {
	if err := os.Mkdir(target, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	mounted, err := isMount(target)
	if err != nil {
		return err
	}
	if mounted {
		return isOurs(source, target)
	}
	// From Linux 5.12 on; gpreempt needs 6.5.
	tree, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("open_tree", err)
	}
	defer unix.Close(tree) // the mount is at target then, or ends with the descriptor
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return os.NewSyscallError("mount_setattr", err)
	}
	return os.NewSyscallError("move_mount", unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH))
}

// isOurs returns nil if what is mounted at target is source, read only.
func isOurs(source, target string) error {
	want, err := os.Stat(source)
	if err != nil {
		return err
	}
	got, err := os.Lstat(target)
	if err != nil {
		return err
	}
	var flags unix.Statfs_t
	if err := unix.Statfs(target, &flags); err != nil {
		return os.NewSyscallError("statfs", err)
	}
	if !os.SameFile(want, got) || flags.Flags&unix.ST_RDONLY == 0 {
		return errors.New("something else is mounted there")
	}
	return nil
}

// unpublish unmounts what is mounted at target, and removes the directory.
func unpublish(target string) error {
	for {
		mounted, err := isMount(target)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if !mounted {
			break
		}
		if err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW); err != nil {
			return os.NewSyscallError("umount2", err)
		}
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// isMount reports whether a directory is the root of a mount. The error is fs.ErrNotExist if it does
// not exist.
func isMount(path string) (bool, error) {
	var s unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_TYPE, &s); err != nil {
		return false, &fs.PathError{Op: "statx", Path: path, Err: err}
	}
	if s.Mode&unix.S_IFMT != unix.S_IFDIR {
		return false, fmt.Errorf("%s is not a directory", path)
	}
	return s.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

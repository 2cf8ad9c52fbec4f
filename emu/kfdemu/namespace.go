package kfdemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// ErrPrivilege means that this process has no right to mount the tree. The error that wraps
// it names what is missing.
var ErrPrivilege = errors.New("not allowed")

// mountsFile lists what is bound into the tree when it is mounted.
const mountsFile = "mounts"

// mount is something of the host that is at another path, too.
type mount struct{ From, At string }

// hidden are directories of the host that are not merged with the tree's: a real driver
// would be mistaken for the emulated one.
var hidden = []string{"/sys/devices/virtual/kfd", "/sys/class/kfd", "/sys/class/drm", "/sys/module/amdgpu", "/sys/kernel/debug/kfd", "/dev/dri"}

// Merge prepares the tree for Enter: it adds the other entries of the host's /sys and /dev,
// to which those are then bound, and makes the device files.
func (t *Tree) Merge() error {
	return t.while("merge the emulated sysfs with the host's", func() error {
		mounts, err := t.makeDevices()
		for _, dir := range []string{"/sys", "/dev"} {
			if err == nil {
				mounts, err = t.merge(dir, mounts)
			}
		}
		// A kernel without loadable modules has no such file.
		if _, stat := os.Stat(t.path(modulesFile)); stat == nil {
			mounts = append(mounts, mount{t.path(modulesFile), hostModules})
		}
		list, encoded := json.Marshal(mounts)
		if err := errors.Join(err, encoded); err != nil {
			return err
		}
		return write(t.path(mountsFile), string(list))
	})
}

// kmapFile is where the tree has the device of the extension, if the driver has it. It gets a number
// of the misc devices.
const (
	kmapFile             = "dev/kfd_kmap"
	miscMajor, kmapMinor = 10, 122
)

// makeDevices makes a device file of each file in the tree's /dev, which has its number. In
// a user namespace that is not allowed; then the device file has another number.
func (t *Tree) makeDevices() (mounts []mount, err error) {
	devices, err := filepath.Glob(t.path("dev/dri/*"))
	if err != nil {
		return nil, err
	}
	devices = append(devices, t.path("dev/kfd"))
	if _, err := os.Stat(t.path(kmapFile)); err == nil {
		devices = append(devices, t.path(kmapFile))
	}
	for _, at := range devices {
		mode := uint32(0o666) // that of ROCm's udev rules
		if at == t.path(kmapFile) {
			mode = 0o600
		}
		b, err := os.ReadFile(at)
		if err != nil {
			return nil, err
		}
		var major, minor uint32
		if _, err := fmt.Sscanf(string(b), "%d:%d", &major, &minor); err != nil {
			return nil, fmt.Errorf("%s: invalid device number %q: %w", at, b, err)
		}
		if err := os.Remove(at); err != nil {
			return nil, err
		}
		err = unix.Mknod(at, unix.S_IFCHR|mode, int(unix.Mkdev(major, minor)))
		switch {
		case errors.Is(err, unix.EPERM):
			mounts = append(mounts, mount{os.DevNull, at})
			err = os.WriteFile(at, nil, 0o600)
		case err == nil:
			err = os.Chmod(at, os.FileMode(mode))
		}
		if err != nil {
			return nil, fmt.Errorf("create the device %s: %w", at, err)
		}
	}
	return mounts, nil
}

// merge adds the entries of a directory of the host that the tree does not have.
func (t *Tree) merge(dir string, mounts []mount) ([]mount, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
		return mounts, err
	}
	for _, e := range entries {
		from := dir + "/" + e.Name()
		at := t.path(from[1:])
		switch own, err := os.Lstat(at); {
		case err == nil && own.IsDir() && e.IsDir() && !slices.Contains(hidden, from):
			if mounts, err = t.merge(from, mounts); err != nil {
				return mounts, err
			}
			// The owner goes on to update the tree.
			if st, err := os.Lstat(from); err == nil {
				if err := os.Chmod(at, st.Mode().Perm()|0o700); err != nil {
					return mounts, err
				}
			}
			continue
		case err == nil:
			continue
		}
		switch {
		case e.Type() == fs.ModeSymlink:
			var target string
			if target, err = os.Readlink(from); errors.Is(err, fs.ErrNotExist) {
				continue // it has gone meanwhile
			} else if err == nil {
				err = os.Symlink(target, at)
			}
		case e.IsDir():
			err = os.Mkdir(at, 0o755)
			mounts = append(mounts, mount{from, at})
		default:
			err = os.WriteFile(at, nil, 0o600)
			mounts = append(mounts, mount{from, at})
		}
		if err != nil {
			return mounts, err
		}
	}
	return mounts, nil
}

// Enter moves the calling, locked thread to a mount namespace of its own, with the tree in
// dir (see Tree.Dir and Tree.Merge) at its place among the host's files. It needs
// CAP_SYS_ADMIN: see UserNamespace.
func Enter(dir string) error {
	if err := enter(dir); err != nil {
		return fmt.Errorf("mount the emulated sysfs: %w", explain(err))
	}
	return nil
}

func enter(dir string) error {
	list, err := os.ReadFile(dir + "/" + mountsFile)
	if err != nil {
		return err
	}
	var mounts []mount
	if err := json.Unmarshal(list, &mounts); err != nil {
		return fmt.Errorf("%s: %w", mountsFile, err)
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make all mounts private: %w", err)
	}
	for _, name := range []string{"sys", "dev"} {
		at := dir + "/" + name
		if err := bind(at, at); err != nil {
			return err
		}
		// It may be below the host's, and must not be bound into itself.
		if err := unix.Mount("", at, "", unix.MS_UNBINDABLE, ""); err != nil {
			return fmt.Errorf("make a mount unbindable: %w", err)
		}
	}
	for _, m := range mounts {
		if err := bind(m.From, m.At); err != nil && !errors.Is(err, fs.ErrNotExist) { // it has gone meanwhile
			return err
		}
	}
	for _, name := range []string{"sys", "dev"} {
		at, place := dir+"/"+name, "/"+name
		// Device files on it cannot be opened: KFD's and DRM's numbers may be those of other
		// drivers on this host.
		attributes := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC}
		if err := unix.MountSetattr(unix.AT_FDCWD, at, 0, &attributes); err != nil {
			return fmt.Errorf("make a mount read-only: %w", err)
		}
		if err := unix.Mount(at, place, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move a mount to %s: %w", place, err)
		}
		if err := unix.Mount("", place, "", unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make a mount bindable again: %w", err)
		}
	}
	return nil
}

func bind(from, at string) error {
	if err := unix.Mount(from, at, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s: %w", from, err)
	}
	return nil
}

// explain adds the missing privilege to an error. Call it in the process that got the
// error.
func explain(err error) error {
	// Errors of the os package are about files, not about namespaces and mounts.
	if _, file := errors.AsType[*fs.PathError](err); file || !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
		return err
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if e := unix.Capget(&hdr, &caps[0]); e != nil {
		return errors.Join(fmt.Errorf("%w: %w", ErrPrivilege, err), e)
	}
	for _, c := range []struct {
		bit  uint
		name string
	}{{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}, {unix.CAP_SYS_CHROOT, "CAP_SYS_CHROOT"}} {
		if caps[0].Effective&(1<<c.bit) == 0 {
			return fmt.Errorf("%w: %w: the process has no %s: run it as root, with that capability, or in a user namespace", ErrPrivilege, err, c.name)
		}
	}
	return fmt.Errorf("%w: %w although the process has CAP_SYS_ADMIN: a seccomp profile or a security module (AppArmor, SELinux) forbids mounts here", ErrPrivilege, err)
}

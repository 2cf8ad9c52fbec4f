package kfdemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// ErrPrivilege means that this process has no right to create the namespace. The error that
// wraps it names what is missing.
var ErrPrivilege = errors.New("not allowed")

// Namespace returns a descriptor of a mount namespace in which the tree is at its place,
// for setns(2) with CLONE_NEWNS by a thread that has its own working directory (CLONE_FS
// unshared) and both CAP_SYS_ADMIN and CAP_SYS_CHROOT; setns moves the directory to "/".
// The namespace is created once, with a copy of the present mounts, and the descriptor
// belongs to the Tree until Close. It needs CAP_SYS_ADMIN: see UserNamespace.
func (t *Tree) Namespace() (fd int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return -1, fmt.Errorf("make a mount namespace: %w", fs.ErrClosed)
	case t.namespace >= 0:
		return t.namespace, nil
	}
	done := make(chan struct{})
	go func() {
		// Never unlocked: the thread ends with the goroutine, and is not used again.
		runtime.LockOSThread()
		defer close(done)
		fd, err = makeNamespace(t.dir)
	}()
	<-done
	if err != nil {
		return -1, fmt.Errorf("make a mount namespace for the emulated sysfs: %w", explain(err))
	}
	t.namespace = fd
	return fd, nil
}

const namespaceFile = "/proc/thread-self/ns/mnt"

// makeNamespace returns a new namespace and moves the calling, locked thread back to its
// own: if it is the first of the process it does not end, and its namespace is reported as
// that of the process.
func makeNamespace(dir string) (_ int, err error) {
	own, err := unix.Open(namespaceFile, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", namespaceFile, err)
	}
	defer unix.Close(own)
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return -1, fmt.Errorf("unshare: %w", err)
	}
	defer func() {
		if back := unix.Setns(own, unix.CLONE_NEWNS); back != nil {
			err = errors.Join(err, fmt.Errorf("return from the new namespace: %w", back))
		}
	}()
	if err := mountAll(dir); err != nil {
		return -1, err
	}
	fd, err := unix.Open(namespaceFile, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", namespaceFile, err)
	}
	return fd, nil
}

// mountAll mounts the tree in dir at its place in the calling thread's mount namespace,
// which must not be shared.
func mountAll(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make all mounts private: %w", err)
	}
	for _, name := range []string{"sys", "dev"} {
		if err := mountOver("/"+name, dir+"/"+name, dir+"/"+mountDir); err != nil {
			return err
		}
	}
	// A kernel without loadable modules has no such file.
	if _, err := os.Stat(dir + "/" + modulesFile); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return bind(dir+"/"+modulesFile, hostModules)
}

// mountOver mounts over a directory of the host one that has its entries and those of the
// directory added, which take precedence. It is assembled at at. Device files on it cannot
// be opened: KFD's and DRM's numbers may be those of other drivers on this host.
func mountOver(host, added, at string) error {
	if err := unix.Mount("kfdemu", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755"); err != nil {
		return fmt.Errorf("mount a tmpfs: %w", err)
	}
	// at may be below host, and must not be bound into itself.
	if err := unix.Mount("", at, "", unix.MS_UNBINDABLE, ""); err != nil {
		return fmt.Errorf("make a tmpfs unbindable: %w", err)
	}
	if err := (skeleton{devices: host == "/dev"}).merge(host, added, at); err != nil {
		return err
	}
	if err := readOnly(at); err != nil {
		return err
	}
	if err := unix.Mount(at, host, "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move a tmpfs to %s: %w", host, err)
	}
	if err := unix.Mount("", host, "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make a tmpfs bindable again: %w", err)
	}
	return nil
}

// skeleton assembles a directory with entries of both. devices: the files in added contain
// the numbers of device files.
type skeleton struct{ devices bool }

// merge fills the directory at with the entries of added, and with the other entries of
// host, unless that is "".
func (s skeleton) merge(host, added, at string) error {
	entries, err := os.ReadDir(added)
	if err != nil {
		return err
	}
	done := map[string]bool{}
	for _, e := range entries {
		done[e.Name()] = true
		if err := s.add(below(host, e.Name()), added+"/"+e.Name(), at+"/"+e.Name(), e.Type()); err != nil {
			return err
		}
	}
	if host == "" {
		return nil
	}
	entries, err = os.ReadDir(host)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	for _, e := range entries {
		if done[e.Name()] {
			continue
		}
		if err := keep(host+"/"+e.Name(), at+"/"+e.Name(), e.Type()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// below returns an entry of a directory of the host, "" if it must be hidden: a real driver
// would be mistaken for the emulated one.
func below(host, name string) string {
	if host == "" {
		return ""
	}
	host += "/" + name
	switch host {
	case "/sys/devices/virtual/kfd", "/sys/class/kfd", "/sys/class/drm", "/sys/module/amdgpu", "/sys/kernel/debug/kfd", "/dev/dri":
		return ""
	}
	return host
}

// add creates at as a copy or a bind mount of added.
func (s skeleton) add(host, added, at string, typ fs.FileMode) error {
	switch {
	case typ == fs.ModeSymlink:
		target, err := os.Readlink(added)
		if err != nil {
			return err
		}
		return os.Symlink(target, at)
	case typ.IsDir():
		mode := fs.FileMode(0o755)
		if st, err := os.Lstat(host); err == nil && st.IsDir() {
			mode = st.Mode().Perm()
		} else {
			host = ""
		}
		if err := os.Mkdir(at, 0o755); err != nil {
			return err
		}
		if host != "" || s.devices {
			if err := s.merge(host, added, at); err != nil {
				return err
			}
			// This comes last, because it may forbid writing.
			return os.Chmod(at, mode)
		}
		if err := bind(added, at); err != nil {
			return err
		}
		return readOnly(at)
	case s.devices:
		return addDevice(added, at)
	}
	if err := os.WriteFile(at, nil, 0o444); err != nil {
		return err
	}
	if err := bind(added, at); err != nil {
		return err
	}
	return readOnly(at)
}

// addDevice creates a device file with the number in a file. In a user namespace that is
// not allowed; then the device file has another number.
func addDevice(added, at string) error {
	b, err := os.ReadFile(added)
	if err != nil {
		return err
	}
	var d deviceNumber
	if _, err := fmt.Sscanf(string(b), "%d:%d", &d.major, &d.minor); err != nil {
		return fmt.Errorf("%s: invalid device number %q: %w", added, b, err)
	}
	err = unix.Mknod(at, unix.S_IFCHR|0o666, int(unix.Mkdev(uint32(d.major), uint32(d.minor))))
	if errors.Is(err, unix.EPERM) {
		if err := os.WriteFile(at, nil, 0o600); err != nil {
			return err
		}
		return bind(os.DevNull, at)
	}
	if err != nil {
		return fmt.Errorf("create the device %s: %w", path.Base(at), err)
	}
	return os.Chmod(at, 0o666) //nolint:gosec // the mode of ROCm's udev rules
}

// keep makes at the same as host, with all mounts there and below.
func keep(host, at string, typ fs.FileMode) error {
	switch {
	case typ == fs.ModeSymlink:
		target, err := os.Readlink(host)
		if err != nil {
			return err
		}
		return os.Symlink(target, at)
	case typ.IsDir():
		if err := os.Mkdir(at, 0o755); err != nil {
			return err
		}
	default:
		if err := os.WriteFile(at, nil, 0o600); err != nil {
			return err
		}
	}
	return bind(host, at)
}

func bind(from, at string) error {
	if err := unix.Mount(from, at, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s: %w", from, err)
	}
	return nil
}

// busyTime limits the wait for files of a mount that are open for writing.
const busyTime = time.Second

// readOnly makes the mount at at read-only, also for programs with privileges. The kernel
// refuses while a file there is open for writing (mnt_hold_writers). After it was closed,
// that can still be the case in a child that another thread has just forked, until the
// child executes its program.
func readOnly(at string) error {
	for end := time.Now().Add(busyTime); ; time.Sleep(time.Millisecond) {
		err := unix.MountSetattr(unix.AT_FDCWD, at, 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return fmt.Errorf("make a mount read-only: %w", err)
		}
	}
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

package tree

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

// ErrPrivilege says that the kernel does not let this process do what a namespace takes.
// The error it is part of names what is missing.
var ErrPrivilege = errors.New("not allowed")

// Namespace returns a descriptor of a mount namespace in which the tree is at its place,
// for setns(2) with CLONE_NEWNS by a thread that has a working directory of its own
// (CLONE_FS unshared) and both CAP_SYS_ADMIN and CAP_SYS_CHROOT; setns moves that to "/".
// The namespace is made once, with a copy of the mounts there are then, and the
// descriptor is the Tree's until Close. It takes CAP_SYS_ADMIN: see UserNamespace.
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
		// Never unlocked: the thread ends with the goroutine, as nobody else may have it.
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

// makeNamespace returns a new namespace and leaves the calling, locked thread where it was:
// should it be the first of the process, it lives on, and what it sees is what others
// are told the process does.
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

// mountAll puts the tree in dir at its place in the calling thread's mount namespace,
// which must be nobody else's.
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

// mountOver mounts over a directory of the host one that has its entries and those of
// the directory added, which go first. It is put together at at. Device files on it open
// nothing: KFD's and DRM's numbers may be those of other drivers on this host.
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

// skeleton is how a directory with entries of both is put together. devices tells that
// the files in added hold the numbers of device files.
type skeleton struct{ devices bool }

// merge fills the directory at with what is in added, and with what else is in host,
// unless that is "".
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

// below returns an entry of a directory of the host; "" when nothing of it is to be seen: a
// real driver would be mistaken for the emulated one.
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

// add makes at what added is.
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
		if err := os.Mkdir(at, 0o755); err != nil { //nolint:gosec // the host's mode follows
			return err
		}
		if host != "" || s.devices {
			if err := s.merge(host, added, at); err != nil {
				return err
			}
			// Last, since it may forbid its owner to write.
			return os.Chmod(at, mode)
		}
		if err := bind(added, at); err != nil {
			return err
		}
		return readOnly(at)
	case s.devices:
		return addDevice(added, at)
	}
	if err := os.WriteFile(at, nil, 0o444); err != nil { //nolint:gosec // a place for a file that everybody may read
		return err
	}
	if err := bind(added, at); err != nil {
		return err
	}
	return readOnly(at)
}

// addDevice makes a device file with the number that stands in a file. In a user
// namespace nobody may; then it is one with another number.
func addDevice(added, at string) error {
	b, err := os.ReadFile(added)
	if err != nil {
		return err
	}
	var d device
	if _, err := fmt.Sscanf(string(b), "%d:%d", &d.major, &d.minor); err != nil {
		return fmt.Errorf("%s: %q is no device number: %w", added, b, err)
	}
	err = unix.Mknod(at, unix.S_IFCHR|0o666, int(unix.Mkdev(uint32(d.major), uint32(d.minor))))
	if errors.Is(err, unix.EPERM) {
		if err := os.WriteFile(at, nil, 0o600); err != nil {
			return err
		}
		return bind(os.DevNull, at)
	}
	if err != nil {
		return fmt.Errorf("make the device %s: %w", path.Base(at), err)
	}
	return os.Chmod(at, 0o666) //nolint:gosec // the mode ROCm's udev rules give it
}

// keep makes at what host is, with all that is mounted there and below.
func keep(host, at string, typ fs.FileMode) error {
	switch {
	case typ == fs.ModeSymlink:
		target, err := os.Readlink(host)
		if err != nil {
			return err
		}
		return os.Symlink(target, at)
	case typ.IsDir():
		if err := os.Mkdir(at, 0o755); err != nil { //nolint:gosec // what is bound there has its own
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

// busyTime is how long a file of a mount may still be open for writing.
const busyTime = time.Second

// readOnly keeps programs with privileges from changing what is mounted at at. The
// kernel refuses while a file there is open for writing (mnt_hold_writers), which one
// that has been closed still is in a child that another thread has just forked, until
// the child executes its program.
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

// explain says what a process lacks that may not do something. It is called by the
// process that was refused.
func explain(err error) error {
	// What the os package refuses is about files, not about namespaces and mounts.
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

package tree

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// UserNamespace returns the attributes of a child that needs no privilege to have a mount
// namespace: it is in a user namespace of its own, with the same user and group, and
// calls Enter. It says what of the host's settings stands in the way; some of it shows
// only when the child is started.
//
// A process can be traced from its user namespace and from those around it: what is to
// trace each other belongs into one, as descendants of one such child.
func UserNamespace() (*syscall.SysProcAttr, error) {
	if err := obstacle(sysctl); err != nil {
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	uid, gid := os.Geteuid(), os.Getegid()
	return &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}},
		// What the program that is started may do in its namespace, which it otherwise
		// loses when it is no root's.
		AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SYS_CHROOT, unix.CAP_SYS_PTRACE},
	}, nil
}

// Enter puts the tree in dir (see Tree.Dir) at its place for the whole calling process,
// which was started with the attributes UserNamespace gives.
func Enter(dir string) error {
	if err := mountAll(dir); err != nil {
		return fmt.Errorf("mount the emulated sysfs: %w", explain(err))
	}
	return nil
}

// DropPrivileges takes from the calling, locked thread all that it may do in its user
// namespace but CAP_SYS_PTRACE, so that the program it executes may not do more than the
// host lets its user, except to trace its neighbours in that namespace: gpreemptd does
// not try without. A user that is root there has it all back after execve.
func DropPrivileges() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	const trace = 1 << unix.CAP_SYS_PTRACE
	kept := [2]unix.CapUserData{{Effective: trace, Permitted: trace, Inheritable: trace}}
	// Ambient capabilities go with the permitted ones (cap_capset).
	if err := unix.Capset(&hdr, &kept[0]); err != nil {
		return fmt.Errorf("drop the privileges of the user namespace: %w", err)
	}
	return nil
}

// obstacle says which of the host's settings forbids user namespaces with mounts to
// programs without privileges. setting gives the number below /proc/sys, false when there
// is none.
func obstacle(setting func(name string) (int, bool)) error {
	for _, s := range []struct {
		name    string
		allowed func(int) bool
		cure    string
	}{
		{"user/max_user_namespaces", func(n int) bool { return n > 0 }, "set it to a number above 0"},
		{"user/max_mnt_namespaces", func(n int) bool { return n > 0 }, "set it to a number above 0"},
		// Debian's and Ubuntu's own.
		{"kernel/unprivileged_userns_clone", func(n int) bool { return n != 0 }, "set it to 1"},
		{"kernel/apparmor_restrict_unprivileged_userns", func(n int) bool { return n == 0 }, "set it to 0, or give the program a profile that allows userns"},
	} {
		if n, ok := setting(s.name); ok && !s.allowed(n) {
			return fmt.Errorf("%w: /proc/sys/%s is %d: %s, or run as root", ErrPrivilege, s.name, n, s.cure)
		}
	}
	return nil
}

func sysctl(name string) (int, bool) {
	b, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	return n, err == nil
}

package kfdemu

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// UserNamespace returns the attributes of a child that can have a mount namespace without
// privilege: it is in a new user namespace, with the same user and group, and calls Enter.
// The error names the setting of the host that prevents it; some settings have an effect
// only when the child is started.
//
// A process can be traced from its user namespace and from the parents of that: programs
// that trace each other must be descendants of one such child.
func UserNamespace() (*syscall.SysProcAttr, error) {
	if err := obstacle(sysctl); err != nil {
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	uid, gid := os.Geteuid(), os.Getegid()
	return &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}},
		// The capabilities of the started program in its namespace, which it would lose
		// if its user is not root.
		AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SYS_CHROOT, unix.CAP_SYS_PTRACE},
	}, nil
}

// DropPrivileges drops all capabilities of the calling, locked thread in its user namespace
// except CAP_SYS_PTRACE. Then the program that it executes has only the rights of its user
// on the host, and may trace other programs in that namespace, which gpreemptd requires. A
// user that is root there regains them all after execve.
func DropPrivileges() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	const trace = 1 << unix.CAP_SYS_PTRACE
	kept := [2]unix.CapUserData{{Effective: trace, Permitted: trace, Inheritable: trace}}
	// Ambient capabilities are dropped with the permitted ones (cap_capset).
	if err := unix.Capset(&hdr, &kept[0]); err != nil {
		return fmt.Errorf("drop the privileges of the user namespace: %w", err)
	}
	return nil
}

// obstacle returns the host's setting that forbids user namespaces with mounts for programs
// without privileges, as an error. setting returns a number below /proc/sys, false if it
// does not exist.
func obstacle(setting func(name string) (int, bool)) error {
	for _, s := range []struct {
		name    string
		allowed func(int) bool
		remedy  string
	}{
		{"user/max_user_namespaces", func(n int) bool { return n > 0 }, "set it to a number above 0"},
		{"user/max_mnt_namespaces", func(n int) bool { return n > 0 }, "set it to a number above 0"},
		// Only in Debian and Ubuntu.
		{"kernel/unprivileged_userns_clone", func(n int) bool { return n != 0 }, "set it to 1"},
		{"kernel/apparmor_restrict_unprivileged_userns", func(n int) bool { return n == 0 }, "set it to 0, or use a profile for the program that allows userns"},
	} {
		if n, ok := setting(s.name); ok && !s.allowed(n) {
			return fmt.Errorf("%w: /proc/sys/%s is %d: %s, or run as root", ErrPrivilege, s.name, n, s.remedy)
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

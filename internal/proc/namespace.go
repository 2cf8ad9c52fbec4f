package proc

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Namespace is a user or pid namespace.
type Namespace struct {
	// Inode identifies it while it lives.
	Inode uint64
	// Owner is, of a user namespace, the effective user who made it.
	Owner uint32
}

// deepestNamespace is how deep the kernel nests namespaces (create_user_ns and
// create_pid_namespace refuse more than 32 below the first).
const deepestNamespace = 33

// Below returns the namespace of a kind, "user" or "pid", that the process is in and that is
// directly below the one of the caller; false when the process is in that of the caller. It
// needs the right to trace the process. The kernel answers by ns_ioctl of fs/nsfs.c.
func (p *Process) Below(kind string) (ns Namespace, is bool, err error) {
	var own unix.Stat_t
	if err := unix.Stat("/proc/self/ns/"+kind, &own); err != nil {
		return ns, false, fmt.Errorf("/proc/self/ns/%s: %w", kind, err)
	}
	fd, err := openat(p.dir, "ns/"+kind, 0)
	if err != nil {
		return ns, false, p.failed("open", "ns/"+kind, err)
	}
	defer func() { _ = unix.Close(fd) }()
	for range deepestNamespace {
		var stat unix.Stat_t
		if err := unix.Fstat(fd, &stat); err != nil {
			return ns, false, p.failed("fstat", "ns/"+kind, err)
		}
		if stat.Ino == own.Ino {
			return ns, is, nil
		}
		ns, is = Namespace{Inode: stat.Ino}, true
		if kind == "user" {
			if ns.Owner, err = unix.IoctlGetUint32(fd, unix.NS_GET_OWNER_UID); err != nil {
				return ns, false, p.failed("NS_GET_OWNER_UID", "ns/"+kind, err)
			}
		}
		parent, err := unix.IoctlRetInt(fd, unix.NS_GET_PARENT)
		if err != nil {
			return ns, false, p.failed("NS_GET_PARENT", "ns/"+kind, err)
		}
		_ = unix.Close(fd)
		fd = parent
	}
	return ns, false, fmt.Errorf("process %d: its %s namespaces have no end", p.key.PID, kind)
}

package seccomp

import "golang.org/x/sys/unix"

// Offsets in struct seccomp_data (include/uapi/linux/seccomp.h).
const (
	dataNR   = 0
	dataArch = 4
	dataArgs = 16
)

// Filter returns the program that selects, on this machine's own architecture:
//
//   - ioctls of the given types, at most 200, with any direction, number and size: drivers
//     have some without a direction, and those of other files with the same type (a
//     terminal's 0x4Bxx) are rare;
//   - open and openat for reading and writing (O_RDWR), and every openat2, whose flags a
//     filter cannot read;
//   - fstat, and newfstatat and statx of a descriptor (AT_EMPTY_PATH).
//
// All other calls are allowed, including those of other architectures.
func Filter(ioctlTypes ...byte) []unix.SockFilter {
	return append(filter(ioctlTypes), ret(unix.SECCOMP_RET_ALLOW))
}

// FilterWithUnmaps is Filter with munmap and mremap. A runtime makes these calls by itself,
// possibly with a lock held: the process that answers must be another. An mmap that replaces
// memory (MAP_FIXED) is not selected: for Go's runtime that is the allocation of memory, which
// Enter needs before its calls are answered.
func FilterWithUnmaps(ioctlTypes ...byte) []unix.SockFilter {
	p := filter(ioctlTypes)
	for _, number := range []uint32{unix.SYS_MUNMAP, unix.SYS_MREMAP} {
		p = append(p, jump(unix.BPF_JEQ, number, 0, 1), ret(unix.SECCOMP_RET_USER_NOTIF))
	}
	return append(p, ret(unix.SECCOMP_RET_ALLOW))
}

// filter returns the program without the verdict on the calls that it does not select.
func filter(ioctlTypes []byte) []unix.SockFilter {
	p := []unix.SockFilter{
		load(dataArch),
		jump(unix.BPF_JEQ, arch, 1, 0),
		ret(unix.SECCOMP_RET_ALLOW),
		load(dataNR),
	}
	on := func(number int, body ...unix.SockFilter) {
		if number >= 0 {
			p = append(p, jump(unix.BPF_JEQ, uint32(number), 0, len(body)))
			p = append(p, body...)
		}
	}
	on(unix.SYS_IOCTL, ioctls(ioctlTypes)...)
	on(unix.SYS_OPENAT, readWrite(2)...)
	on(SysOpen, readWrite(1)...)
	on(unix.SYS_OPENAT2, ret(unix.SECCOMP_RET_USER_NOTIF))
	on(unix.SYS_FSTAT, ret(unix.SECCOMP_RET_USER_NOTIF))
	on(SysNewfstatat, bitSet(3, unix.AT_EMPTY_PATH)...)
	on(unix.SYS_STATX, bitSet(2, unix.AT_EMPTY_PATH)...)
	return p
}

// ioctls returns the action for the request in the second argument.
func ioctls(types []byte) []unix.SockFilter {
	p := []unix.SockFilter{
		loadArg(1),
		alu(unix.BPF_RSH, 8),
		alu(unix.BPF_AND, 0xff),
	}
	for i, t := range types {
		p = append(p, jump(unix.BPF_JEQ, uint32(t), len(types)-i, 0))
	}
	return append(p, ret(unix.SECCOMP_RET_ALLOW), ret(unix.SECCOMP_RET_USER_NOTIF))
}

// readWrite returns the action for the open flags in an argument.
func readWrite(arg uint32) []unix.SockFilter {
	return []unix.SockFilter{
		loadArg(arg),
		alu(unix.BPF_AND, unix.O_ACCMODE),
		jump(unix.BPF_JEQ, unix.O_RDWR, 0, 1),
		ret(unix.SECCOMP_RET_USER_NOTIF),
		ret(unix.SECCOMP_RET_ALLOW),
	}
}

// bitSet returns the action for a flag in an argument.
func bitSet(arg, flag uint32) []unix.SockFilter {
	return []unix.SockFilter{
		loadArg(arg),
		jump(unix.BPF_JSET, flag, 0, 1),
		ret(unix.SECCOMP_RET_USER_NOTIF),
		ret(unix.SECCOMP_RET_ALLOW),
	}
}

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

// loadArg loads the low half of an argument, the only part that the kernel uses of those
// of type int.
func loadArg(n uint32) unix.SockFilter { return load(dataArgs + 8*n) }

func alu(op uint16, k uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_K | op, K: k}
}

// jump skips yes or no instructions.
func jump(op uint16, k uint32, yes, no int) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_K | op, Jt: uint8(yes), Jf: uint8(no), K: k}
}

func ret(action uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
}

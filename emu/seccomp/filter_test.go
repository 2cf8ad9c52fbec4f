package seccomp

import (
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// run executes a filter on a call as the kernel does: loads are of aligned words
// of struct seccomp_data.
func run(t testing.TB, filter []unix.SockFilter, arch, nr uint32, args [6]uint64) uint32 {
	t.Helper()
	mem := binary.LittleEndian.AppendUint32(nil, nr)
	mem = binary.LittleEndian.AppendUint32(mem, arch)
	mem = binary.LittleEndian.AppendUint64(mem, 0)
	for _, arg := range args {
		mem = binary.LittleEndian.AppendUint64(mem, arg)
	}
	var a uint32
	for pc := 0; pc < len(filter); pc++ {
		in := filter[pc]
		jump := func(yes bool) {
			if yes {
				pc += int(in.Jt)
			} else {
				pc += int(in.Jf)
			}
		}
		switch in.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			a = binary.LittleEndian.Uint32(mem[in.K:])
		case unix.BPF_ALU | unix.BPF_K | unix.BPF_AND:
			a &= in.K
		case unix.BPF_ALU | unix.BPF_K | unix.BPF_RSH:
			a >>= in.K
		case unix.BPF_JMP | unix.BPF_K | unix.BPF_JEQ:
			jump(a == in.K)
		case unix.BPF_JMP | unix.BPF_K | unix.BPF_JSET:
			jump(a&in.K != 0)
		case unix.BPF_RET | unix.BPF_K:
			return in.K
		default:
			t.Fatalf("instruction %d has the code %#x", pc, in.Code)
		}
	}
	t.Fatal("the program ends without a verdict")
	return 0
}

// handedOver reports whether Filter selects a call, according to its comment.
func handedOver(types []byte, nr uint32, args [6]uint64) bool {
	readWrite := func(flags uint64) bool { return flags&unix.O_ACCMODE == unix.O_RDWR }
	switch int(nr) {
	case unix.SYS_IOCTL:
		return slices.Contains(types, byte(args[1]>>8))
	case unix.SYS_OPENAT:
		return readWrite(args[2])
	case unix.SYS_OPENAT2, unix.SYS_FSTAT:
		return true
	case SysNewfstatat:
		return args[3]&unix.AT_EMPTY_PATH != 0
	case unix.SYS_STATX:
		return args[2]&unix.AT_EMPTY_PATH != 0
	case SysOpen:
		return readWrite(args[1])
	default:
		return false
	}
}

func TestFilterSelectsCalls(t *testing.T) {
	const read, write = 2 << 30, 1 << 30
	at := unix.AT_FDCWD
	cwd := uint64(at)
	filter := Filter('X', 'y')
	for name, tc := range map[string]struct {
		nr   uint32
		args [6]uint64
		want uint32
	}{
		"read ioctl":              {unix.SYS_IOCTL, [6]uint64{3, read | 8<<16 | 'X'<<8 | 1}, unix.SECCOMP_RET_USER_NOTIF},
		"write ioctl, other type": {unix.SYS_IOCTL, [6]uint64{3, write | 8<<16 | 'y'<<8 | 1}, unix.SECCOMP_RET_USER_NOTIF},
		"ioctl of any size":       {unix.SYS_IOCTL, [6]uint64{3, read | write | 0x3fff<<16 | 'X'<<8 | 0xff}, unix.SECCOMP_RET_USER_NOTIF},
		"sign-extended request":   {unix.SYS_IOCTL, [6]uint64{3, 0xffffffff00000000 | read | 'X'<<8}, unix.SECCOMP_RET_USER_NOTIF},
		"ioctl of no direction":   {unix.SYS_IOCTL, [6]uint64{3, 'X'<<8 | 1}, unix.SECCOMP_RET_USER_NOTIF},
		"terminal ioctl":          {unix.SYS_IOCTL, [6]uint64{3, unix.TCGETS}, unix.SECCOMP_RET_ALLOW},
		"ioctl of another type":   {unix.SYS_IOCTL, [6]uint64{3, read | 8<<16 | 'Z'<<8}, unix.SECCOMP_RET_ALLOW},
		"read and write":          {unix.SYS_OPENAT, [6]uint64{cwd, 1, unix.O_RDWR | unix.O_CLOEXEC}, unix.SECCOMP_RET_USER_NOTIF},
		"read only":               {unix.SYS_OPENAT, [6]uint64{cwd, 1, unix.O_RDONLY | unix.O_CLOEXEC}, unix.SECCOMP_RET_ALLOW},
		"write only":              {unix.SYS_OPENAT, [6]uint64{cwd, 1, unix.O_WRONLY}, unix.SECCOMP_RET_ALLOW},
		"openat2":                 {unix.SYS_OPENAT2, [6]uint64{cwd, 1, 2}, unix.SECCOMP_RET_USER_NOTIF},
		"fstat":                   {unix.SYS_FSTAT, [6]uint64{3}, unix.SECCOMP_RET_USER_NOTIF},
		"newfstatat of a path":    {SysNewfstatat, [6]uint64{cwd, 1, 2, unix.AT_SYMLINK_NOFOLLOW}, unix.SECCOMP_RET_ALLOW},
		"newfstatat of a file":    {SysNewfstatat, [6]uint64{3, 1, 2, unix.AT_EMPTY_PATH}, unix.SECCOMP_RET_USER_NOTIF},
		"statx of a path":         {unix.SYS_STATX, [6]uint64{cwd, 1, 0, unix.STATX_ALL}, unix.SECCOMP_RET_ALLOW},
		"statx of a file":         {unix.SYS_STATX, [6]uint64{3, 1, unix.AT_EMPTY_PATH, unix.STATX_ALL}, unix.SECCOMP_RET_USER_NOTIF},
	} {
		if got := run(t, filter, arch, tc.nr, tc.args); got != tc.want {
			t.Errorf("%s: got %#x, want %#x", name, got, tc.want)
		}
		if got := run(t, filter, unix.AUDIT_ARCH_I386, tc.nr, tc.args); got != unix.SECCOMP_RET_ALLOW {
			t.Errorf("%s from a 32-bit program: got %#x, want it allowed", name, got)
		}
	}
}

func TestFilterWithUnmapsSelectsThemToo(t *testing.T) {
	for nr, want := range map[uint32][2]uint32{
		unix.SYS_MUNMAP: {unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_USER_NOTIF},
		unix.SYS_MREMAP: {unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_USER_NOTIF},
		unix.SYS_MMAP:   {unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_ALLOW},
		unix.SYS_FSTAT:  {unix.SECCOMP_RET_USER_NOTIF, unix.SECCOMP_RET_USER_NOTIF},
	} {
		args := [6]uint64{4096, 4096, 3, unix.MAP_PRIVATE | unix.MAP_FIXED}
		got := [2]uint32{run(t, Filter('X'), arch, nr, args), run(t, FilterWithUnmaps('X'), arch, nr, args)}
		if got != want {
			t.Errorf("call %d, without and with: got %#x, want %#x", nr, got, want)
		}
	}
}

func TestOpenIsSelectedWhereItExists(t *testing.T) {
	open := SysOpen
	if open < 0 {
		t.Skip("this architecture has no such call")
	}
	for flags, want := range map[uint64]uint32{
		unix.O_RDWR:   unix.SECCOMP_RET_USER_NOTIF,
		unix.O_RDONLY: unix.SECCOMP_RET_ALLOW,
	} {
		if got := run(t, Filter('X'), arch, uint32(open), [6]uint64{1, flags}); got != want {
			t.Errorf("flags %#x: got %#x, want %#x", flags, got, want)
		}
	}
}

// maxTypes is the most types of a filter.
const maxTypes = 200

func TestFilterOfManyTypes(t *testing.T) {
	types := make([]byte, maxTypes)
	for i := range types {
		types[i] = byte(i)
	}
	filter := Filter(types...)
	for i := range uint64(256) {
		want := uint32(unix.SECCOMP_RET_ALLOW)
		if i < maxTypes {
			want = unix.SECCOMP_RET_USER_NOTIF
		}
		if got := run(t, filter, arch, unix.SYS_IOCTL, [6]uint64{0, 1<<30 | i<<8}); got != want {
			t.Errorf("type %d of %d: got %#x, want %#x", i, maxTypes, got, want)
		}
	}
}

func FuzzFilter(f *testing.F) {
	for _, nr := range []uint32{unix.SYS_IOCTL, unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_FSTAT, SysNewfstatat, unix.SYS_STATX} {
		f.Add([]byte("Xy"), nr, uint64(0x40005801), uint64(2), uint64(0x1000))
	}
	f.Fuzz(func(t *testing.T, types []byte, nr uint32, a1, a2, a3 uint64) {
		types = types[:min(len(types), maxTypes)]
		args := [6]uint64{0, a1, a2, a3}
		want := uint32(unix.SECCOMP_RET_ALLOW)
		if handedOver(types, nr, args) {
			want = unix.SECCOMP_RET_USER_NOTIF
		}
		if got := run(t, Filter(types...), arch, nr, args); got != want {
			t.Errorf("types %q, call %d(%x): got %#x, want %#x", types, nr, args, got, want)
		}
	})
}

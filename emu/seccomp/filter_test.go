package seccomp

import (
	"encoding/binary"
	"runtime"
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
func handedOver(goarch string, types []byte, nr uint32, args [6]uint64) bool {
	n := architectures[goarch]
	readWrite := func(flags uint64) bool { return flags&unix.O_ACCMODE == unix.O_RDWR }
	switch nr {
	case n.ioctl:
		request := uint32(args[1])
		return request>>30 != 0 && slices.Contains(types, byte(request>>8))
	case n.openat:
		return readWrite(args[2])
	case n.openat2, n.fstat:
		return true
	case n.newfstatat:
		return args[3]&unix.AT_EMPTY_PATH != 0
	case n.statx:
		return args[2]&unix.AT_EMPTY_PATH != 0
	case n.open:
		return n.open != 0 && readWrite(args[1])
	default:
		return false
	}
}

func TestFilterSelectsCalls(t *testing.T) {
	const read, write = 2 << 30, 1 << 30
	at := unix.AT_FDCWD
	cwd := uint64(at)
	for _, goarch := range []string{"amd64", "arm64"} {
		n := architectures[goarch]
		filter, err := Filter(goarch, 'X', 'y')
		if err != nil {
			t.Fatal(err)
		}
		for name, tc := range map[string]struct {
			nr   uint32
			args [6]uint64
			want uint32
		}{
			"read ioctl":              {n.ioctl, [6]uint64{3, read | 8<<16 | 'X'<<8 | 1}, unix.SECCOMP_RET_USER_NOTIF},
			"write ioctl, other type": {n.ioctl, [6]uint64{3, write | 8<<16 | 'y'<<8 | 1}, unix.SECCOMP_RET_USER_NOTIF},
			"ioctl of any size":       {n.ioctl, [6]uint64{3, read | write | 0x3fff<<16 | 'X'<<8 | 0xff}, unix.SECCOMP_RET_USER_NOTIF},
			"sign-extended request":   {n.ioctl, [6]uint64{3, 0xffffffff00000000 | read | 'X'<<8}, unix.SECCOMP_RET_USER_NOTIF},
			"ioctl of no direction":   {n.ioctl, [6]uint64{3, 'X'<<8 | 1}, unix.SECCOMP_RET_USER_NOTIF},
			"terminal ioctl":          {n.ioctl, [6]uint64{3, unix.TCGETS}, unix.SECCOMP_RET_ALLOW},
			"ioctl of another type":   {n.ioctl, [6]uint64{3, read | 8<<16 | 'Z'<<8}, unix.SECCOMP_RET_ALLOW},
			"read and write":          {n.openat, [6]uint64{cwd, 1, unix.O_RDWR | unix.O_CLOEXEC}, unix.SECCOMP_RET_USER_NOTIF},
			"read only":               {n.openat, [6]uint64{cwd, 1, unix.O_RDONLY | unix.O_CLOEXEC}, unix.SECCOMP_RET_ALLOW},
			"write only":              {n.openat, [6]uint64{cwd, 1, unix.O_WRONLY}, unix.SECCOMP_RET_ALLOW},
			"openat2":                 {n.openat2, [6]uint64{cwd, 1, 2}, unix.SECCOMP_RET_USER_NOTIF},
			"fstat":                   {n.fstat, [6]uint64{3}, unix.SECCOMP_RET_USER_NOTIF},
			"newfstatat of a path":    {n.newfstatat, [6]uint64{cwd, 1, 2, unix.AT_SYMLINK_NOFOLLOW}, unix.SECCOMP_RET_ALLOW},
			"newfstatat of a file":    {n.newfstatat, [6]uint64{3, 1, 2, unix.AT_EMPTY_PATH}, unix.SECCOMP_RET_USER_NOTIF},
			"statx of a path":         {n.statx, [6]uint64{cwd, 1, 0, unix.STATX_ALL}, unix.SECCOMP_RET_ALLOW},
			"statx of a file":         {n.statx, [6]uint64{3, 1, unix.AT_EMPTY_PATH, unix.STATX_ALL}, unix.SECCOMP_RET_USER_NOTIF},
		} {
			if got := run(t, filter, n.arch, tc.nr, tc.args); got != tc.want {
				t.Errorf("%s: %s: got %#x, want %#x", goarch, name, got, tc.want)
			}
			if got := run(t, filter, unix.AUDIT_ARCH_I386, tc.nr, tc.args); got != unix.SECCOMP_RET_ALLOW {
				t.Errorf("%s: %s from a 32-bit program: got %#x, want it allowed", goarch, name, got)
			}
		}
	}
}

func TestOpenIsSelectedWhereItExists(t *testing.T) {
	filter, err := Filter("amd64", 'X')
	if err != nil {
		t.Fatal(err)
	}
	for flags, want := range map[uint64]uint32{
		unix.O_RDWR:   unix.SECCOMP_RET_USER_NOTIF,
		unix.O_RDONLY: unix.SECCOMP_RET_ALLOW,
	} {
		if got := run(t, filter, unix.AUDIT_ARCH_X86_64, architectures["amd64"].open, [6]uint64{1, flags}); got != want {
			t.Errorf("flags %#x: got %#x, want %#x", flags, got, want)
		}
	}
}

func TestFilterNumbersAreTheMachines(t *testing.T) {
	n, ok := architectures[runtime.GOARCH]
	if !ok {
		t.Skip("no numbers for " + runtime.GOARCH)
	}
	want := numbers{
		arch: n.arch, open: n.open,
		ioctl: unix.SYS_IOCTL, openat: unix.SYS_OPENAT, openat2: unix.SYS_OPENAT2,
		fstat: unix.SYS_FSTAT, newfstatat: sysNewfstatat, statx: unix.SYS_STATX,
	}
	if n != want {
		t.Errorf("got %+v, want %+v", n, want)
	}
}

func TestFilterHasLimits(t *testing.T) {
	if _, err := Filter("sparc64", 'X'); err == nil {
		t.Error("a filter for an architecture without numbers")
	}
	types := make([]byte, maxTypes+1)
	if _, err := Filter("amd64", types...); err == nil {
		t.Error("a filter for more types than its jumps can pass")
	}
	for i := range types {
		types[i] = byte(i)
	}
	filter, err := Filter("amd64", types[:maxTypes]...)
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint64(256) {
		want := uint32(unix.SECCOMP_RET_ALLOW)
		if i < maxTypes {
			want = unix.SECCOMP_RET_USER_NOTIF
		}
		if got := run(t, filter, unix.AUDIT_ARCH_X86_64, 16, [6]uint64{0, 1<<30 | i<<8}); got != want {
			t.Errorf("type %d of %d: got %#x, want %#x", i, maxTypes, got, want)
		}
	}
}

func FuzzFilter(f *testing.F) {
	for _, n := range architectures {
		for _, nr := range []uint32{n.ioctl, n.openat, n.open, n.openat2, n.fstat, n.newfstatat, n.statx} {
			f.Add([]byte("Xy"), nr, uint64(0x40005801), uint64(2), uint64(0x1000))
		}
	}
	f.Fuzz(func(t *testing.T, types []byte, nr uint32, a1, a2, a3 uint64) {
		types = types[:min(len(types), maxTypes)]
		args := [6]uint64{0, a1, a2, a3}
		for goarch, n := range architectures {
			filter, err := Filter(goarch, types...)
			if err != nil {
				t.Fatal(err)
			}
			want := uint32(unix.SECCOMP_RET_ALLOW)
			if handedOver(goarch, types, nr, args) {
				want = unix.SECCOMP_RET_USER_NOTIF
			}
			if got := run(t, filter, n.arch, nr, args); got != want {
				t.Errorf("%s: types %q, call %d(%x): got %#x, want %#x", goarch, types, nr, args, got, want)
			}
		}
	})
}

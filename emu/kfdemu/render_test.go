package kfdemu

import (
	"encoding/binary"
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// memory is that of a process, from base on.
type memory []byte

const base = 0x1000

var errFault = errors.New("no memory there")

func (m memory) at(n int, addr uint64) ([]byte, error) {
	if addr < base || uint64(n) > uint64(len(m)) || addr-base > uint64(len(m))-uint64(n) {
		return nil, errFault
	}
	return m[addr-base:][:n], nil
}

func (m memory) ReadAt(p []byte, addr uint64) error {
	b, err := m.at(len(p), addr)
	copy(p, b)
	return err
}

func (m memory) WriteAt(p []byte, addr uint64) error {
	b, err := m.at(len(p), addr)
	copy(b, p)
	return err
}

func (m memory) put64(addr uint64, values ...uint64) {
	for i, v := range values {
		binary.LittleEndian.PutUint64(m[addr-base+8*uint64(i):], v)
	}
}

func (m memory) get32(addr uint64) uint32 { return binary.LittleEndian.Uint32(m[addr-base:]) }
func (m memory) get64(addr uint64) uint64 { return binary.LittleEndian.Uint64(m[addr-base:]) }

// Requests of <drm/drm.h> and <drm/amdgpu_drm.h>.
const (
	drmVersion   = 0xc0406400
	drmGetClient = 0xc0286405
	drmGetCap    = 0xc010640c
	amdgpuInfo   = 0x40206445
)

var mi300x = RenderNode{
	PCIID: 0x74a1, GFX: 90402, SIMDs: 1216, SIMDsPerCU: 4, Arrays: 32, ArraysPerEngine: 1, CUsPerArray: 10, WaveSize: 64,
	EngineMHz: 2100, MemoryMHz: 1300, MemoryWidth: 8192, VRAM: 192 << 30, GTT: 256 << 30,
}

// query is AMDGPU_INFO of a query whose answer goes to 0x1100.
func query(m memory, number uint32, size uint64, parameters ...uint64) syscall.Errno {
	m.put64(base, 0x1100, size|uint64(number)<<32)
	m.put64(base+16, parameters...)
	return mi300x.Ioctl(amdgpuInfo, base, m)
}

func TestVersionNamesTheDriverAsEmulated(t *testing.T) {
	m := make(memory, 0x400)
	// The first call is for the lengths, the second for the texts, as in drmGetVersion.
	if errno := mi300x.Ioctl(drmVersion, base, m); errno != 0 {
		t.Fatal(errno)
	}
	lengths := []uint64{m.get64(base + 16), m.get64(base + 32), m.get64(base + 48)}
	if diff := cmp.Diff([]uint64{6, 8, 18}, lengths); diff != "" {
		t.Errorf("lengths (-want +got):\n%s", diff)
	}
	m.put64(base+16, 6, 0x1100, 4, 0x1110, 100, 0x1120)
	if errno := mi300x.Ioctl(drmVersion, base, m); errno != 0 {
		t.Fatal(errno)
	}
	got := []string{string(m[0x100:0x106]), string(m[0x110:0x118]), strings.TrimRight(string(m[0x120:0x140]), "\x00")}
	if diff := cmp.Diff([]string{"amdgpu", "2015\x00\x00\x00\x00", "AMD GPU (EMULATED)"}, got); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
	if m.get32(base) != 3 {
		t.Errorf("libdrm supports only major version 3, this is %d", m.get32(base))
	}
}

func TestDeviceInfoHasTheLayoutOfTheHeader(t *testing.T) {
	m := make(memory, 0x400)
	if errno := query(m, 0x16, 0x300); errno != 0 {
		t.Fatal(errno)
	}
	const at = 0x1100
	got := map[string]uint64{
		"device_id": uint64(m.get32(at)), "family": uint64(m.get32(at + 16)), "engines": uint64(m.get32(at + 20)),
		"max_engine_clock": m.get64(at + 32), "cu_active_number": uint64(m.get32(at + 48)), "pcie_gen": uint64(m.get32(at + 132)),
		"virtual_address_max": m.get64(at + 152), "vram_type": uint64(m.get32(at + 176)), "vram_bit_width": uint64(m.get32(at + 180)),
		"wave_front_size": uint64(m.get32(at + 240)), "num_cu_per_sh": uint64(m.get32(at + 248)), "pcie_num_lanes": uint64(m.get32(at + 268)),
		"high_va_offset": m.get64(at + 336),
	}
	want := map[string]uint64{
		"device_id": 0x74a1, "family": 141, "engines": 32, "max_engine_clock": 2_100_000, "cu_active_number": 304, "pcie_gen": 5,
		"virtual_address_max": 1 << 47, "vram_type": 6, "vram_bit_width": 8192, "wave_front_size": 64, "num_cu_per_sh": 10,
		"pcie_num_lanes": 16, "high_va_offset": 0xffff_8000_0000_0000,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("device info (-want +got):\n%s", diff)
	}
}

// An older library has a shorter struct, a newer one a longer one.
func TestAnswersAreCutToTheCallersSize(t *testing.T) {
	for _, test := range []struct {
		name  string
		query uint32
		room  uint64
		want  int
	}{
		{"short device info", 0x16, 40, 40},
		{"long device info", 0x16, 0x2ff, 440},
		{"accel working", 0x00, 4, 4},
		{"memory", 0x19, 0x200, 96},
		{"vram and gtt", 0x14, 24, 24},
		{"vram usage", 0x10, 8, 8},
		{"vram lost", 0x1f, 4, 4},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := make(memory, 0x400)
			for i := range m[0x100:] {
				m[0x100+i] = 0xa5
			}
			if errno := query(m, test.query, test.room); errno != 0 {
				t.Fatal(errno)
			}
			if got := strings.IndexByte(string(m[0x100+test.want:]), 0xa5); got != 0 {
				t.Errorf("more than %d bytes were written", test.want)
			}
			if m[0x100+test.want-1] == 0xa5 {
				t.Errorf("less than %d bytes were written", test.want)
			}
		})
	}
}

func TestMemoryIsThatOfTheDevice(t *testing.T) {
	m := make(memory, 0x400)
	if errno := query(m, 0x14, 24); errno != 0 {
		t.Fatal(errno)
	}
	got := []uint64{m.get64(0x1100), m.get64(0x1108), m.get64(0x1110)}
	if diff := cmp.Diff([]uint64{mi300x.VRAM, mi300x.VRAM, mi300x.GTT}, got); diff != "" {
		t.Errorf("VRAM_GTT (-want +got):\n%s", diff)
	}
	if errno := query(m, 0x19, 96); errno != 0 {
		t.Fatal(errno)
	}
	got = []uint64{m.get64(0x1100), m.get64(0x1110), m.get64(0x1140)}
	if diff := cmp.Diff([]uint64{mi300x.VRAM, 0, mi300x.GTT}, got); diff != "" {
		t.Errorf("MEMORY: total VRAM, used VRAM, total GTT (-want +got):\n%s", diff)
	}
}

func TestRegistersAreReadUpToTheDriversLimit(t *testing.T) {
	m := make(memory, 0x400)
	const offset = 0x263e
	if errno := query(m, 0x15, 4, offset|1<<32, 0xffffffff); errno != 0 {
		t.Errorf("one register: %v", errno)
	}
	if errno := query(m, 0x15, 4*129, offset|129<<32, 0xffffffff); errno != syscall.EINVAL {
		t.Errorf("129 registers: got %v, the driver reads 128", errno)
	}
}

func TestErrorsAreThoseOfTheDriver(t *testing.T) {
	ask := func(query uint32, addr, size uint64) func(memory) uint64 {
		return func(m memory) uint64 {
			m.put64(base, addr, size|uint64(query)<<32)
			return base
		}
	}
	for _, test := range []struct {
		name string
		req  uint32
		args func(memory) uint64
		want syscall.Errno
	}{
		{"another driver's ioctl", 0x80184b01, func(memory) uint64 { return base }, syscall.ENOTTY},
		{"an unknown number of DRM", 0xc04064ff, func(memory) uint64 { return base }, syscall.EINVAL},
		{"a legacy call on a render node", drmGetClient, func(memory) uint64 { return base }, syscall.EACCES},
		{"an unknown query", amdgpuInfo, ask(0x7f, 0x1100, 4), syscall.EINVAL},
		{"an answer of size 0", amdgpuInfo, ask(0x16, 0x1100, 0), syscall.EINVAL},
		{"no address for the answer", amdgpuInfo, ask(0x16, 0, 4), syscall.EINVAL},
		{"an answer to unmapped memory", amdgpuInfo, ask(0x16, 8, 4), syscall.EFAULT},
		{"unmapped arguments", amdgpuInfo, func(memory) uint64 { return 8 }, syscall.EFAULT},
		{"a text to unmapped memory", drmVersion, func(m memory) uint64 {
			m.put64(base+16, 6, 8)
			return base
		}, syscall.EFAULT},
		{"an unknown capability", drmGetCap, func(m memory) uint64 {
			m.put64(base, 99)
			return base
		}, syscall.EOPNOTSUPP},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := make(memory, 0x400)
			if got := mi300x.Ioctl(test.req, test.args(m), m); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestCapabilityOfSharingBuffers(t *testing.T) {
	m := make(memory, 0x400)
	m.put64(base, 5)
	if errno := mi300x.Ioctl(drmGetCap, base, m); errno != 0 || m.get64(base+8) != 3 {
		t.Errorf("DRM_CAP_PRIME: got %v and %d, want import and export", errno, m.get64(base+8))
	}
}

func TestStatIsThatOfADeviceFile(t *testing.T) {
	var st syscall.Stat_t
	b := Stat(DRMMajor, 300, 77)
	if _, err := binary.Decode(b, binary.LittleEndian, &st); err != nil || len(b) != binary.Size(st) {
		t.Fatalf("%d bytes, not %d: %v", len(b), binary.Size(st), err)
	}
	// gnu_dev_makedev(226, 300): the minor number's upper bits are above the major's.
	want := syscall.Stat_t{Dev: 5, Ino: 77, Nlink: 1, Mode: syscall.S_IFCHR | 0o666, Rdev: 226<<8 | 300&0xff | 300>>8<<20, Blksize: 4096}
	if diff := cmp.Diff(want, st); diff != "" {
		t.Errorf("stat (-want +got):\n%s", diff)
	}
}

func TestStatxIsThatOfADeviceFile(t *testing.T) {
	m := memory(Statx(KFDMajor, 0, 77))
	if len(m) != 256 {
		t.Fatalf("struct statx has 256 bytes, not %d", len(m))
	}
	got := map[string]uint64{
		"mask": uint64(m.get32(base)), "links": uint64(m.get32(base + 16)), "mode": uint64(m.get32(base + 28)), "ino": m.get64(base + 32),
		"rdev_major": uint64(m.get32(base + 128)), "rdev_minor": uint64(m.get32(base + 132)), "dev": m.get64(base + 136),
	}
	want := map[string]uint64{"mask": 0x7ff, "links": 1, "mode": syscall.S_IFCHR | 0o666, "ino": 77, "rdev_major": 236, "rdev_minor": 0, "dev": 5 << 32}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("statx (-want +got):\n%s", diff)
	}
}

// Any request is answered with an errno, and touches only the program's memory.
func FuzzIoctl(f *testing.F) {
	f.Add(uint32(drmVersion), uint64(base), make([]byte, 256))
	f.Add(uint32(amdgpuInfo), uint64(base), []byte("\x00\x11\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x16\x00\x00\x00"))
	f.Add(uint32(drmGetCap), uint64(0), []byte{5})
	f.Fuzz(func(_ *testing.T, req uint32, arg uint64, content []byte) {
		m := make(memory, 0x800)
		copy(m, content)
		mi300x.Ioctl(req, arg, m)
	})
}

package kfdemu

import (
	"encoding/binary"
	"structs"
	"syscall"
)

// What fstat returns for a device file besides its number.
const (
	deviceMode  = syscall.S_IFCHR | 0o666
	blockBytes  = 4096
	devtmpfsDev = 5
)

// Stat returns the struct stat of a character device, as fstat(2) writes it.
func Stat(major, minor uint32, inode uint64) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, syscall.Stat_t{
		Dev: devtmpfsDev, Ino: inode, Nlink: 1, Mode: deviceMode, Rdev: deviceID(major, minor), Blksize: blockBytes,
	})
	if err != nil {
		panic("kfdemu: " + err.Error()) // a size that is not fixed
	}
	return b
}

// deviceID returns a device number in the form of stat (new_encode_dev).
func deviceID(major, minor uint32) uint64 {
	return uint64(minor&0xff | major<<8 | minor&^0xff<<12)
}

// statx is struct statx (include/uapi/linux/stat.h).
type statx struct {
	_                    structs.HostLayout
	Mask, BlockBytes     uint32
	Attributes           uint64
	Links, UID, GID      uint32
	Mode                 uint16
	_                    uint16
	Inode, Bytes, Blocks uint64
	AttributesMask       uint64
	Times                [4][2]uint64
	RMajor, RMinor       uint32
	Major, Minor         uint32
	_                    [14]uint64
}

// basicStats is STATX_BASIC_STATS.
const basicStats = 0x7ff

// Statx is Stat for statx(2).
func Statx(major, minor uint32, inode uint64) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, statx{
		Mask: basicStats, BlockBytes: blockBytes, Links: 1, Mode: deviceMode, Inode: inode, RMajor: major, RMinor: minor, Minor: devtmpfsDev,
	})
	if err != nil {
		panic("kfdemu: " + err.Error()) // a size that is not fixed
	}
	return b
}

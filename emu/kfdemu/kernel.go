package kfdemu

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// clock reads one of the kernel's clocks, in nanoseconds.
func clock(id int32) int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		panic("kfdemu: " + err.Error()) // every kernel has these clocks
	}
	return ts.Nano()
}

// readString reads a path, which ends with a zero byte, page by page.
func readString(m *Space, at uint64) (string, error) {
	var text []byte
	for len(text) < unix.PathMax {
		b := make([]byte, 256-at%256)
		if err := m.ReadAt(b, at); err != nil {
			return "", err
		}
		part, _, ended := bytes.Cut(b, []byte{0})
		text = append(text, part...)
		if ended {
			return string(text), nil
		}
		at += uint64(len(b))
	}
	return "", unix.ENAMETOOLONG
}

func readWord(m *Space, at uint64) (uint64, error) {
	b := make([]byte, 8)
	err := m.ReadAt(b, at)
	return binary.NativeEndian.Uint64(b), err
}

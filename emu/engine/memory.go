package engine

import (
	"encoding/binary"
	"errors"
	"syscall"
)

// Memory is the memory of a process. Its methods are called by several goroutines at
// once, some with the machine locked, and must not wait for the engine or the machine.
// They do all of p or fail: with an error that is syscall.EFAULT where nothing is
// mapped, which is a fault of the GPU, and with any other when the memory is gone,
// which ends the queue quietly.
type Memory interface {
	ReadAt(p []byte, addr uint64) error
	WriteAt(p []byte, addr uint64) error
}

// isFault reports whether an error is that of an unmapped address, and not of a process
// that ended.
func isFault(err error) bool { return errors.Is(err, syscall.EFAULT) }

func readWord(m Memory, addr uint64) (uint64, error) {
	var b [8]byte
	err := m.ReadAt(b[:], addr)
	return binary.LittleEndian.Uint64(b[:]), err
}

package kfdemu

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

// userMemory is memory of a thread that is in a call, as copy_from_user and
// copy_to_user see it: its protection holds.
type userMemory struct {
	tid  int32
	addr uint64
}

// unmapped is an address that is never mapped.
const unmapped = 1 << 63

// Memory returns the memory of the thread at addr, nil for NULL. Use it only during a call
// of the thread: then the thread cannot exec, or end unnoticed.
func (t *Task) Memory(addr uint64) driver.Memory { return memoryAt(t.tid, addr) }

func memoryAt(tid int32, addr uint64) driver.Memory {
	if addr == 0 {
		return nil
	}
	return userMemory{tid, addr}
}

// Read implements driver.Memory.
func (m userMemory) Read(p []byte) bool { return m.move(unix.ProcessVMReadv, p) }

// Write implements driver.Memory.
func (m userMemory) Write(p []byte) bool { return m.move(unix.ProcessVMWritev, p) }

func (m userMemory) move(how func(int, []unix.Iovec, []unix.RemoteIovec, uint) (int, error), p []byte) bool {
	if len(p) == 0 {
		return true
	}
	n, err := how(int(m.tid), []unix.Iovec{{Base: &p[0], Len: uint64(len(p))}}, []unix.RemoteIovec{{Base: uintptr(m.addr), Len: len(p)}}, 0)
	return err == nil && n == len(p)
}

// At implements driver.Memory.
func (m userMemory) At(off int) driver.Memory {
	return userMemory{m.tid, m.addr + uint64(off)}
}

// Pointer implements driver.Memory.
func (m userMemory) Pointer(off int) driver.Memory {
	var b [8]byte
	if !m.At(off).Read(b[:]) {
		return userMemory{m.tid, unmapped}
	}
	return memoryAt(m.tid, binary.NativeEndian.Uint64(b[:]))
}

package kfdemu

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"

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

// argumentMemory is the argument of a call, which was read once: the faults, the events and
// the driver see the same.
type argumentMemory struct {
	driver.Memory
	read []byte
}

// argument reads the argument of a call, of n bytes.
func argument(m driver.Memory, n int) driver.Memory {
	read := make([]byte, n)
	if m == nil || n == 0 || !m.Read(read) {
		return m
	}
	return argumentMemory{m, read}
}

// Read implements driver.Memory.
func (m argumentMemory) Read(p []byte) bool {
	if len(p) > len(m.read) {
		return m.Memory.Read(p)
	}
	copy(p, m.read)
	return true
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

// mapped reports whether the thread's process has mapped the addresses from start to last, and
// none of them is a device's: VM_IO and VM_PFNMAP of the kernel are here the pages that the
// kernel provides itself, and the emulated files, which are devices for the program.
func (t *Task) mapped(start, last uint64) bool {
	maps, err := os.ReadFile(procPath(t.tid, "maps"))
	if err != nil {
		return false // it has ended
	}
	for line := range bytes.Lines(maps) { // in ascending order
		var from, to uint64
		if _, err := fmt.Sscanf(string(line), "%x-%x ", &from, &to); err != nil {
			return false
		}
		if to <= start {
			continue
		}
		if from > start || bytes.Contains(line, []byte("[vvar")) || bytes.Contains(line, []byte("[vsyscall")) || bytes.Contains(line, []byte("/memfd:kfd")) {
			return false
		}
		if start = to; start > last {
			return true
		}
	}
	return false
}

package kfdtest

import (
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// nowhere is the target of Unmapped. It is never read or written.
var nowhere uint64

// Unmapped returns an address where nothing is mapped: an access of the driver fails with
// EFAULT.
func Unmapped() kfd.Pointer { return kfd.PointerTo(&nowhere) }

// userMemory is memory of the real process, which all fake processes share.
type userMemory struct{ at kfd.Pointer }

// memory returns what p points to, nil for NULL.
func memory(p kfd.Pointer) driver.Memory {
	if p.IsNil() {
		return nil
	}
	return userMemory{p}
}

func (m userMemory) Read(p []byte) bool {
	if m.at == Unmapped() {
		return false
	}
	copy(p, kfd.SliceAt[byte](m.at, len(p)))
	return true
}

// Write changes only bytes that differ: there may be Go pointers in the memory.
func (m userMemory) Write(p []byte) bool {
	if m.at == Unmapped() {
		return false
	}
	to := kfd.SliceAt[byte](m.at, len(p))
	for i, b := range p {
		if to[i] != b {
			to[i] = b
		}
	}
	return true
}

func (m userMemory) At(off int) driver.Memory {
	if m.at == Unmapped() {
		return m
	}
	return userMemory{m.at.Add(off)}
}

func (m userMemory) Pointer(off int) driver.Memory {
	return memory(*kfd.As[kfd.Pointer](m.at.Add(off)))
}

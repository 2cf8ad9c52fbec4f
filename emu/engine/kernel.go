package engine

import (
	"encoding/binary"
	"time"
)

// KernelMagic is the first field of an emulated kernel: "KFDEMUK1" in memory.
const KernelMagic uint64 = 'K' | 'F'<<8 | 'D'<<16 | 'E'<<24 | 'M'<<32 | 'U'<<40 | 'K'<<48 | '1'<<56

// Op is the operation of an emulated kernel, done when it ends.
type Op uint32

// The operations.
const (
	// OpNothing has no effect, and no kernarg.
	OpNothing Op = 0
	// OpMix counts, and mixes a value into a hash: see Mix.
	OpMix Op = 1
)

// KernelBytes is the size of a Kernel in memory.
const KernelBytes = 24

// WholeGPU is the occupancy of a kernel that fills the GPU.
const WholeGPU = 1_000_000

// MaxKernelTime limits the duration of an emulated kernel.
const MaxKernelTime = 24 * time.Hour

// Kernel is an emulated kernel, the target of a kernel_object.
type Kernel struct {
	Op Op
	// Occupancy is the share of the GPU it fills, in millionths; 0 means all.
	Occupancy uint32
	// Duration is the time it takes alone on the GPU, in nanoseconds in memory; 0 means
	// the time of real kernels.
	Duration time.Duration
}

// Put writes the kernel.
func (k Kernel) Put(b []byte) {
	binary.LittleEndian.PutUint64(b, KernelMagic)
	binary.LittleEndian.PutUint32(b[8:], uint32(k.Op))
	binary.LittleEndian.PutUint32(b[12:], k.Occupancy)
	binary.LittleEndian.PutUint64(b[16:], uint64(k.Duration))
}

// DecodeKernel reads the first KernelBytes of b, and reports whether they are an emulated
// kernel.
func DecodeKernel(b []byte) (Kernel, bool) {
	if binary.LittleEndian.Uint64(b) != KernelMagic {
		return Kernel{}, false
	}
	return Kernel{
		Op: Op(binary.LittleEndian.Uint32(b[8:])), Occupancy: min(binary.LittleEndian.Uint32(b[12:]), WholeGPU),
		Duration: time.Duration(min(binary.LittleEndian.Uint64(b[16:]), uint64(MaxKernelTime))),
	}, true
}

// MixBytes is the size of a Mix in memory, ResultBytes that of its result.
const (
	MixBytes    = 24
	ResultBytes = 16
)

// Mix is the kernarg of OpMix.
type Mix struct {
	// Result is the address of two u64: a count and a hash.
	Result uint64
	// Value is mixed into the hash.
	Value uint64
	// Progress is the address of a u64 for the completed millionths; 0 for none.
	Progress uint64
}

// Put writes the kernarg.
func (m Mix) Put(b []byte) {
	binary.LittleEndian.PutUint64(b, m.Result)
	binary.LittleEndian.PutUint64(b[8:], m.Value)
	binary.LittleEndian.PutUint64(b[16:], m.Progress)
}

// DecodeMix reads the first MixBytes of b.
func DecodeMix(b []byte) Mix {
	return Mix{
		Result: binary.LittleEndian.Uint64(b), Value: binary.LittleEndian.Uint64(b[8:]), Progress: binary.LittleEndian.Uint64(b[16:]),
	}
}

// fnvPrime is the multiplier of the FNV-1a hash of 64 bits.
const fnvPrime = 0x100000001b3

// MixHash returns the hash after the end of a kernel with value.
func MixHash(hash, value uint64) uint64 { return (hash ^ value) * fnvPrime }

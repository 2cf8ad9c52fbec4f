package engine

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// pages maps memory of this process, and reports where.
func pages(bytes int) ([]byte, uint64, error) {
	b, err := syscall.Mmap(-1, 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return nil, 0, fmt.Errorf("map %d bytes: %w", bytes, err)
	}
	return b, uint64(uintptr(unsafe.Pointer(&b[0]))), nil
}

// mapped maps a file.
func mapped(f *os.File, bytes int) ([]byte, error) {
	return syscall.Mmap(int(f.Fd()), 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
}

// word and half are what of b is written by one store.
func word(b []byte, at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[at])) }

func half(b []byte, at int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b[at])) }

package engine

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// silent is the value of a doorbell that was not rung since it was last read. No write
// index becomes that large.
const silent = ^uint64(0)

// bell returns the doorbell in mapped memory, which the owner keeps mapped.
func bell(b []byte) (*atomic.Uint64, error) {
	if len(b) != 8 || uintptr(unsafe.Pointer(&b[0]))%8 != 0 {
		return nil, fmt.Errorf("invalid doorbell of %d bytes: want 8 bytes at a multiple of 8", len(b))
	}
	return (*atomic.Uint64)(unsafe.Pointer(&b[0])), nil
}

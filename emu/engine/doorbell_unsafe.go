package engine

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// silent is what a doorbell says when nobody has rung it since it was looked at. No
// write index ever gets that far.
const silent = ^uint64(0)

// bell returns the doorbell in mapped memory, which the owner keeps mapped.
func bell(b []byte) (*atomic.Uint64, error) {
	if len(b) != 8 || uintptr(unsafe.Pointer(&b[0]))%8 != 0 {
		return nil, fmt.Errorf("a doorbell has 8 bytes at a multiple of 8, not %d", len(b))
	}
	return (*atomic.Uint64)(unsafe.Pointer(&b[0])), nil
}

package inventory

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// errUnmapped reports that the first address leads nowhere.
var errUnmapped = errors.New("nothing is mapped there")

// wordBytes is the size of a position, maxWords what one call may ask for (IOV_MAX).
const (
	wordBytes = 8
	maxWords  = 1024
)

// peek reads words of a process (process_vm_readv(2)): all in one call, up to the
// first that cannot be read. It needs the right to trace the process.
func peek(pid int32, addresses, words []uint64) (int, error) {
	addresses = addresses[:min(len(addresses), maxWords)]
	buf := make([]byte, wordBytes*len(addresses))
	remote := make([]unix.RemoteIovec, len(addresses))
	for n, address := range addresses {
		remote[n] = unix.RemoteIovec{Base: uintptr(address), Len: wordBytes}
	}
	local := unix.Iovec{Base: &buf[0]}
	local.SetLen(len(buf))
	n, err := unix.ProcessVMReadv(int(pid), []unix.Iovec{local}, remote, 0)
	switch {
	case errors.Is(err, unix.EFAULT):
		return 0, errUnmapped
	case err != nil:
		return 0, err
	}
	n /= wordBytes
	for i := range n {
		words[i] = binary.NativeEndian.Uint64(buf[wordBytes*i:])
	}
	if n == 0 { // a word that ends in nowhere
		return 0, errUnmapped
	}
	return n, nil
}

package kfdemu

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// softRecord is struct softgpu_event, and softReply struct softgpu_reply, of emu/softgpu.
type softRecord struct {
	Size, Kind                   uint32
	Seq                          uint64
	GPU                          uint32
	PID                          int32
	Type, Flags                  uint32
	MQD                          uint64
	Ring, RingBytes, Read, Write uint64
	// Doorbell is the offset of the queue's doorbell in the file of doorbells.
	Doorbell uint64
}

type softReply struct {
	Kind, GPU uint32
	Seq       uint64
	PID       int32
	Event     uint32
}

// Kinds of records and replies.
const (
	softMap    = 1
	softUnmap  = 2
	softRemove = 3

	softAck       = 1
	softInterrupt = 2
)

const (
	minSoftRecord = 80
	maxSoftRecord = 256
)

// decodeSoftRecord returns the first record of b, and the bytes after it. A newer module's
// records may be longer.
func decodeSoftRecord(b []byte) (r softRecord, rest []byte, err error) {
	if _, err := binary.Decode(b, binary.NativeEndian, &r); err != nil || r.Size < minSoftRecord || int(r.Size) > len(b) {
		return r, nil, fmt.Errorf("the module sent an invalid record of %d bytes: %x", r.Size, b)
	}
	return r, b[r.Size:], nil
}

func (r softReply) encode() []byte {
	var b bytes.Buffer
	_ = binary.Write(&b, binary.NativeEndian, r) // fails for a structure without a fixed size only
	return b.Bytes()
}

// longAgo is a deadline that has passed.
var longAgo = time.Unix(1, 0)

// mapDoorbell maps the doorbell at an offset of a file.
func mapDoorbell(file *os.File, offset uint64) (doorbell []byte, release func() error, err error) {
	page := uint64(os.Getpagesize())
	var mem []byte
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	controlErr := raw.Control(func(fd uintptr) {
		mem, err = unix.Mmap(int(fd), int64(offset&^(page-1)), int(page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	})
	if err := errors.Join(controlErr, err); err != nil {
		return nil, nil, fmt.Errorf("map the doorbell at %#x: %w", offset, err)
	}
	at := offset & (page - 1)
	return mem[at:][:8], func() error { return unix.Munmap(mem) }, nil
}

// softMemory is the memory of a process with queues of the real driver. The driver's page of
// events in it can only be written by the process: the module writes it with the interrupt.
type softMemory struct {
	*Space

	mu sync.Mutex // guards first and last
	// first and last are the addresses of that page, once it is known.
	first, last uint64
}

// WriteAt is Space.WriteAt, and has no effect on the driver's page of events.
func (m *softMemory) WriteAt(p []byte, addr uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if addr >= m.first && addr < m.last {
		return nil
	}
	err := m.Space.WriteAt(p, addr)
	if !errors.Is(err, unix.EFAULT) {
		return err
	}
	if m.first, m.last = m.mappingOf(addr); addr < m.last {
		return nil
	}
	return err
}

// mappingOf returns the mapping of /dev/kfd at an address, zeros if it is not one.
func (m *softMemory) mappingOf(addr uint64) (first, last uint64) {
	f, err := os.Open(procPath(m.PID(), "maps"))
	if err != nil {
		return 0, 0 // the process has ended
	}
	defer f.Close() // nothing was written
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := lines.Text()
		if n, _ := fmt.Sscanf(line, "%x-%x", &first, &last); n == 2 && addr >= first && addr < last && strings.HasSuffix(line, " /dev/kfd") {
			return first, last
		}
	}
	return 0, 0
}

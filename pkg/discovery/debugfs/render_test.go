package debugfs_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
	"strings"
)

// text builds a debugfs file, line by line like the kernel.
type text struct{ strings.Builder }

func (t *text) linef(format string, args ...any) {
	fmt.Fprintf(t, format+"\n", args...)
}

// dump prints words like seq_hex_dump: 8 in a row, offsets from 0.
func (t *text) dump(indent int, words []uint32) {
	t.at(indent, 0, words)
}

// at prints words in rows of 8, from an address.
func (t *text) at(indent int, address uint32, words []uint32) {
	for len(words) > 0 {
		n := min(8, len(words))
		row := append(bytes.Repeat([]byte(" "), indent), hex8(address)...)
		row = append(row, ':')
		for _, w := range words[:n] {
			row = append(append(row, ' '), hex8(w)...)
		}
		t.Write(append(row, '\n'))
		words, address = words[n:], address+uint32(4*n)
	}
}

func hex8(v uint32) string {
	return hex.EncodeToString(binary.BigEndian.AppendUint32(nil, v))
}

// sdmaRegisters prints an SDMA slot like seq_reg_dump: the registers are in runs, and a
// row ends with its run.
func (t *text) sdmaRegisters(address uint32, words []uint32, runs ...int) {
	for _, n := range runs {
		t.at(4, address, words[:n])
		words, address = words[n:], address+uint32(4*n)+64
	}
}

// queue is a compute queue to print.
type queue struct {
	mqd, ring, ringBytes, read, write, save uint64
	saveBytes, stride                       uint32
	doorbell, pipe, priority                uint32
	rptr                                    uint32
	wptr                                    uint64
	vmid                                    uint32
	aql, empty, live                        bool
}

func put(words []uint32, at int, v uint64) {
	words[at], words[at+1] = uint32(v), uint32(v>>32)
}

// registers are the 56 of the hardware.
func (q queue) registers() []uint32 {
	r := make([]uint32, 56)
	put(r, 0, q.mqd)
	r[2] = 1
	r[3] = q.vmid | q.vmid<<8
	r[4] = 0x40005301
	r[5], r[6], r[7] = q.pipe, q.priority, 0x111
	put(r, 8, q.ring>>8)
	r[10] = q.rptr
	put(r, 11, q.read)
	put(r, 13, q.write)
	r[15] = q.doorbell << 2
	if q.live {
		r[15] |= 1 << 30
	}
	r[17] = 0x14014500
	if q.ringBytes != 0 {
		r[17] |= uint32(bits.TrailingZeros64(q.ringBytes)) - 3
	}
	if q.empty {
		r[17] |= 1 << 15
	}
	put(r, 43, q.save)
	r[46], r[47], r[48], r[49] = 0x2000, 0x2000, 0x2000, q.saveBytes
	if q.aql {
		r[53] = 1
	}
	put(r, 54, q.wptr)
	return r
}

// image is the MQD of one XCC.
func (q queue) image() []uint32 {
	m := make([]uint32, 512)
	m[0] = 0xc0310800
	for _, se := range []int{23, 24, 26, 27} {
		m[se] = 0xffffffff
	}
	copy(m[128:], q.registers())
	m[226] = q.stride
	return m
}

// images are those of n XCCs, in the layout of init_mqd_v9_4_3.
func (q queue) images(n int) [][]uint32 {
	var all [][]uint32
	for x := range n {
		all = append(all, q.xcc(x).image())
	}
	return all
}

// xcc is the queue on XCC x.
func (q queue) xcc(x int) queue {
	q.mqd += uint64(x) * uint64(q.stride)
	if q.save != 0 {
		q.save += uint64(x) * uint64(q.saveBytes)
	}
	return q
}

// dma is an SDMA queue to print.
type dma struct {
	ring, ringBytes, read, write uint64
	rptr, wptr                   uint64
	doorbell, vmid               uint32
	engine, queue                uint32
	enabled, listens, idle       bool
}

// gfx9, gfx11 and gfx12 are the positions of the words of an SDMA queue: the two of the
// read pointer, high first, those of the write pointer, the doorbell, its offset,
// the dummy register and the status.
var (
	gfx9  = [8]int{8, 9, 28, 29, 18, 22, 27, 17}
	gfx11 = [8]int{7, 8, 26, 27, 17, 19, 25, 16}
	gfx12 = [8]int{8, 7, 25, 24, 15, 17, 23, 48}
)

// words returns n words of the queue: registers, or an image for 128 or 130.
func (d dma) words(layout [8]int, n int) []uint32 {
	w := make([]uint32, n)
	w[0] = d.vmid<<24 | 6<<16 | 1<<12
	if d.enabled {
		w[0] |= 1
	}
	if d.ringBytes != 0 {
		w[0] |= (uint32(bits.TrailingZeros64(d.ringBytes)) - 2) << 1
	}
	put(w, 1, d.ring>>8)
	put(w, 3, d.rptr)
	put(w, 5, d.wptr)
	w[layout[0]], w[layout[1]] = uint32(d.read>>32), uint32(d.read)
	w[layout[2]], w[layout[3]] = uint32(d.write>>32), uint32(d.write)
	if d.listens {
		w[layout[4]] = 1 << 28
	}
	w[layout[5]] = d.doorbell << 2
	w[layout[6]] = 0xf
	if d.idle && layout[7] < n && (n < 128 || layout != gfx12) {
		w[layout[7]] = 4
	}
	if n >= 128 {
		w[n-2], w[n-1] = d.engine, d.queue
	}
	return w
}

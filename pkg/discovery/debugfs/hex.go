package debugfs

import (
	"encoding/binary"
	"slices"
)

// rowWords is the largest number of words in a row.
const rowWords = 8

// Repeated bytes, to process 8 characters at once.
const (
	each01 = 0x0101010101010101
	each06 = 0x0606060606060606
	each0f = 0x0f0f0f0f0f0f0f0f
	each10 = 0x1010101010101010
	each30 = 0x3030303030303030
	eachf0 = 0xf0f0f0f0f0f0f0f0
)

// word parses 8 hexadecimal digits in lower case, as printed by %08x. ok is false for
// anything else. b has at least 8 bytes.
func word(b []byte) (v uint32, ok bool) {
	x := binary.BigEndian.Uint64(b)
	// Of the digits, 0x30-0x39 and 0x61-0x66, bit 6 is set in the letters only.
	letters := x >> 6 & each01
	// A letter counts from 10: its low nibble from 1. No byte can carry into the
	// next: 15+9+6 is below 256, and so is 9*1.
	nibbles := x&each0f + letters*9
	high := x&eachf0 ^ (each30 + letters*0x30)
	// Digits end at 9 and letters begin at 10, that is, adding 6 sets bit 4 in the
	// latter only; and neither is above 15.
	range9 := (nibbles+each06)&each10 ^ letters<<4
	ok = high|range9|nibbles&eachf0 == 0
	nibbles = (nibbles | nibbles>>4) & 0x00ff00ff00ff00ff
	nibbles = (nibbles | nibbles>>8) & 0x0000ffff0000ffff
	return uint32(nibbles | nibbles>>16), ok
}

// row parses "ADDRESS: WORD WORD ..." with 1 to 8 words after the indentation, which is
// already checked, and appends the words to dst. ok is false for anything else: explain
// then returns where.
func row(line []byte, indent int, dst []uint32) (address uint32, words []uint32, ok bool) {
	rest := line[indent:]
	n := (len(rest) - 9) / 9
	if n < 1 || n > rowWords || len(rest) != 9+9*n || rest[8] != ':' {
		return 0, dst, false
	}
	address, ok = word(rest)
	words = slices.Grow(dst, n)[:len(dst)+n]
	out := words[len(dst):]
	for i := range out {
		field := rest[9+9*i:][:9]
		v, good := word(field[1:])
		ok = ok && good && field[0] == ' '
		out[i] = v
	}
	return address, words, ok
}

// explain returns the byte, counted from 1, at which a row is invalid, and the problem.
func explain(line []byte, indent int) (column int, problem string) {
	at := indent
	digits := func() bool {
		for range 8 {
			if at == len(line) || !isHex(line[at]) {
				return false
			}
			at++
		}
		return true
	}
	if !digits() {
		return at + 1, "want 8 hexadecimal digits of an address"
	}
	if at == len(line) || line[at] != ':' {
		return at + 1, "want a colon after the address"
	}
	at++
	for range rowWords {
		if at == len(line) {
			break
		}
		if line[at] != ' ' {
			return at + 1, "want a space before the next word"
		}
		at++
		if !digits() {
			return at + 1, "want 8 hexadecimal digits of a word"
		}
	}
	if at == indent+9 {
		return at + 1, "want at least one word"
	}
	return at + 1, "want no more than 8 words in a row"
}

func isHex(c byte) bool { return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' }

// isRow reports whether a line looks like a row of data: the indentation, then hexadecimal
// digits up to a colon, or 8 of them before anything else.
func isRow(line []byte, indent int) bool {
	if !indented(line, indent) {
		return false
	}
	for i, c := range line[indent:] {
		switch {
		case isHex(c):
		case c == ':':
			return i > 0
		default:
			return i == 8
		}
	}
	return len(line) == indent+8
}

// indented reports whether a line begins with exactly that many spaces.
func indented(line []byte, indent int) bool {
	if len(line) <= indent || line[indent] == ' ' {
		return false
	}
	for _, c := range line[:indent] {
		if c != ' ' {
			return false
		}
	}
	return true
}

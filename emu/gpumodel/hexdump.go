package gpumodel

// Lines of a dump have at most eight words.
const wordsPerRow = 8

// lineBytes is at least how long a line is: a row is one of the longest.
const lineBytes = len("    00000000:") + wordsPerRow*len(" 00000000") + len("\n")

// dumpBytes is at least how long the dump of so many words is, gaps between the
// addresses of registers included.
func dumpBytes(words int) int { return (words/wordsPerRow + 5) * lineBytes }

// appendDump prints words as seq_hex_dump does: offsets in bytes, from 0.
func appendDump(b []byte, indent string, words []uint32) []byte {
	for i := 0; i < len(words); i += wordsPerRow {
		b = append(b, indent...)
		b = appendHex(b, uint32(i*4))
		b = append(b, ':')
		b = appendRow(b, words[i:min(i+wordsPerRow, len(words))])
	}
	return b
}

// appendRegisters prints registers as seq_reg_dump does: byte addresses, and a new row
// at every gap. words holds them one after the other.
func appendRegisters(b []byte, base uint32, stretches []stretch, words []uint32) []byte {
	for _, s := range stretches {
		for i := 0; i < s.n; i += wordsPerRow {
			n := min(wordsPerRow, s.n-i)
			b = append(b, "    "...)
			b = appendHex(b, base+uint32(s.from+i)*4)
			b = append(b, ':')
			b = appendRow(b, words[:n])
			words = words[n:]
		}
	}
	return b
}

const zeroRow = " 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000\n"

func appendRow(b []byte, words []uint32) []byte {
	var union uint32
	for _, w := range words {
		union |= w
	}
	if union == 0 {
		b = append(b, zeroRow[:len(words)*len(" 00000000")]...)
		return append(b, '\n')
	}
	for _, w := range words {
		b = append(b, ' ')
		b = appendHex(b, w)
	}
	return append(b, '\n')
}

// appendHex prints eight hexadecimal digits.
func appendHex(b []byte, v uint32) []byte {
	const digits = "0123456789abcdef"
	return append(b,
		digits[v>>28], digits[v>>24&0xf], digits[v>>20&0xf], digits[v>>16&0xf],
		digits[v>>12&0xf], digits[v>>8&0xf], digits[v>>4&0xf], digits[v&0xf])
}

package debugfs

import (
	"bytes"
	"strconv"
	"strings"
)

// lines walks a text.
type lines struct {
	rest []byte
	// line is the number of the last line, from 1.
	line int
}

// next returns a line without its newline. whole is false for a last line without one: the
// kernel ends each line with a newline, so the text was cut.
func (l *lines) next() (line []byte, whole, ok bool) {
	if len(l.rest) == 0 {
		return nil, false, false
	}
	l.line++
	end := bytes.IndexByte(l.rest, '\n')
	if end < 0 {
		line, l.rest = l.rest, nil
		return line, false, true
	}
	line, l.rest = bytes.TrimSuffix(l.rest[:end], []byte("\r")), l.rest[end+1:] // from another system
	return line, true, true
}

// parser parses a dump: headers, and rows of data below them. It fills shared slices: queues,
// slots and what contains them take parts of them, whose contents do not change afterwards.
type parser struct {
	lines
	warnings
	words []uint32
	// rows is the owner of the next rows of data.
	rows owner
}

// owner is to what rows of data belong.
type owner uint8

const (
	// nothing: rows are an error.
	nothing owner = iota
	// aQueue is the last queue or slot.
	aQueue
	// unknown is something that is skipped.
	unknown
)

// rowIndent is the indentation of rows.
const rowIndent = 4

// each calls data with the words that follow p.words in the same array, for each row, and
// header with each other line, until the end or an error. Of a last line that was cut, only
// a row with all its words is known to be complete.
func (p *parser) each(data func(address uint32, words []uint32) error, header func(line []byte) error) error {
	for {
		line, whole, ok := p.next()
		if !ok {
			return nil
		}
		if !whole && (len(line) != fullRow || !isRow(line, rowIndent)) {
			p.skipped(p.line, "the text ends within a line, which is skipped", line)
			continue
		}
		var err error
		if !indented(line, rowIndent) {
			err = header(line)
		} else if address, words, ok := row(line, rowIndent, p.words); ok {
			err = data(address, words)
		} else if isRow(line, rowIndent) {
			column, problem := explain(line, rowIndent)
			err = malformed(p.line, column, problem)
		} else {
			err = header(line)
		}
		if err != nil {
			return err
		}
	}
}

// fullRow is the length of a row with all its words.
const fullRow = rowIndent + 9 + 9*rowWords

// head compares a line with the patterns that begin as it does. It returns the first one's place
// and numbers, or -1.
func (p *parser) head(line []byte, patterns ...string) (n int, numbers [4]int, err error) {
	for n, pattern := range patterns {
		if literal, _, _ := strings.Cut(pattern, "%"); bytes.HasPrefix(line, []byte(literal)) {
			numbers, column, problem := scan(line, pattern)
			if problem != "" {
				return n, numbers, malformed(p.line, column, problem)
			}
			return n, numbers, nil
		}
	}
	return -1, numbers, nil
}

// scan compares a line with a pattern as the kernel prints it. In that, %d is a number of it that is
// not negative, %x one in hexadecimal, and %i a decimal number or 0x%x. It returns the numbers, or
// the byte, counted from 1, from which on the line differs, and the problem.
func scan(line []byte, pattern string) (numbers [4]int, column int, problem string) {
	at := 0
	for n := 0; ; n++ {
		literal, rest, more := strings.Cut(pattern, "%")
		if !bytes.HasPrefix(line[at:], []byte(literal)) {
			return numbers, at + 1, "want " + strconv.Quote(literal)
		}
		at += len(literal)
		if !more {
			break
		}
		base, bits, want := 10, 31, "want a decimal number below 2^31"
		isHexadecimal := rest[0] == 'x'
		if rest[0] == 'i' {
			bits, want = 32, "want a decimal number below 2^32, or a hexadecimal one after 0x"
			if isHexadecimal = bytes.HasPrefix(line[at:], []byte("0x")); isHexadecimal {
				at += len("0x")
			}
		}
		if isHexadecimal {
			base, bits, want = 16, 32, "want a hexadecimal number below 2^32, in lower case"
		}
		end := at
		for end < len(line) && isHex(line[end]) && (isHexadecimal || line[end] <= '9') {
			end++
		}
		v, err := strconv.ParseUint(string(line[at:end]), base, bits)
		if err != nil {
			return numbers, at + 1, want
		}
		numbers[n], at, pattern = int(v), end, rest[1:]
	}
	if at != len(line) {
		return numbers, at + 1, "want the end of the line"
	}
	return numbers, 0, ""
}

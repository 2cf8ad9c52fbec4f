package debugfs

import (
	"bytes"
	"strconv"
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

// scan parses the fields of one line from left to right, up to the first error.
type scan struct {
	line []byte
	at   int
	// problem is "" without an error. at is the position of the next field, or of the wrong
	// one.
	problem string
}

// text parses the given text.
func (s *scan) text(want string) {
	if s.problem != "" {
		return
	}
	if !bytes.HasPrefix(s.line[s.at:], []byte(want)) {
		s.problem = "want " + strconv.Quote(want)
		return
	}
	s.at += len(want)
}

// has parses the given text if it is next, and reports whether it is.
func (s *scan) has(text string) bool {
	if s.problem != "" || !bytes.HasPrefix(s.line[s.at:], []byte(text)) {
		return false
	}
	s.at += len(text)
	return true
}

// number parses a number of at most the given value.
func (s *scan) number(base, most uint64, want string) uint64 {
	if s.problem != "" {
		return 0
	}
	var v uint64
	at := s.at
	for ; at < len(s.line); at++ {
		c := s.line[at]
		if !isHex(c) || base == 10 && c > '9' {
			break
		}
		digit := uint64(c - '0')
		if c >= 'a' {
			digit = uint64(c-'a') + 10
		}
		v = v*base + digit
		if v > most {
			s.problem = want
			return 0
		}
	}
	if at == s.at {
		s.problem = want
		return 0
	}
	s.at = at
	return v
}

// decimal parses a number that is printed with %d and not negative.
func (s *scan) decimal() int {
	return int(s.number(10, 1<<31-1, "want a decimal number below 2^31"))
}

// hex parses a number that is printed with %x.
func (s *scan) hex() uint32 {
	return uint32(s.number(16, 1<<32-1, "want a hexadecimal number below 2^32, in lower case"))
}

// end returns an error unless the line ends here without an earlier error.
func (s *scan) end(line int) error {
	if s.problem == "" {
		if s.at == len(s.line) {
			return nil
		}
		s.problem = "want the end of the line"
	}
	return malformed(line, s.at+1, s.problem)
}

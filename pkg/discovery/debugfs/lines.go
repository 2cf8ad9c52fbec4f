package debugfs

import (
	"bytes"
	"strconv"
)

// lines walks a text.
type lines struct {
	rest []byte
	// line is the number of the line last given, from 1.
	line int
}

// next returns a line without its newline. whole is false for a last line that has
// none: the kernel ends each line with one, so the text was cut.
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
	line, l.rest = bytes.TrimSuffix(l.rest[:end], []byte("\r")), l.rest[end+1:] // it may come from another system
	return line, true, true
}

// each returns the lines to read, and a last one that was cut to torn, until there
// are no more or one of them has an error.
func (l *lines) each(read, torn func(line []byte) error) error {
	for {
		line, whole, ok := l.next()
		if !ok {
			return nil
		}
		take := read
		if !whole {
			take = torn
		}
		if err := take(line); err != nil {
			return err
		}
	}
}

// scan reads the fields of one line from left to right. What comes after the
// first that is not as wanted is not read.
type scan struct {
	line []byte
	at   int
	// problem is "" as long as all is well; at is then where the next field begins,
	// else where the wrong one does.
	problem string
}

// text reads the given text.
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

// has reads the given text when it is there.
func (s *scan) has(text string) bool {
	if s.problem != "" || !bytes.HasPrefix(s.line[s.at:], []byte(text)) {
		return false
	}
	s.at += len(text)
	return true
}

// number reads one of at most the given value.
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

// decimal reads a number the kernel prints with %d and that is not negative.
func (s *scan) decimal() int {
	return int(s.number(10, 1<<31-1, "want a decimal number below 2^31"))
}

// hex reads a number the kernel prints with %x.
func (s *scan) hex() uint32 {
	return uint32(s.number(16, 1<<32-1, "want a hexadecimal number below 2^32, in lower case"))
}

// end wants the line to end here, and returns the error if it does not or if
// anything before was wrong.
func (s *scan) end(line int) error {
	if s.problem == "" {
		if s.at == len(s.line) {
			return nil
		}
		s.problem = "want the end of the line"
	}
	return malformed(line, s.at+1, s.problem)
}

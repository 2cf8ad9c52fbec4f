package hiplog

import (
	"bytes"
	"errors"
	"io"
)

const (
	bufferBytes = 256 << 10
	// maxLine is where lines are cut. HIP cuts its messages at 4096 bytes.
	maxLine = 64 << 10
)

// Levels counts records by the level of AMD_LOG_LEVEL; it has the levels that occur.
type Levels map[int]uint64

// Totals are the counters of Scan.
type Totals struct {
	// Bytes counts the bytes of the text, after decompression.
	Bytes uint64 `json:"bytes"`
	Lines uint64 `json:"lines"`
	// Records are those of HIP; a line can contain several.
	Records uint64 `json:"records"`
	Levels  Levels `json:"levels"`
	// ROCrRecords, included in Records, are those of ROCr, which have no level.
	ROCrRecords uint64 `json:"rocr_records"`
	// OtherLines contain no record and no part of one that is recognized: the program's own
	// output.
	OtherLines uint64 `json:"other_lines"`
	// TornLines are damaged by concurrent writers: a record begins after other text, or is
	// incomplete, or the line is the beginning or the end of one.
	TornLines uint64 `json:"torn_lines"`
	// UnknownLines have a record about queues, or the text before one, in a form that is not known,
	// and are not torn: they are of another version of the runtime.
	UnknownLines uint64 `json:"unknown_lines"`
	// CutLines were longer than 64 KiB; the rest of them was skipped.
	CutLines uint64 `json:"cut_lines"`
	// ColouredLines contain ANSI escape sequences.
	ColouredLines uint64 `json:"coloured_lines"`
	// NULBytes were skipped: a file that was truncated while it was written has holes.
	NULBytes uint64 `json:"nul_bytes"`
	// The times of records in microseconds since boot: the first and the last in
	// the file, the smallest and the largest. 0 without records.
	FirstMicros uint64 `json:"first_us"`
	LastMicros  uint64 `json:"last_us"`
	MinMicros   uint64 `json:"min_us"`
	MaxMicros   uint64 `json:"max_us"`
}

// scanAll reads a log, compressed or not (see Open), and calls fn with each record in the
// order of the file, and other with each other line. It needs the same memory for a log of
// any size. It ends at the first error of r or of fn, with the totals so far.
func scanAll(r io.Reader, fn func(*Record) error, other func([]byte)) (_ Totals, err error) {
	text, err := Open(r)
	if err != nil {
		return Totals{}, err
	}
	defer func() {
		if closeErr := text.Close(); err == nil {
			err = closeErr
		}
	}()
	s := scanner{fn: fn, other: other}
	err = s.scan(text)
	s.totals.Levels = Levels{}
	for level, n := range s.levels {
		if n > 0 {
			s.totals.Levels[level] = n
		}
	}
	return s.totals, err
}

type scanner struct {
	fn       func(*Record) error
	other    func([]byte)
	totals   Totals
	levels   [10]uint64
	rec      Record
	prefixes prefixes
	plain    []byte // a line without colours
	// skipping reports that everything up to the next line feed is skipped.
	skipping bool
}

func (s *scanner) scan(r io.Reader) error {
	buf := make([]byte, bufferBytes)
	kept := 0
	for empty := 0; ; {
		n, readErr := r.Read(buf[kept:])
		s.totals.Bytes += uint64(n)
		fresh := s.dropNULs(buf[kept : kept+n])
		rest, err := s.lines(buf[:kept+fresh], kept)
		if err != nil {
			return err
		}
		kept = copy(buf, rest)
		switch {
		case readErr == nil && n > 0:
			empty = 0
		case readErr == nil:
			if empty++; empty == 100 {
				return io.ErrNoProgress
			}
		default:
			if kept > 0 && !s.skipping {
				if err := s.line(buf[:kept]); err != nil {
					return err
				}
			}
			if errors.Is(readErr, io.EOF) {
				return nil
			}
			return readErr
		}
	}
}

// dropNULs removes the holes from b and returns the remaining length.
func (s *scanner) dropNULs(b []byte) int {
	hole := bytes.IndexByte(b, 0)
	if hole < 0 {
		return len(b)
	}
	left := hole
	for _, c := range b[hole:] {
		if c != 0 {
			b[left] = c
			left++
		}
	}
	s.totals.NULBytes += uint64(len(b) - left)
	return left
}

// lines processes the lines of b, which has no line feed before fresh, and returns the
// beginning of the last.
func (s *scanner) lines(b []byte, fresh int) ([]byte, error) {
	for {
		feed := bytes.IndexByte(b[fresh:], '\n')
		if feed < 0 {
			break
		}
		line := b[:fresh+feed]
		b, fresh = b[fresh+feed+1:], 0
		if s.skipping {
			s.skipping = false
			continue
		}
		if err := s.line(line); err != nil {
			return nil, err
		}
	}
	if s.skipping {
		return nil, nil
	}
	if len(b) > maxLine {
		s.skipping = true
		return nil, s.line(b)
	}
	return b, nil
}

func (s *scanner) line(b []byte) error {
	s.totals.Lines++
	if len(b) > maxLine {
		s.totals.CutLines++
		b = b[:maxLine]
	}
	for len(b) > 0 && b[len(b)-1] == '\r' {
		b = b[:len(b)-1]
	}
	if bytes.IndexByte(b, '\x1b') >= 0 {
		s.totals.ColouredLines++
		b = s.withoutColours(b)
	}
	torn, unknown := false, false
	head, ok, other := s.prefixes.parse(b)
	if !ok {
		var at int
		if at, head = s.prefixes.next(b); at < 0 {
			switch {
			case other:
				s.totals.UnknownLines++
			case isPart(b):
				s.totals.TornLines++
			default:
				s.totals.OtherLines++
			}
			s.other(b)
			return nil
		}
		torn = true
		b = b[at:]
	}
	for {
		message := b[head.length:]
		at, next := s.prefixes.next(message)
		if at >= 0 {
			torn = true
			message, b = message[:at], message[at:]
		}
		if err := s.record(head, message); err != nil {
			return err
		}
		torn, unknown = torn || s.rec.Torn, unknown || s.rec.Unknown
		if at < 0 {
			break
		}
		head = next
	}
	switch {
	case torn:
		s.totals.TornLines++
	case unknown:
		s.totals.UnknownLines++
	}
	return nil
}

// isPart reports whether a line without a record is part of one: it begins like a prefix, or
// has the end of a prefix, or ends like the message of a packet or an API call.
func isPart(b []byte) bool {
	if len(b) > 3 && b[0] == ':' && isDigit(b[1]) && b[2] == ':' {
		return true
	}
	const stampDigits = 10 // "%010lu us:"
	if i := bytes.Index(b, []byte(" us:")); i >= stampDigits && !bytes.ContainsFunc(b[i-stampDigits:i], func(r rune) bool { return r < '0' || r > '9' }) {
		return true
	}
	var rec Record
	if indices(b, &rec) || bytes.Contains(b, []byte("completion_signal=0x")) {
		return true
	}
	rec.Message = b
	cutDuration(&rec)
	return rec.Timed
}

// record calls the callback for a record.
func (s *scanner) record(head prefix, message []byte) error {
	rec, t := &s.rec, &s.totals
	*rec = Record{
		Line: t.Lines, Level: head.level, Source: head.source, SourceLine: head.line, Micros: head.micros,
		PID: head.pid, TID: head.tid, Message: message, ID: -1,
	}
	cutDuration(rec)
	parseMessage(rec)
	if t.Records == 0 {
		t.FirstMicros, t.MinMicros, t.MaxMicros = rec.Micros, rec.Micros, rec.Micros
	}
	t.Records++
	t.LastMicros = rec.Micros
	t.MinMicros, t.MaxMicros = min(t.MinMicros, rec.Micros), max(t.MaxMicros, rec.Micros)
	if rec.Level >= 0 {
		s.levels[rec.Level]++
	}
	if rec.ROCr {
		t.ROCrRecords++
	}
	return s.fn(rec)
}

// withoutColours copies b without its escape sequences (ECMA-48: CSI, parameters,
// a final byte from @ to ~).
func (s *scanner) withoutColours(b []byte) []byte {
	s.plain = s.plain[:0]
	for {
		esc := bytes.IndexByte(b, '\x1b')
		if esc < 0 {
			s.plain = append(s.plain, b...)
			return s.plain
		}
		s.plain = append(s.plain, b[:esc]...)
		b = b[esc+1:]
		if len(b) == 0 || b[0] != '[' {
			continue
		}
		b = b[1:]
		for len(b) > 0 && b[0] >= 0x20 && b[0] < 0x40 {
			b = b[1:]
		}
		if len(b) > 0 && b[0] >= 0x40 && b[0] < 0x7f {
			b = b[1:]
		}
	}
}

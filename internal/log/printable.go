package log

import (
	"bytes"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// printable returns text with an escape of Go and of JSON for each rune that is not
// printable, and U+FFFD for each byte that is not UTF-8: text of a client or a job must
// neither begin a line nor reach a terminal as a command or a change of direction.
func printable(text string) string {
	if isPrintable([]byte(text)) {
		return text
	}
	escaped := make([]byte, 0, len(text)+16)
	for _, r := range text {
		switch {
		case strconv.IsPrint(r):
			escaped = utf8.AppendRune(escaped, r)
		case r == '\n':
			escaped = append(escaped, `\n`...)
		case r > 0xffff: // an escape of JSON has four digits: a surrogate pair
			r -= 0x10000
			escaped = appendEscape(appendEscape(escaped, 0xd800+r>>10), 0xdc00+r&0x3ff)
		default:
			escaped = appendEscape(escaped, r)
		}
	}
	return string(escaped)
}

func appendEscape(b []byte, r rune) []byte {
	const digits = "0123456789abcdef"
	return append(b, '\\', 'u', digits[r>>12&0xf], digits[r>>8&0xf], digits[r>>4&0xf], digits[r&0xf])
}

// quoted returns a value as part of a line key=value, key=value: as it is if it is one word
// that cannot be mistaken for anything else in the line, and in Go's syntax otherwise.
func quoted(value string) string {
	if value != "" && isPrintable([]byte(value)) && !strings.ContainsAny(value, ` ,="\`) {
		return value
	}
	return strconv.Quote(value)
}

// isPrintable reports whether text is UTF-8 and all its runes are printable.
func isPrintable(text []byte) bool {
	return utf8.Valid(text) && !bytes.ContainsFunc(text, func(r rune) bool { return !strconv.IsPrint(r) })
}

// printableLines writes each line as printable returns it.
type printableLines struct{ to io.Writer }

// Write writes one line, which ends with a newline.
func (p printableLines) Write(line []byte) (int, error) {
	text := bytes.TrimSuffix(line, []byte("\n"))
	if isPrintable(text) {
		return p.to.Write(line)
	}
	if _, err := io.WriteString(p.to, printable(string(text))+"\n"); err != nil {
		return 0, err
	}
	return len(line), nil
}

package hiplog

import "io"

// Scan is scanAll without a callback for the lines without a record.
func Scan(r io.Reader, fn func(*Record) error) (Totals, error) {
	return scanAll(r, fn, func([]byte) {})
}

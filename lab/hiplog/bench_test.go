package hiplog_test

import (
	"bufio"
	"bytes"
	"io"
	"testing"

	"github.com/gpreempt/gpreempt/lab/hiplog"
)

// BenchmarkScan compares reading a log with counting its lines by bufio.Scanner in one run.
func BenchmarkScan(b *testing.B) {
	log, err := io.ReadAll(newGenerator(8 << 20))
	if err != nil {
		b.Fatal(err)
	}
	var counting float64 // the time to count the lines
	each := func(name string, data []byte, read func(io.Reader) error) {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(log)))
			b.ReportAllocs()
			for b.Loop() {
				if err := read(bytes.NewReader(data)); err != nil {
					b.Fatal(err)
				}
			}
			took := b.Elapsed().Seconds() / float64(b.N)
			if counting == 0 {
				counting = took
			}
			b.ReportMetric(took/counting, "times-counting")
		})
	}
	analyze := func(r io.Reader) error {
		_, err := hiplog.Analyze(r)
		return err
	}
	each("count-lines", log, func(r io.Reader) error {
		lines := bufio.NewScanner(r)
		for lines.Scan() {
		}
		return lines.Err()
	})
	each("scan", log, func(r io.Reader) error {
		_, err := hiplog.Scan(r, func(*hiplog.Record) error { return nil })
		return err
	})
	each("analyze", log, analyze)
	each("analyze-gzip", gzipped(b, log), analyze)
	each("analyze-zstd", zstandard(b, log), analyze)
}

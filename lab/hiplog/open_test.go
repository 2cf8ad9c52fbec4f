package hiplog_test

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/lab/hiplog"
)

// zstd decompresses in goroutines.
func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(testutil.VerifyMain(m))
}

var update = flag.Bool("update", false, "write what the tests got into testdata")

func readGolden(t *testing.T, name string, got []byte) string {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, append(got, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(want)
}

func gzipped(t testing.TB, text []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func zstandard(t testing.TB, text []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return w.EncodeAll(text, nil)
}

func TestCompressedLogsHaveTheSameAnalysis(t *testing.T) {
	text, err := io.ReadAll(newGenerator(300 << 10))
	if err != nil {
		t.Fatal(err)
	}
	want := analyze(t, string(text))
	half := len(text) / 2
	for name, data := range map[string][]byte{
		"gzip":             gzipped(t, text),
		"gzip in members":  append(gzipped(t, text[:half]), gzipped(t, text[half:])...),
		"zstd":             zstandard(t, text),
		"zstd in frames":   append(zstandard(t, text[:half]), zstandard(t, text[half:])...),
		"zstd behind skip": append([]byte{0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 'h', 'i'}, zstandard(t, text)...),
	} {
		if diff := cmp.Diff(want, analyze(t, string(data)), ignoreCounts); diff != "" {
			t.Errorf("%s (-plain +%s):\n%s", name, name, diff)
		}
	}
}

// A compressed log that is cut anywhere is analyzed up to there and reported as truncated.
func TestTruncatedArchivesAreAnalyzedUpToTheirEnd(t *testing.T) {
	text, err := io.ReadAll(newGenerator(600 << 10))
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"gzip": gzipped(t, text), "zstd": zstandard(t, text)} {
		most := uint64(0)
		for n := 4; n < len(data); n += 1 + len(data)/40 {
			a, err := hiplog.Analyze(bytes.NewReader(data[:n]))
			if err != nil || !a.Truncated || codes(a)[0] != "truncated" || a.Bytes < most {
				t.Errorf("%s cut at %d of %d: %v, truncated %t, %d bytes", name, n, len(data), err, a.Truncated, a.Bytes)
			}
			most = a.Bytes
		}
		if most == 0 {
			t.Errorf("%s: nothing was read", name)
		}
	}
}

func TestDamagedArchivesAreAnError(t *testing.T) {
	text, err := io.ReadAll(newGenerator(600 << 10))
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"gzip": gzipped(t, text), "zstd": zstandard(t, text)} {
		data[len(data)/2] ^= 0xff
		a, err := hiplog.Analyze(bytes.NewReader(data))
		if err == nil || !strings.Contains(err.Error(), "cannot decompress with "+name) || a.Truncated {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestShortInputsAreText(t *testing.T) {
	for _, s := range []string{"", "x", "\x1f", "\x28\xb5\x2f", "\n\n"} {
		if a := analyze(t, s); a.Bytes != uint64(len(s)) || a.Records != 0 {
			t.Errorf("%q: %d bytes", s, a.Bytes)
		}
	}
	if _, err := hiplog.Open(strings.NewReader("\x1f\x8b")); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("two bytes of gzip: %v", err)
	}
}

// A reader that stops early leaks no goroutine, which TestMain checks.
func TestScanOfAnArchiveCanStop(t *testing.T) {
	text, err := io.ReadAll(newGenerator(8 << 20))
	if err != nil {
		t.Fatal(err)
	}
	stop := errors.New("stop")
	for _, data := range [][]byte{gzipped(t, text), zstandard(t, text)} {
		if _, err := hiplog.Scan(bytes.NewReader(data), func(*hiplog.Record) error { return stop }); !errors.Is(err, stop) {
			t.Errorf("%v, want %v", err, stop)
		}
	}
}

// A few bytes of zstd can require gigabytes of memory (RFC 8878, 3.1.1.1.2).
func TestWindowsOfZstdAreBounded(t *testing.T) {
	frame := func(exponent byte) string { // of a window of 1 KiB << exponent, with one raw block
		return "\x28\xb5\x2f\xfd\x00" + string([]byte{exponent << 3}) + string([]byte{1 | 5<<3, 0, 0}) + "hello"
	}
	if a := analyze(t, frame(17)); a.Bytes != 5 {
		t.Errorf("a window of 128 MiB: %d bytes", a.Bytes)
	}
	if _, err := hiplog.Analyze(strings.NewReader(frame(18))); !errors.Is(err, zstd.ErrWindowSizeExceeded) {
		t.Errorf("a window of 256 MiB: %v, want %v", err, zstd.ErrWindowSizeExceeded)
	}
}

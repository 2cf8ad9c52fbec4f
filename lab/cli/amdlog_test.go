package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/schollz/progressbar/v3"

	"github.com/gpreempt/gpreempt/internal/term"
)

// writeLog makes a file of n bytes of log, compressed or not.
func writeLog(t *testing.T, n int, zipped bool) string {
	t.Helper()
	line := ":3:rocdevice.cpp            :2889: 6306223714 us: [pid:7001 tid: 0x7f01] No HW event\n"
	text := []byte(strings.Repeat(line, n/len(line)))
	path := filepath.Join(t.TempDir(), "hip.log")
	if zipped {
		var b bytes.Buffer
		w, err := gzip.NewWriterLevel(&b, gzip.NoCompression)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(text); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		text = b.Bytes()
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestProgressIsShownOnTerminalsForLargeFiles(t *testing.T) {
	const large = minProgressBytes + 1<<20
	tests := []struct {
		name     string
		bytes    int
		zipped   bool
		terminal bool
		term     string
		progress bool
	}{
		{"a large file on a terminal", large, false, true, "xterm", true},
		{"a large archive on a terminal", large, true, true, "xterm", true},
		{"a small file on a terminal", 1 << 20, false, true, "xterm", false},
		{"a dumb terminal", large, false, true, "dumb", false},
		{"no terminal", large, false, false, "xterm", false},
	}
	for _, tt := range tests {
		path := writeLog(t, tt.bytes, tt.zipped)
		var stdout, stderr bytes.Buffer
		code := Program.Run(t.Context(), []string{"amdlog", "analyze", path}, term.IO{
			In: strings.NewReader(""), Out: &stdout, Err: &stderr, Now: time.Now, ErrTerminal: tt.terminal,
			Getenv: func(name string) string { return map[string]string{"TERM": tt.term}[name] },
		})
		if code != term.ExitOK || !strings.Contains(stdout.String(), "HIP records") {
			t.Fatalf("%s: code %d, %s%s", tt.name, code, stdout.String(), stderr.String())
		}
		shown := stderr.String()
		if got := strings.Contains(shown, "hip.log") && strings.Contains(shown, "%"); got != tt.progress {
			t.Errorf("%s: stderr %q", tt.name, shown)
		}
		if tt.progress && !strings.HasSuffix(shown, " \r") {
			t.Errorf("%s: the bar is not removed: %q", tt.name, shown[max(0, len(shown)-100):])
		}
		if !tt.progress && shown != "" {
			t.Errorf("%s: stderr %q, want none", tt.name, shown)
		}
	}
}

func TestTruncatedArchiveIsAnalyzedUpToItsEnd(t *testing.T) {
	path := writeLog(t, 1<<20, true)
	if err := os.Truncate(path, 700<<10); err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	code := Program.Run(t.Context(), []string{"amdlog", "analyze", path}, term.IO{
		In: strings.NewReader(""), Out: &stdout, Err: &stderr, Now: time.Now, Getenv: func(string) string { return "" },
	})
	if code != term.ExitOK || !strings.Contains(stdout.String(), "warning truncated: the compressed data end early") || stderr.Len() > 0 {
		t.Errorf("code %d, %s%s", code, stdout.String(), stderr.String())
	}
	if err := os.Truncate(path, 12); err != nil {
		t.Fatal(err)
	}
	code = Program.Run(t.Context(), []string{"amdlog", "analyze", path}, term.IO{
		In: strings.NewReader(""), Out: &stdout, Err: &stderr, Now: time.Now, Getenv: func(string) string { return "" },
	})
	if code != term.ExitFailure || !strings.Contains(stderr.String(), "before the compressed data end early") {
		t.Errorf("an archive without a line: code %d, %s", code, stderr.String())
	}
}

// A log may grow while it is read.
func TestGrowingFileIsReadToItsEnd(t *testing.T) {
	var out bytes.Buffer
	p := progressbar.NewReader(strings.NewReader(strings.Repeat("x", 1000)), progress(&out, "hip.log", 10))
	n, err := new(bytes.Buffer).ReadFrom(&p)
	if n != 1000 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}

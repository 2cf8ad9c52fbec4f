package log

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zapcore"
)

// reader reads the log once open is closed.
type reader struct {
	open chan struct{}
	text bytes.Buffer
}

func (r *reader) Write(p []byte) (int, error) {
	<-r.open
	return r.text.Write(p)
}

// lines returns level, message and number of lost lines of each line.
func (r *reader) lines(t *testing.T) (all []string) {
	t.Helper()
	for line := range bytes.Lines(r.text.Bytes()) {
		var l struct {
			Level, Msg string
			Time       time.Time
			Lost       int
		}
		if err := json.Unmarshal(line, &l); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		if l.Time.IsZero() {
			t.Errorf("no time in %s", line)
		}
		all = append(all, fmt.Sprint(l.Level, " ", l.Msg, " ", l.Lost))
	}
	return all
}

func TestLogIsWrittenLineByLineToItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{open: make(chan struct{})}
		close(r.open)
		logs := openStream(r, jsonEncoder())
		log := logs.Logger()
		log.Info("one")
		log.Debug("below the level")
		logs.SetLevel("debug")
		log.Debug("two")
		logs.Close()
		if diff := cmp.Diff([]string{"info one 0", "debug two 0"}, r.lines(t)); diff != "" {
			t.Error(diff)
		}
	})
}

func TestReaderThatStopsLosesLinesAndBlocksNoLogger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{open: make(chan struct{})}
		logs := openStream(r, jsonEncoder())
		log := logs.Changes()
		const lost = 17
		log.Info("first")
		synctest.Wait() // it is being written
		for range queueLines + lost {
			log.Info("line")
		}
		began := time.Now()
		logs.Close()
		if took := time.Since(began); took != flushTime {
			t.Errorf("Close took %v, want %v", took, flushTime)
		}
		close(r.open)
		synctest.Wait()
		want := []string{"info first 0", fmt.Sprint("warn "+linesLost+" ", lost)}
		for range queueLines {
			want = append(want, "info line 0")
		}
		if diff := cmp.Diff(want, r.lines(t)); diff != "" {
			t.Error(diff)
		}
	})
}

func TestTextForATerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{open: make(chan struct{})}
		close(r.open)
		logs := openStream(r, textEncoder())
		logs.Logger().Named("server").Warn("cannot accept connections", Socket("/run/a"))
		logs.Close()
		_, got, _ := strings.Cut(r.text.String(), "  ") // after the time
		if want := "WARN  server  cannot accept connections  {\"socket\": \"/run/a\"}\n"; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	})
}

// The encoders escape what would end a line or a string of JSON; a terminal acts on more.
func TestNoLineHasACharacterForATerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const hostile = "a\nb\x1b[2J\x7f\u009b\u202e\U000e0001\xffé"
		for name, tc := range map[string]struct {
			encoder zapcore.Encoder
			want    string
		}{
			"json": {jsonEncoder(), `"msg":"a\nb\u001b[2J\u007f\u009b\u202e\udb40\udc01\ufffdé","exe":"a\nb\u001b[2J\u007f\u009b\u202e\udb40\udc01\ufffdé"}` + "\n"},
			"text": {textEncoder(), `INFO  a\nb\u001b[2J\u007f\u009b\u202e\udb40\udc01` + "\ufffdé" + `  {"exe": "a\nb\u001b[2J\u007f\u009b\u202e\udb40\udc01\ufffdé"}` + "\n"},
		} {
			r := &reader{open: make(chan struct{})}
			close(r.open)
			logs := openStream(r, tc.encoder)
			logs.Logger().Info(hostile, Exe(hostile))
			logs.Close()
			if got := r.text.String(); !strings.HasSuffix(got, tc.want) {
				t.Errorf("%s: %q, want %q", name, got, tc.want)
			}
			var exe struct{ Exe string }
			if object := r.text.String()[strings.IndexByte(r.text.String(), '{'):]; json.Unmarshal([]byte(object), &exe) != nil || exe.Exe != strings.ToValidUTF8(hostile, "\ufffd") {
				t.Errorf("%s: the program is read as %q", name, exe.Exe)
			}
		}
	})
}

func TestAuditLogIsWrittenAtEveryLevel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{open: make(chan struct{})}
		close(r.open)
		logs := openStream(r, jsonEncoder())
		logs.SetLevel("error")
		logs.Logger().Warn("below the level")
		for range repeatBurst + 1 {
			logs.Audit().Info("call")
		}
		logs.Close()
		if diff := cmp.Diff(slices.Repeat([]string{"info call 0"}, repeatBurst+1), r.lines(t)); diff != "" {
			t.Error(diff)
		}
	})
}

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
	r := &reader{open: make(chan struct{})}
	close(r.open)
	logs := openStream(r, textEncoder())
	logs.Logger().Named("server").Warn("cannot accept connections", Socket("/run/a"))
	logs.Close()
	_, got, _ := strings.Cut(r.text.String(), "  ") // after the time
	if want := "WARN  server  cannot accept connections  {\"socket\": \"/run/a\"}\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestAuditLogIsWrittenAtEveryLevel(t *testing.T) {
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
}

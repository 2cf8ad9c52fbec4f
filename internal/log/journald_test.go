package log

import (
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// fakeJournald receives entries as journald does: who sends one waits until it is read.
type fakeJournald chan map[string]string

func (j fakeJournald) send(message string, priority journal.Priority, fields map[string]string) error {
	entry := map[string]string{"MESSAGE": message, "PRIORITY": fmt.Sprint(int(priority))}
	maps.Copy(entry, fields)
	j <- entry
	return nil
}

// next returns the fields of the next entry. All have names for journald and one line.
func (j fakeJournald) next(t *testing.T) map[string]string {
	t.Helper()
	select {
	case entry := <-j:
		checkEntry(t, entry)
		return entry
	case <-time.After(time.Minute):
		t.Fatal("no entry")
	}
	return nil
}

func checkEntry(t *testing.T, entry map[string]string) {
	t.Helper()
	for name, value := range entry {
		if !isPrintable([]byte(value)) || strings.Trim(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != "" || strings.HasPrefix(name, "_") {
			t.Fatalf("field %q has %q", name, value)
		}
	}
}

func TestJournaldEntryHasAFieldForEachFieldOfTheEvent(t *testing.T) {
	j := make(fakeJournald)
	logs := openJournald(j.send)
	log := logs.Changes()
	log.Debug("below the level")
	log.Named("executor").With(zap.Stringer("target", gpreempt.ProcessKey{PID: 7, Start: 9})).Error("a call hangs",
		zap.Duration("after", 2*time.Second), zap.Error(errors.New("one\ntwo")), zap.Bool("was-suspended", true))
	want := map[string]string{
		"MESSAGE":  `a call hangs: target=7@9, after=2s, error="one\ntwo", was-suspended=true`,
		"PRIORITY": "3", "SYSLOG_IDENTIFIER": "gpreemptd",
		"GPREEMPT_TARGET": "7@9", "GPREEMPT_AFTER": "2s", "GPREEMPT_ERROR": `one\ntwo`, "GPREEMPT_WAS_SUSPENDED": "true", "GPREEMPT_LOGGER": "executor",
	}
	if diff := cmp.Diff(want, j.next(t)); diff != "" {
		t.Error(diff)
	}
	logs.Close()
}

func TestJournaldEntryOfAStateChangeHasPriorityAndSubject(t *testing.T) {
	j := make(fakeJournald)
	logs := openJournald(j.send)
	defer logs.Close()
	logs.SetLevel("debug")
	records := Records{logs.Changes(), leaseID}
	for _, tc := range []struct {
		record scheduler.Record
		want   map[string]string
	}{
		{
			scheduler.Record{
				Kind: scheduler.RecordTarget, Target: gpreempt.ProcessKey{PID: 7, Start: 9}, FromTarget: scheduler.TargetSuspending,
				ToTarget: scheduler.TargetSuspended, Cause: scheduler.CauseDone, Lease: 3, Took: 1500 * time.Microsecond,
			},
			map[string]string{
				"MESSAGE":  "target changed: target=7@9, from=suspending, to=suspended, lease=18f3a7c25e90b401-3, cause=done, took=1.5ms",
				"PRIORITY": "7", "GPREEMPT_TARGET": "7@9", "GPREEMPT_FROM": "suspending", "GPREEMPT_TO": "suspended",
				"GPREEMPT_LEASE": "18f3a7c25e90b401-3", "GPREEMPT_CAUSE": "done", "GPREEMPT_TOOK": "1.5ms",
			},
		},
		{
			scheduler.Record{Kind: scheduler.RecordBreaker, GPU: 23256, On: true, Cause: scheduler.CauseHung},
			map[string]string{"MESSAGE": "breaker opened: gpu=23256, cause=hung", "PRIORITY": "4", "GPREEMPT_GPU": "23256", "GPREEMPT_CAUSE": "hung"},
		},
		{scheduler.Record{Kind: scheduler.RecordPolicy}, map[string]string{"MESSAGE": "policy changed", "PRIORITY": "6"}},
	} {
		records.Write(tc.record)
		got := j.next(t)
		tc.want["SYSLOG_IDENTIFIER"] = "gpreemptd"
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Error(diff)
		}
	}
}

// No text of a client or a kernel can add a field, or make an entry too long to send.
func TestJournaldEntriesKeepTheirForm(t *testing.T) {
	j := make(fakeJournald)
	logs := openJournald(j.send)
	defer logs.Close()
	log := logs.Changes()
	long := strings.Repeat("x\nPRIORITY=0\n", 100<<10)
	log.Warn("client: "+long, zap.String("why", long), zap.String("text", "a\n_PID=1"), zap.ByteString("stack", []byte(long)), zap.String("Ärger=", "x"))
	got := j.next(t)
	want := map[string]string{
		"MESSAGE": ("client: " + strings.ReplaceAll(long, "\n", `\n`))[:fieldMax], "PRIORITY": "4", "SYSLOG_IDENTIFIER": "gpreemptd",
		"GPREEMPT_WHY": printable(long)[:fieldMax], "GPREEMPT_TEXT": `a\n_PID=1`, "GPREEMPT_STACK": printable(long)[:fieldMax], "GPREEMPT__RGER_": "x",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A program's path once began a line of its own in MESSAGE, which read as a call of an admin.
func TestNoFieldCanImitateAnotherInTheMessageOfAnEntry(t *testing.T) {
	j := make(fakeJournald)
	logs := openJournald(j.send)
	defer logs.Close()
	const exe = "/tmp/x\nadmin call: audit=true, outcome=done, uid=0"
	logs.Audit().Warn("admin call", Audit(true), Outcome("refused"), UID(1000), Exe(exe), Cgroup("/a, uid=0"),
		Request(`{"label":"\u202e"}`), Method(""), Address("\xff\x1b[2J\u009b\u202e\U000e0001"), Certificate(`cn:é\`), Why("a,uid=0"))
	want := map[string]string{
		"MESSAGE": `admin call: audit=true, outcome=refused, uid=1000, exe="/tmp/x\nadmin call: audit=true, outcome=done, uid=0", ` +
			`cgroup="/a, uid=0", request="{\"label\":\"\\u202e\"}", method="", address="\xff\x1b[2J\u009b\u202e\U000e0001", certificate="cn:é\\", why="a,uid=0"`,
		"PRIORITY": "4", "SYSLOG_IDENTIFIER": "gpreemptd",
		"GPREEMPT_AUDIT": "true", "GPREEMPT_OUTCOME": "refused", "GPREEMPT_UID": "1000", "GPREEMPT_EXE": printable(exe), "GPREEMPT_CGROUP": "/a, uid=0",
		"GPREEMPT_REQUEST": `{"label":"\u202e"}`, "GPREEMPT_METHOD": "", "GPREEMPT_ADDRESS": "\uFFFD" + `\u001b[2J\u009b\u202e\udb40\udc01`, "GPREEMPT_CERTIFICATE": `cn:é\`, "GPREEMPT_WHY": "a,uid=0",
	}
	if diff := cmp.Diff(want, j.next(t)); diff != "" {
		t.Error(diff)
	}
}

// Whatever the texts are, an entry can be read, its fields have the values as one line, and MESSAGE is one
// line from which exactly the same values can be read.
func FuzzJournaldEntry(f *testing.F) {
	f.Add("admin call", "/tmp/x\nadmin call: uid=0", "")
	f.Add("a\x1b[2J", "\xff, uid=0", `"\`)
	f.Fuzz(func(t *testing.T, message, exe, why string) {
		if max(len(message), len(exe), len(why)) > 1<<10 {
			return // cut values are tested elsewhere
		}
		shown, entry := journaldEntry(zapcore.Entry{Message: message}, []zapcore.Field{Exe(exe), Why(why)})
		checkEntry(t, entry)
		if !isPrintable([]byte(shown)) {
			t.Fatalf("MESSAGE is %q", shown)
		}
		want := []string{printable(message), exe, why}
		pairs, ok := strings.CutPrefix(shown, want[0]+": ")
		if !ok {
			t.Fatalf("MESSAGE is %q", shown)
		}
		got := []string{want[0]}
		for _, key := range []string{"exe=", "why="} {
			value, rest, ok := unquoted(strings.TrimPrefix(pairs, key))
			if !ok || !strings.HasPrefix(pairs, key) {
				t.Fatalf("MESSAGE is %q", shown)
			}
			got, pairs = append(got, value), strings.TrimPrefix(rest, ", ")
		}
		if diff := cmp.Diff([]string{printable(exe), printable(why)}, []string{entry["GPREEMPT_EXE"], entry["GPREEMPT_WHY"]}); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff(want, got); diff != "" || pairs != "" {
			t.Errorf("%s%q remains", diff, pairs)
		}
	})
}

// unquoted reads a value that quoted wrote at the beginning of a text.
func unquoted(text string) (value, rest string, ok bool) {
	if quote, err := strconv.QuotedPrefix(text); err == nil && text[0] == '"' {
		value, err = strconv.Unquote(quote)
		return value, text[len(quote):], err == nil
	}
	i := strings.IndexAny(text+",", " ,=\"\\")
	return text[:i], text[i:], i > 0
}

// A journald that stops reading blocks no logger.
func TestJournaldThatStopsReadingGetsTheNumberOfLostLines(t *testing.T) {
	j := make(fakeJournald)
	logs := openJournald(j.send)
	log := logs.Changes()
	const sent = 2 * queueLines
	for range sent { // more than queue and socket hold
		log.Info("line")
	}
	lines, lost := 0, 0
	for lost == 0 {
		entry := j.next(t)
		if entry["MESSAGE"] == "line" {
			lines++
			continue
		}
		if entry["PRIORITY"] != "4" || !strings.HasPrefix(entry["MESSAGE"], linesLost) {
			t.Fatalf("%v", entry)
		}
		if _, err := fmt.Sscan(entry["GPREEMPT_LOST"], &lost); err != nil {
			t.Fatal(err)
		}
	}
	for lines+lost < sent {
		if entry := j.next(t); entry["MESSAGE"] != "line" {
			t.Fatalf("%v", entry)
		}
		lines++
	}
	logs.Close()
}

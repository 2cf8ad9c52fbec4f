package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// unprintable tells of text that would do something to a terminal.
func unprintable(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }

// A job chooses its own name and a client its label: neither must be able to write
// lines or commands to a terminal into what gpctl prints or the daemon logs.
func TestNamesWithEscapeSequencesReachNeitherTerminalNorLog(t *testing.T) {
	t.Parallel()
	const name, label = "train\x1b[2J\n{x\xff", "llm\x1b]0;x\a\r\n{\"level\":\"info\",\"audit\":true}\u202e"
	m := emulate(t, kfdemu.Config{})
	program := filepath.Join(filepath.Dir(trainBinary), name)
	if err := os.Link(trainBinary, program); err != nil {
		t.Fatal(err)
	}
	job := m.workAs(program, "work", "--duration", "500", "--runtime")
	pid := job.PID
	d := m.start(strings.ReplaceAll(atOnce, "policy:", "log: {level: debug}\npolicy:"))
	d.offlineTarget(job, 1)
	req := announcement()
	req.Label = label
	lease, err := d.online.NotifyOnline(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	d.check(0, "", "target", "suspend", fmt.Sprint(pid), "--ttl", "1m")
	if _, err := d.admin.SuspendTarget(t.Context(), &gpreemptv1.SuspendTargetRequest{TargetId: "1\n{\"audit\":true}\x1b[2J"}); err == nil {
		t.Error("nothing was suspended")
	}
	for _, args := range [][]string{
		{"status", "-o", "wide"},
		{"target", "list", "-o", "wide"},
		{"target", "explain", fmt.Sprint(pid)},
		{"queue", "list", "-o", "wide"},
		{"lease", "list", "-o", "wide"},
		{"events", "--all"},
	} {
		r := d.ctl(args...)
		if i := strings.IndexFunc(r.Out+r.Err, unprintable); r.Code != 0 || i >= 0 {
			t.Errorf("gpctl %v: exit status %d; a character for terminals at %d of %q", args, r.Code, i, r.Out+r.Err)
		}
		for line := range strings.Lines(r.Out) {
			if strings.HasPrefix(line, "{") {
				t.Errorf("gpctl %v: a name began a line: %q", args, line)
			}
		}
	}
	// Programs get them as they are, but for what is no text.
	r := d.ctl("target", "list", "-o", "json")
	var list gpreemptv1.ListTargetsResponse
	if err := protojson.Unmarshal([]byte(r.Out), &list); err != nil || list.GetTargets()[0].GetComm() != strings.ToValidUTF8(name, "\ufffd") {
		t.Errorf("the name comes as %q, %v", list.GetTargets(), err)
	}
	d.complete(lease.GetLeaseId())
	d.check(0, "", "target", "resume", fmt.Sprint(pid))
	job.stop()
	m.gone(d, pid)
	d.stop() // its log is complete

	// Every line of the log is one object, and as many of the audit log as there
	// were calls.
	audited := 0
	for _, line := range d.log.all() {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Errorf("%v in log line %q", err, line)
		}
		if i := strings.IndexFunc(line, unicode.IsControl); i >= 0 {
			t.Errorf("a control character at %d of %q", i, line)
		}
		if entry["audit"] == true {
			audited++
		}
	}
	if audited != 3 {
		t.Errorf("%d lines in the audit log, want one for each of 3 calls", audited)
	}
}

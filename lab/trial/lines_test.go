package trial

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

func TestRequestLines(t *testing.T) {
	for line, want := range map[string]evidence.Request{
		"gpreempt-request total_ms=12.5":                                           {Total: 12.5},
		"  gpreempt-request total_ms=3 start_ms=1 service_ms=2 announce_ms=0.5 \r": {Total: 3, Start: 1, Service: 2, Announce: 0.5},
		"gpreempt-request failed=timeout":                                          {Failed: "timeout"},
		`{"total_ms": 4, "ttft_ms": 1, "tpot_ms": 0.25, "anything": "else"}`:       {Total: 4, TTFT: 1, TPOT: 0.25},
		`{"event":"answer","total_ms":4,"service_ms":3,"failed":"out of memory"}`:  {Total: 4, Service: 3, Failed: "out of memory"},
	} {
		got, ok, err := parseRequest(line)
		if !ok || err != nil || cmp.Diff(want, got) != "" {
			t.Errorf("%q: %+v, %v, %v", line, got, ok, err)
		}
	}
	for _, line := range []string{"", "step 5", "gpreempt-requests total_ms=1", `{"event":"answer"}`, "total_ms=5"} {
		if _, ok, err := parseRequest(line); ok || err != nil {
			t.Errorf("%q is taken for a request: %v", line, err)
		}
	}
	for _, line := range []string{
		"gpreempt-request total_ms=fast", "gpreempt-request total=1", "gpreempt-request start_ms=1", "gpreempt-request total_ms=-1", "gpreempt-request total_ms=NaN",
		`{"total_ms": "4"}`, `{"total_ms": 1e300}`,
	} {
		if _, _, err := parseRequest(line); err == nil {
			t.Errorf("%q is accepted", line)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add("gpreempt-request total_ms=12.5 start_ms=1 failed=x")
	f.Add(`{"total_ms": 4, "failed": "x"}`)
	f.Fuzz(func(t *testing.T, line string) {
		q, ok, err := parseRequest(line)
		if ok && err == nil && (plausible(&q) != nil || !strings.Contains(line, "total_ms") && q.Failed == "") {
			t.Errorf("%q: %+v", line, q)
		}
	})
}

func TestProgressIsTheRateWithinTheWindow(t *testing.T) {
	p := &progress{pattern: regexp.MustCompile(DefaultProgress)}
	at := time.Unix(1000, 0)
	say := func(after time.Duration, line string) { p.line(at.Add(after), line) }
	say(0, "step 1")
	p.window(true)
	say(time.Second, "Step: 100, loss 0.5")
	if _, known := p.rate(); known {
		t.Error("a rate is known after one report")
	}
	say(2*time.Second, "no progress here")
	say(3*time.Second, "epoch 1 step=150")
	p.window(false)
	say(4*time.Second, "step 900")
	if rate, known := p.rate(); !known || rate != 25 {
		t.Errorf("rate %v, %v, want 25", rate, known)
	}
	p.window(true)
	if _, known := p.rate(); known {
		t.Error("a window has the reports of the one before")
	}
	say(5*time.Second, "step 900")
	say(6*time.Second, "step 900")
	if rate, known := p.rate(); !known || rate != 0 {
		t.Errorf("a job that stands has rate %v, %v", rate, known)
	}
}

func TestJobProvesItsPackets(t *testing.T) {
	p := &progress{pattern: regexp.MustCompile(DefaultProgress)}
	p.line(time.Time{}, `{"event":"report","packets":5,"count":3}`)
	p.line(time.Time{}, `{"event":"done"`)
	if p.packets() != nil {
		t.Error("a line that is no proof was taken for one")
	}
	p.line(time.Time{}, `{"event":"done","queues":[],"packets":10,"count":7,"abandoned":2,"hash":"x","ok":false}`)
	if got := p.packets(); got == nil || got.lost() != 1 || got.repeated() != 0 || got.OK {
		t.Errorf("proof %+v", got)
	}
	p.line(time.Time{}, `{"event":"done","packets":10,"count":12,"ok":false}`)
	if got := p.packets(); got.lost() != 0 || got.repeated() != 2 {
		t.Errorf("proof %+v", got)
	}
}

package trial

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// requestWord begins the line by which a command reports a request.
const requestWord = "gpreempt-request"

// parseRequest reads the line by which a command reports a request:
//
//	gpreempt-request total_ms=12.5 [announce_ms=0.4 start_ms=1 service_ms=11.1 ttft_ms=.. tpot_ms=.. failed=WORD]
//
// or a line of JSON with the same names. ok is false for any other line. The error is for a
// line that begins as one and is not.
func parseRequest(line string) (q evidence.Request, ok bool, err error) {
	line = strings.TrimSpace(line)
	if strings.HasPrefix(line, "{") && strings.Contains(line, `"total_ms"`) {
		var fields struct {
			Total    *float64 `json:"total_ms"`
			Announce float64  `json:"announce_ms"`
			Start    float64  `json:"start_ms"`
			Service  float64  `json:"service_ms"`
			TTFT     float64  `json:"ttft_ms"`
			TPOT     float64  `json:"tpot_ms"`
			Failed   string   `json:"failed"`
		}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			return q, false, fmt.Errorf("a line with total_ms is not JSON of a request: %w", err)
		}
		if fields.Total == nil {
			return q, false, nil
		}
		q = evidence.Request{
			Total: *fields.Total, Announce: fields.Announce, Start: fields.Start, Service: fields.Service, TTFT: fields.TTFT, TPOT: fields.TPOT,
			Failed: fields.Failed,
		}
		return q, true, plausible(&q)
	}
	rest, ok := strings.CutPrefix(line, requestWord+" ")
	if !ok {
		return q, false, nil
	}
	into := map[string]*float64{
		"total_ms": &q.Total, "announce_ms": &q.Announce, "start_ms": &q.Start, "service_ms": &q.Service, "ttft_ms": &q.TTFT, "tpot_ms": &q.TPOT,
	}
	total := false
	for field := range strings.FieldsSeq(rest) {
		name, value, _ := strings.Cut(field, "=")
		if name == "failed" {
			q.Failed = value
			continue
		}
		at, known := into[name]
		if !known {
			return q, false, fmt.Errorf("%s has the unknown field %q", requestWord, name)
		}
		if *at, err = strconv.ParseFloat(value, 64); err != nil {
			return q, false, fmt.Errorf("%s: %s is %q and not a number", requestWord, name, value)
		}
		total = total || name == "total_ms"
	}
	if !total && q.Failed == "" {
		return q, false, fmt.Errorf("%s has no total_ms", requestWord)
	}
	return q, true, plausible(&q)
}

// plausible refuses durations that no request has.
func plausible(q *evidence.Request) error {
	const day = 24 * 3600 * 1000
	for _, v := range []float64{q.Total, q.Announce, q.Start, q.Service, q.TTFT, q.TPOT} {
		if math.IsNaN(v) || v < 0 || v > day {
			return fmt.Errorf("a request reports %v ms", v)
		}
	}
	return nil
}

// progress follows what a job reports, and measures its rate between the first and the last
// report of a window.
type progress struct {
	pattern *regexp.Regexp

	mu            sync.Mutex // guards all below
	open          bool       // the window
	n             int        // reports in it
	first, latest report
	matched       bool   // at any time
	text          string // the last line
	proof         *proof
}

type report struct {
	at    time.Time
	count float64
}

// proof is the last line of a job that counts its packets.
type proof struct {
	Event     string `json:"event"`
	Packets   uint64 `json:"packets"`
	Count     uint64 `json:"count"`
	Abandoned uint64 `json:"abandoned"`
	OK        bool   `json:"ok"`
}

// lost and repeated packets, by the counts.
func (p *proof) lost() uint64     { return p.Packets - min(p.Packets, p.Count+p.Abandoned) }
func (p *proof) repeated() uint64 { return p.Count - min(p.Count, p.Packets) }

// line takes a line that the job wrote at a time.
func (p *progress) line(at time.Time, line string) {
	if strings.HasPrefix(line, `{"event":"done"`) {
		var said proof
		if json.Unmarshal([]byte(line), &said) == nil && strings.Contains(line, `"packets"`) {
			p.mu.Lock()
			p.proof = &said
			p.mu.Unlock()
		}
	}
	p.mu.Lock()
	p.text = line
	p.mu.Unlock()
	m := p.pattern.FindStringSubmatch(line)
	if m == nil {
		return
	}
	count, err := strconv.ParseFloat(m[1], 64)
	if err != nil || math.IsNaN(count) || math.IsInf(count, 0) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.matched = true
	if !p.open {
		return
	}
	p.latest = report{at, count}
	if p.n == 0 {
		p.first = p.latest
	}
	p.n++
}

// seen reports whether the job has reported its progress at any time.
func (p *progress) seen() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.matched
}

// last says what the job wrote instead of its progress.
func (p *progress) last(pattern string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.text == "" {
		return "it wrote nothing, and " + pattern + " is looked for"
	}
	const most = 80 // bytes
	return fmt.Sprintf("its last line is %.*q, and %s is looked for", most, p.text, pattern)
}

// window begins or ends the window.
func (p *progress) window(open bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open = open; open {
		p.n = 0
	}
}

// rate returns the units per second between the first and the last report of the window. known is
// false with fewer than two reports.
func (p *progress) rate() (rate float64, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	seconds := p.latest.at.Sub(p.first.at).Seconds()
	if p.n < 2 || seconds <= 0 {
		return 0, false
	}
	return max(0, p.latest.count-p.first.count) / seconds, true
}

// packets returns the proof of the job, nil without one.
func (p *progress) packets() *proof {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.proof
}

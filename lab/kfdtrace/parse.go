package kfdtrace

import (
	"strconv"
	"strings"
	"time"
)

// kind is the kind of a line of a trace.
type kind uint8

const (
	kindUnknown kind = iota
	kindNothing      // comments and empty lines
	kindEvent        // an event with name and text
	kindMarker       // written by Record itself
	kindLost         // the buffer of cpu was full; count events are lost, 0 when unknown
)

// line is one line of a trace. The strings are parts of the text that was parsed.
type line struct {
	kind  kind
	cpu   int
	pid   int // of the thread
	at    time.Duration
	count uint64
	name  string
	text  string
}

// marker is what Record writes into the trace when it begins.
const marker = "gpreempt: begin"

// markerEvent is the kernel's name for what is written to trace_marker.
const markerEvent = "tracing_mark_write"

// parseLine parses a line of trace_pipe, without its newline
// (kernel/trace/trace_output.c).
func parseLine(s string) line {
	t := strings.TrimSpace(s)
	if t == "" || t[0] == '#' {
		return line{kind: kindNothing}
	}
	l, ok := parseLost(t)
	if !ok {
		l, ok = parseEvent(t)
	}
	if !ok {
		return line{}
	}
	return l
}

// parseLost parses "CPU:3 [LOST 123 EVENTS]".
func parseLost(t string) (line, bool) {
	t, ok := strings.CutPrefix(t, "CPU:")
	if !ok {
		return line{}, false
	}
	cpu, rest := number(t)
	rest, ok = strings.CutPrefix(rest, " [LOST ")
	if cpu < 0 || !ok || !strings.HasSuffix(rest, "EVENTS]") {
		return line{}, false
	}
	l := line{kind: kindLost, cpu: cpu}
	if count, err := strconv.ParseUint(strings.TrimSuffix(rest, " EVENTS]"), 10, 64); err == nil {
		l.count = count
	}
	return l, true
}

// parseEvent parses "TASK-PID [CPU] FLAGS SECONDS.MICROS: EVENT: TEXT". The name of
// the task may contain anything.
func parseEvent(t string) (line, bool) {
	for from := 0; ; {
		i := strings.IndexByte(t[from:], '[')
		if i < 0 {
			return line{}, false
		}
		from += i + 1
		l := line{kind: kindEvent}
		var rest string
		if l.cpu, rest = number(t[from:]); l.cpu < 0 || !strings.HasPrefix(rest, "] ") {
			continue
		}
		var ok bool
		if l.pid, ok = taskPID(t[:from-1]); !ok {
			continue
		}
		if _, rest, ok = strings.Cut(strings.TrimLeft(rest[2:], " "), " "); !ok { // the flags
			continue
		}
		if l.at, rest, ok = timestamp(strings.TrimLeft(rest, " ")); !ok {
			continue
		}
		if l.name, l.text, ok = strings.Cut(rest, ":"); !ok || !isName(l.name) {
			continue
		}
		l.text = strings.TrimPrefix(l.text, " ")
		if l.name == markerEvent && l.text == marker {
			l.kind = kindMarker
		}
		return l, true
	}
}

// timestamp parses "SECONDS.MICROS: " at the beginning.
func timestamp(s string) (at time.Duration, rest string, ok bool) {
	stamp, rest, ok := strings.Cut(s, ": ")
	if !ok || strings.Trim(stamp, "0123456789.") != "" {
		return 0, s, false
	}
	at, err := time.ParseDuration(stamp + "s")
	return at, rest, err == nil
}

// taskPID parses the pid behind the last minus of "TASK-PID", which spaces and
// "(TGID)", where that is recorded, may follow.
func taskPID(s string) (int, bool) {
	s = strings.TrimRight(s, " ")
	if strings.HasSuffix(s, ")") {
		if i := strings.LastIndexByte(s, '('); i >= 0 {
			s = strings.TrimRight(s[:i], " ")
		}
	}
	i := strings.LastIndexByte(s, '-')
	if i < 0 {
		return 0, false
	}
	pid, rest := number(s[i+1:])
	return pid, pid >= 0 && rest == ""
}

// number parses a number below a billion at the beginning, or returns -1.
func number(s string) (int, string) {
	n, i := 0, 0
	for i < len(s) && s[i] >= '0' && s[i] <= '9' && i < 9 {
		n = n*10 + int(s[i]-'0')
		i++
	}
	if i == 0 {
		return -1, s
	}
	return n, s[i:]
}

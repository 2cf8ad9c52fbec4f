package kfdtrace

import (
	"strconv"
	"strings"
	"time"
)

// kind is what a line of a trace is.
type kind uint8

const (
	kindUnknown kind = iota
	kindNothing      // ornament: headers, rules, task switches of the graph
	kindEvent        // an event; name and text say which
	kindMarker       // what Record itself wrote
	kindCall         // a function of the graph was entered
	kindReturn       // a function of the graph ended after took
	kindLost         // the buffer of cpu was full; count events are gone, 0 is unknown
)

// line is one line of a trace. The strings are parts of what was parsed.
type line struct {
	kind  kind
	cpu   int
	pid   int // of the thread
	at    time.Duration
	took  time.Duration
	leaf  bool // of a return: there was no line for the call
	count uint64
	name  string
	text  string
}

// marker begins what Record writes into the trace, so that it is found again.
const marker = "gpreempt: "

// markerEvent is the name the kernel gives to what is written to trace_marker.
const markerEvent = "tracing_mark_write"

// parseLine reads a line of trace_pipe, without its end: of an event, or of the
// function graph with the options funcgraph-abstime, funcgraph-proc and
// funcgraph-tail (kernel/trace/trace_output.c, trace_functions_graph.c).
func parseLine(s string) line {
	t := strings.TrimSpace(s)
	switch {
	case t == "", t[0] == '#', strings.HasPrefix(t, "-----"):
		return line{kind: kindNothing}
	case strings.HasPrefix(t, "CPU:"):
		if l, ok := parseLost(t); ok {
			return l
		}
	}
	if l, ok := parseGraph(t); ok {
		return l
	}
	if l, ok := parseEvent(t); ok {
		return l
	}
	return line{}
}

// parseLost reads "CPU:3 [LOST 123 EVENTS]".
func parseLost(t string) (line, bool) {
	cpu, rest := number(t[len("CPU:"):])
	rest, ok := strings.CutPrefix(rest, " [LOST ")
	if cpu < 0 || !ok || !strings.HasSuffix(rest, "EVENTS]") {
		return line{}, false
	}
	l := line{kind: kindLost, cpu: cpu}
	if count, err := strconv.ParseUint(strings.TrimSuffix(rest, " EVENTS]"), 10, 64); err == nil {
		l.count = count
	}
	return l, true
}

// parseEvent reads "TASK-PID [CPU] FLAGS SECONDS.MICROS: EVENT: TEXT". The task's
// name may hold anything, the flags may be absent.
func parseEvent(t string) (line, bool) {
	for from := 0; ; {
		i := strings.IndexByte(t[from:], '[')
		if i < 0 {
			return line{}, false
		}
		from += i + 1
		var l line
		var rest string
		if l.cpu, rest = number(t[from:]); l.cpu < 0 || !strings.HasPrefix(rest, "] ") {
			continue
		}
		var ok bool
		if l.pid, ok = taskPID(t[:from-1]); !ok {
			continue
		}
		rest = strings.TrimLeft(rest[2:], " ")
		if l.at, rest, ok = stamp(rest); !ok {
			if _, rest, ok = strings.Cut(rest, " "); ok { // the flags
				l.at, rest, ok = stamp(strings.TrimLeft(rest, " "))
			}
		}
		if rest, ok = cutAfter(rest, ok, ": "); !ok {
			continue
		}
		if l.name, l.text, ok = strings.Cut(rest, ":"); !ok || !isEvent(l.name) {
			continue
		}
		l.text = strings.TrimPrefix(l.text, " ")
		l.kind = kindEvent
		if l.name == markerEvent && strings.HasPrefix(l.text, marker) {
			l.kind, l.text = kindMarker, l.text[len(marker):]
		}
		return l, true
	}
}

// parseGraph reads a line of the function graph:
//
//	SECONDS.MICROS |   CPU)  TASK-PID  |  MARK DURATION us |    FUNCTION();
//
// and for a function that called others, FUNCTION() { without a duration and
// } /* FUNCTION */ with it. Events stand in it as /* EVENT: TEXT */.
func parseGraph(t string) (line, bool) {
	var l line
	l.kind = kindNothing
	rest, timed := t, false
	if at, r, ok := stamp(t); ok && strings.HasPrefix(strings.TrimLeft(r, " "), "|") {
		l.at, rest, timed = at, strings.TrimLeft(strings.TrimLeft(r, " ")[1:], " "), true
	}
	if l.cpu, rest = number(rest); l.cpu < 0 || !strings.HasPrefix(rest, ") ") {
		return line{}, false
	}
	rest = rest[2:]
	if !timed { // "0)  TASK-PID => TASK-PID": the task of the CPU changed
		return l, strings.Contains(rest, " => ")
	}
	// The task's name is cut to 7 bytes and may hold a bar.
	bar := -1
	for {
		i := strings.IndexByte(rest[bar+1:], '|')
		if i < 0 {
			return line{}, false
		}
		bar += i + 1
		var ok bool
		if l.pid, ok = taskPID(rest[:bar]); ok {
			break
		}
	}
	column, body, ok := strings.Cut(rest[bar+1:], "|")
	if !ok {
		return line{}, false
	}
	column, body = strings.TrimSpace(column), strings.TrimSpace(body)
	if column == "" {
		return graphCall(l, body)
	}
	if strings.HasPrefix(column, "==") || strings.HasPrefix(column, "<=") { // an interrupt begins or ends
		return l, true
	}
	if l.took, ok = took(column); !ok {
		return line{}, false
	}
	l.kind = kindReturn
	if comment, ok := strings.CutPrefix(body, "} /* "); ok {
		l.name, _, ok = strings.Cut(comment, " ")
		return l, ok && l.name != ""
	}
	l.leaf = true
	l.name, ok = called(body)
	return l, ok
}

// graphCall reads what stands in a line of the graph without a duration.
func graphCall(l line, body string) (line, bool) {
	comment, ok := strings.CutPrefix(body, "/* ")
	if !ok {
		l.kind = kindCall
		l.name, ok = called(body)
		return l, ok && strings.Contains(body, "{")
	}
	comment = strings.TrimSuffix(comment, " */")
	if text, ok := strings.CutPrefix(comment, marker); ok {
		l.kind, l.text = kindMarker, text
		return l, true
	}
	l.kind = kindEvent
	l.name, l.text, ok = strings.Cut(comment, ":")
	l.text = strings.TrimPrefix(l.text, " ")
	return l, ok && isEvent(l.name)
}

// called reads "FUNCTION [MODULE]()", with anything behind or in the parentheses.
func called(s string) (string, bool) {
	name, _, ok := strings.Cut(s, "(")
	name, _, _ = strings.Cut(name, " ")
	return name, ok && name != ""
}

// took reads "# 1061.778 us"; the mark stands for the order of magnitude.
func took(s string) (time.Duration, bool) {
	s, ok := strings.CutSuffix(s, " us")
	if !ok {
		return 0, false
	}
	if i := strings.LastIndexByte(s, ' '); i >= 0 {
		s = s[i+1:]
	}
	whole, fraction, _ := strings.Cut(s, ".")
	return decimal(whole, fraction, time.Microsecond)
}

// stamp reads "SECONDS.FRACTION" at the beginning.
func stamp(s string) (time.Duration, string, bool) {
	digits := 0
	for digits < len(s) && (s[digits] == '.' || s[digits] >= '0' && s[digits] <= '9') {
		digits++
	}
	whole, fraction, ok := strings.Cut(s[:digits], ".")
	if !ok {
		return 0, s, false
	}
	at, ok := decimal(whole, fraction, time.Second)
	return at, s[digits:], ok
}

// decimal returns whole.fraction units. What is below a nanosecond is dropped.
func decimal(whole, fraction string, unit time.Duration) (time.Duration, bool) {
	n, err := strconv.ParseUint(whole, 10, 63)
	if err != nil || n > uint64((1<<63-1)/int64(unit))-1 {
		return 0, false
	}
	d := time.Duration(n) * unit
	for i := range len(fraction) {
		if fraction[i] < '0' || fraction[i] > '9' {
			return 0, false
		}
		unit /= 10
		d += time.Duration(fraction[i]-'0') * unit
	}
	return d, true
}

// taskPID reads the pid behind the last minus of "TASK-PID", with what else may
// stand behind: spaces, and "(TGID)" where that is recorded.
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

// number reads a number below a billion at the beginning, or gives -1.
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

// isEvent tells the name of an event.
func isEvent(s string) bool { return isName(s) }

// cutAfter is strings.CutPrefix that fails if ok is false.
func cutAfter(s string, ok bool, prefix string) (string, bool) {
	if !ok {
		return s, false
	}
	return strings.CutPrefix(s, prefix)
}

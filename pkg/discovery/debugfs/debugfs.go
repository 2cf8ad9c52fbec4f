// Package debugfs parses the files that amdkfd keeps in debugfs and decodes the
// register layouts in them into queues and hardware slots. It joins these with the
// queues of sysfs and of the driver's snapshots where the match is certain.
//
// Everything here is a function of its arguments: the caller reads the files.
// Reading them is not free. mqds takes the mutex of each process, and hqds reads
// thousands of registers one by one; both are for occasional reading, never for a
// hot path.
//
// The MQD of a queue (mqds) is the image of it in memory that the driver and the
// firmware share: what the driver writes is current, the positions are those of the
// last time the queue was unmapped. The HQD (hqds) is a slot of the hardware as it is
// now, which may still contain the registers of a queue that was destroyed long ago.
package debugfs

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// The files, below the root of the host.
const (
	MQDs = "sys/kernel/debug/kfd/mqds"
	HQDs = "sys/kernel/debug/kfd/hqds"
)

// Warning is a part of a file that is not an error and was not fully parsed: an unknown
// line, or a dump that ends early.
type Warning struct {
	// Line counts from 1.
	Line int
	// Text describes the part and how it was handled.
	Text string
}

// maxWarnings bounds the memory for the warnings of an arbitrary file.
const maxWarnings = 32

// warnings collects a bounded number of them.
type warnings struct {
	list []Warning
	more int
}

func (w *warnings) add(line int, format string, args ...any) {
	if w.full() {
		return
	}
	w.list = append(w.list, Warning{Line: line, Text: fmt.Sprintf(format, args...)})
}

// skipped adds an unknown line of text, quoted and cut: it may contain any bytes.
func (w *warnings) skipped(line int, what string, text []byte) {
	if w.full() {
		return
	}
	const most = 60
	more := ""
	if len(text) > most {
		text, more = text[:most], "..."
	}
	w.list = append(w.list, Warning{Line: line, Text: fmt.Sprintf("%s: %q%s", what, text, more)})
}

// full reports whether there is no room for another warning, and counts it then.
func (w *warnings) full() bool {
	if len(w.list) < maxWarnings {
		return false
	}
	w.more++
	return true
}

// all returns the warnings by line. The last one counts the omitted ones.
func (w *warnings) all(line int) []Warning {
	slices.SortStableFunc(w.list, func(a, b Warning) int { return cmp.Compare(a.Line, b.Line) })
	if w.more > 0 {
		return append(w.list, Warning{Line: line, Text: fmt.Sprintf("%d more warnings", w.more)})
	}
	return w.list
}

func malformed(line, column int, problem string) error {
	return &discovery.ParseError{Line: line, Column: column, Problem: problem}
}

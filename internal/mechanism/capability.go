package mechanism

import (
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Evidence is the result of one check of whether a mechanism can be used on a target.
type Evidence struct {
	// Check names what was checked, in a few words: "KFD version".
	Check string
	// Found is the result: "1.17, which has DBG_TRAP".
	Found string
	// OK: the result does not prevent the use.
	OK bool
	// Reason is the stable name of what prevents it, if it has one.
	Reason gpreempt.Reason
	// Remedy says what to do if it does, in a sentence; "" if nothing helps.
	Remedy string
}

// Capability is what a probe found: whether a mechanism can be used, and why.
type Capability struct {
	Evidence []Evidence
	// ReportsBirths: Handle of a session reports each queue that is born while the target is suspended.
	ReportsBirths bool
}

// Usable reports whether nothing prevents the use. A capability without evidence was not
// checked, and is not usable.
func (c Capability) Usable() bool {
	for _, e := range c.Evidence {
		if !e.OK {
			return false
		}
	}
	return len(c.Evidence) > 0
}

// Why returns in one line what prevents the use, or else what permits it.
func (c Capability) Why() string {
	usable := c.Usable()
	var parts []string
	for _, e := range c.Evidence {
		if e.OK == usable {
			parts = append(parts, e.Check+": "+e.Found)
		}
	}
	if len(parts) == 0 {
		return "not checked"
	}
	return strings.Join(parts, "; ")
}

package mechanism

import "strings"

// Evidence is one thing that was looked at to find out whether a mechanism can be
// used on a target.
type Evidence struct {
	// Check names what was looked at, a few words: "KFD version".
	Check string
	// Found says what it is: "1.17, which has DBG_TRAP".
	Found string
	// OK tells that it does not stand in the way.
	OK bool
	// Remedy says what to do when it does, a sentence; "" when nothing helps.
	Remedy string
}

// Capability is what a probe found: whether a mechanism can be used, and why.
type Capability struct {
	Evidence []Evidence
}

// Usable reports whether nothing stands in the way. A capability without evidence
// was not looked at, and is not usable.
func (c Capability) Usable() bool {
	for _, e := range c.Evidence {
		if !e.OK {
			return false
		}
	}
	return len(c.Evidence) > 0
}

// Why returns what stands in the way, or else what speaks for it, in one line.
func (c Capability) Why() string {
	usable := c.Usable()
	var parts []string
	for _, e := range c.Evidence {
		if e.OK == usable {
			parts = append(parts, e.Check+": "+e.Found)
		}
	}
	if len(parts) == 0 {
		return "not looked at"
	}
	return strings.Join(parts, "; ")
}

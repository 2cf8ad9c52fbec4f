package gpreempt

import "fmt"

// Resistance is what is done about a target that another program keeps from being suspended: one
// that traces or debugs it, or resumes it. The zero value does nothing but report it, as every
// target is reported that cannot be suspended.
type Resistance struct {
	// Stop: its tasks are stopped on the CPU while it is to be suspended.
	Stop bool `json:"stop,omitempty"`
	// KillAfter is the number of refused suspensions after which it is killed, 1 to 1000; 0 for
	// never.
	KillAfter int `json:"kill_after,omitempty"`
}

// Enforced reports whether it does more than report.
func (r Resistance) Enforced() bool { return r != Resistance{} }

// String returns it as the config file has it.
func (r Resistance) String() string {
	switch {
	case r.Stop:
		return "stop"
	case r.KillAfter > 0:
		return fmt.Sprintf("{kill: %d}", r.KillAfter)
	}
	return "report"
}

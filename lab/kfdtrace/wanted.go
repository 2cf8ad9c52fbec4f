package kfdtrace

import (
	_ "embed"
	"fmt"
	"path"
	"strings"
)

// driver is the kernel module that contains amdgpu and KFD.
const driver = "amdgpu"

// The groups of functions, in the order of a report.
const (
	GroupQueue     = "queue"     // from the ioctl to the device's queue manager
	GroupScheduler = "scheduler" // runlists and MES: what reaches the firmware
	GroupMQD       = "mqd"       // memory queue descriptors
	GroupProcess   = "process"   // /dev/kfd and evictions
	GroupOther     = "other"     // named in Options.Functions
)

var groups = []string{GroupQueue, GroupScheduler, GroupMQD, GroupProcess, GroupOther}

// wantedFunction is a function, or a pattern of path.Match.
type wantedFunction struct {
	pattern string
	group   string
	module  string // "" for any, and for the kernel itself
}

// wantedEvent is a trace event by the names it has had, each SYSTEM:NAME, the latest
// first. SYSTEM alone is all its events.
type wantedEvent []string

//go:embed driver.txt
var driverText string

// byDefault returns the events and functions of driver.txt.
func byDefault() (events []wantedEvent, functions []wantedFunction) {
	for line := range strings.Lines(driverText) {
		words := strings.Fields(line)
		switch {
		case len(words) == 0 || words[0] == "#":
		case words[0] == "event":
			events = append(events, words[1:])
		default:
			for _, pattern := range words[1:] {
				functions = append(functions, wantedFunction{pattern: pattern, group: words[0], module: driver})
			}
		}
	}
	return events, functions
}

// wanted returns what the options select.
func wanted(o Options) (events []wantedEvent, functions []wantedFunction, err error) {
	if len(o.Events)+len(o.Functions) == 0 {
		events, functions = byDefault()
		return events, functions, nil
	}
	for _, name := range o.Events {
		system, event, both := strings.Cut(name, ":")
		if !isName(system) || both && !isName(event) {
			return nil, nil, &Error{
				Request: true,
				What:    fmt.Sprintf("invalid trace event %q", name),
				Next:    "use SYSTEM:EVENT, or SYSTEM for all its events, as in the file available_events of tracefs",
			}
		}
		events = append(events, wantedEvent{name})
	}
	for _, name := range o.Functions {
		if _, err := path.Match(name, ""); err != nil || strings.ContainsAny(name, "/ \t\n") || name == "" {
			return nil, nil, &Error{
				Request: true,
				What:    fmt.Sprintf("invalid kernel function %q", name),
				Next:    "use a name as in /proc/kallsyms; * and ? are wildcards",
			}
		}
		functions = append(functions, wantedFunction{pattern: name, group: GroupOther})
	}
	return events, functions, nil
}

// isName reports whether s can be a part of a path below events.
func isName(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r != '_' && r != '-' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	})
}

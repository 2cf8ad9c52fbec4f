package proc

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// Name begins the name of each process of gpreempt in /proc/PID/comm, of every version.
const Name = "gpreempt"

// Ours reports whether a process is a part of gpreempt: of this daemon, of one that has died, of
// another one or of another version. Users choose the names of their processes, so that it is
// one of root, or of the user of this program.
func Ours(s discovery.ProcStatus) bool {
	return strings.HasPrefix(s.Name, Name) && (s.UID == 0 || int(s.UID) == os.Geteuid())
}

// TracerOf returns the process that traces a process with that status, and false if none does. root is
// the root directory of the host.
func TracerOf(root string, of discovery.ProcStatus) (discovery.ProcStatus, bool) {
	if of.Tracer == 0 {
		return discovery.ProcStatus{}, false
	}
	tracer, err := Status(root, strconv.Itoa(int(of.Tracer)))
	if err != nil { // the tracer has ended
		tracer = discovery.ProcStatus{Name: "unknown", Process: of.Tracer}
	}
	return tracer, true
}

// Traced says that a process traces another one, and the remedy. It never advises to end a part of
// gpreempt: its target would stay suspended until the driver notices.
func Traced(by discovery.ProcStatus) (found, remedy string) {
	if Ours(by) {
		return fmt.Sprintf("process %d (%s), a part of gpreempt, traces it", by.Process, by.Name),
			"it ends with its own gpreemptd; run one gpreemptd on a host"
	}
	return fmt.Sprintf("process %d (%s) traces it", by.Process, by.Name), "end that debugger or tracer; a process has one at a time"
}

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// A history is what clients, faults and the emulated driver did, in one order. judge
// checks it afterwards, as a function of the history alone: by order, and never by time.

// happening is what an entry is about.
type happening string

const (
	// A call is announced before it is made, and answered or failed after it returned.
	callAnnounced  happening = "announced"
	callAnswered   happening = "answered"
	callFailed     happening = "failed"
	callCompleting happening = "completing" // before Complete is called
	// A fault lasts from before it strikes until its causes are gone.
	faultBegins happening = "fault begins"
	faultEnds   happening = "fault ends"
	// driverLooked is what the driver of the emulated machine has of each process;
	// leasesOver is that, once no lease is left and no fault lasts.
	driverLooked happening = "driver"
	leasesOver   happening = "over"
	// daemonHolds: a daemon has suspended every job once since the last fault.
	daemonHolds happening = "holds"
	// packetsProved is what a process says of its packets at its end.
	packetsProved happening = "proved"
)

// entry is one line of a history.
type entry struct {
	What happening `json:"what"`
	// At is for those who compare with logs; judge knows no time.
	At time.Time `json:"at,omitzero"`
	// Call is the number of an announcement.
	Call   int    `json:"call,omitempty"`
	Quiet  bool   `json:"quiet,omitempty"`
	Reason string `json:"reason,omitempty"`
	Fault  string `json:"fault,omitempty"`
	// Began is the length of the history when the look at the driver began. Running and
	// Suspended are the processes with a queue that is.
	Began     int     `json:"began,omitempty"`
	Running   []int32 `json:"running,omitempty"`
	Suspended []int32 `json:"suspended,omitempty"`
	PID       int32   `json:"pid,omitempty"`
	OK        bool    `json:"ok,omitempty"`
}

// history is the entries about some processes: jobs that have queues all the time, and one
// that is never offline.
type history struct {
	Jobs    []int32
	Online  int32
	Entries []entry
}

// madeCall is what judge keeps of an announcement: the places of its entries.
type madeCall struct{ announced, returned, completing int }

// reasonMaxWait is the reason of an answer that did not wait longer.
const reasonMaxWait = "QUIESCE_REASON_MAX_WAIT"

// judge returns what a history broke.
func judge(h history) (problems []string) {
	broken := func(i int, format string, args ...any) {
		problems = append(problems, fmt.Sprintf("%d: ", i)+fmt.Sprintf(format, args...))
	}
	made, quiet := map[int]*madeCall{}, map[int]bool{}
	faults, lastFault, holdsSince := 0, -1, -1
	proved := map[int32]bool{}
	// calm reports whether no fault has lasted since a place.
	calm := func(since int) bool { return faults == 0 && lastFault < since }
	for i, e := range h.Entries {
		c := made[e.Call]
		switch e.What {
		case callAnnounced:
			made[e.Call] = &madeCall{announced: i, returned: -1, completing: -1}
			continue
		case callAnswered, callFailed, callCompleting:
			if c == nil {
				broken(i, "call %d was not made", e.Call)
				continue
			}
		case faultBegins:
			faults, lastFault, holdsSince = faults+1, i, -1
		case faultEnds:
			faults, lastFault = faults-1, i
		case daemonHolds:
			holdsSince = i
		case packetsProved:
			proved[e.PID] = true
			if !e.OK {
				broken(i, "the packets of process %d did not run exactly once", e.PID)
			}
		case driverLooked, leasesOver:
			if slices.Contains(e.Suspended, h.Online) {
				broken(i, "process %d is online and suspended", h.Online)
			}
		}
		switch e.What {
		case callAnswered, callFailed:
			if c.returned >= 0 {
				broken(i, "call %d returned twice", e.Call)
			}
			c.returned = i
			quiet[e.Call] = e.What == callAnswered && e.Quiet
			if e.What == callFailed && calm(c.announced) {
				broken(i, "call %d failed without a fault: %s", e.Call, e.Reason)
			}
			if e.What == callAnswered && !e.Quiet && calm(c.announced) && holdsSince >= 0 && holdsSince < c.announced && e.Reason != reasonMaxWait {
				broken(i, "call %d is answered %s without a fault", e.Call, e.Reason)
			}
		case callCompleting:
			c.completing = i
		case driverLooked:
			for call, c := range made {
				if quiet[call] && c.returned < e.Began && c.completing < 0 && calm(c.announced) {
					for _, pid := range h.Jobs {
						if slices.Contains(e.Running, pid) {
							broken(i, "job %d runs although call %d was answered that its GPUs are quiet", pid, call)
						}
					}
				}
			}
		case leasesOver:
			if len(e.Suspended) > 0 {
				broken(i, "processes %v stay suspended", e.Suspended)
			}
			for call, c := range made {
				if c.returned < 0 {
					broken(i, "call %d has not returned", call)
				}
			}
			clear(made) // the next entries are about others
			clear(quiet)
		default:
		}
	}
	if faults != 0 {
		broken(len(h.Entries), "%d faults have not ended", faults)
	}
	for _, pid := range append(slices.Clone(h.Jobs), h.Online) {
		if !proved[pid] {
			broken(len(h.Entries), "process %d has proved nothing", pid)
		}
	}
	return problems
}

// recorded makes a history of jobs 1 and 2 and the online process 3 from lines.
func recorded(lines string) history {
	h := history{Jobs: []int32{1, 2}, Online: 3}
	pids := func(text string) (pids []int32) {
		for f := range strings.SplitSeq(text, ",") {
			if pid := strings.TrimSpace(f); pid != "" {
				pids = append(pids, int32(pid[0]-'0'))
			}
		}
		return pids
	}
	for line := range strings.Lines(lines) {
		f := append(strings.Split(strings.TrimSpace(line), " | "), "", "", "")
		e := entry{What: happening(f[0])}
		switch e.What {
		case callAnnounced, callAnswered, callFailed, callCompleting:
			e.Call, e.Quiet, e.Reason = int(f[1][0]-'0'), f[2] == "quiet", f[2]
		case driverLooked, leasesOver:
			e.Began, e.Running, e.Suspended = len(h.Entries), pids(f[1]), pids(f[2])
		case packetsProved:
			e.PID, e.OK = pids(f[1])[0], f[2] == "ok"
		case "":
			continue
		default:
		}
		h.Entries = append(h.Entries, e)
	}
	return h
}

func TestEachKindOfBrokenHistoryIsFound(t *testing.T) {
	const proofs = "\nproved | 1 | ok\nproved | 2 | ok\nproved | 3 | ok"
	for name, c := range map[string]struct {
		history string
		want    []string
	}{
		"good": {`holds
			announced | 1
			announced | 2
			answered | 1 | quiet
			answered | 2 | QUIESCE_REASON_MAX_WAIT
			driver | 3 | 1,2
			completing | 1
			driver | 1,3 | 2
			completing | 2
			over | 1,2,3 |` + proofs, nil},
		"a fault excuses": {`announced | 1
			answered | 1 | quiet
			announced | 2
			fault begins
			driver | 1,2,3 |
			failed | 2 | the daemon died
			fault ends
			driver | 1,2,3 |
			announced | 3
			answered | 3 | QUIESCE_REASON_UNSAFE
			completing | 3
			over | 1,2,3 |` + proofs, nil},
		"a job runs during a lease": {`announced | 1
			answered | 1 | quiet
			driver | 2,3 | 1
			completing | 1
			over | 1,2,3 |` + proofs, []string{"2: job 2 runs although call 1 was answered that its GPUs are quiet"}},
		"a fault that is over excuses nothing": {`fault begins
			fault ends
			announced | 1
			answered | 1 | quiet
			driver | 1,3 | 2
			completing | 1
			announced | 2
			failed | 2 | EOF
			over | 1,2,3 |` + proofs, []string{
			"4: job 1 runs although call 1 was answered that its GPUs are quiet", "7: call 2 failed without a fault: EOF",
		}},
		"something stays suspended": {`fault begins
			fault ends
			over | 1,3 | 2` + proofs, []string{"2: processes [2] stay suspended"}},
		"the online process is suspended": {`fault begins
			driver | 1,2 | 3
			fault ends
			over | 1,2,3 |` + proofs, []string{"1: process 3 is online and suspended"}},
		"answers": {`holds
			announced | 1
			answered | 1 | QUIESCE_REASON_UNSAFE
			answered | 1 | quiet
			answered | 2 | quiet
			announced | 3
			over | 1,2,3 |` + proofs, []string{
			"2: call 1 is answered QUIESCE_REASON_UNSAFE without a fault", "3: call 1 returned twice", "4: call 2 was not made", "6: call 3 has not returned",
		}},
		"packets": {`fault begins
			proved | 1 | ok
			proved | 2 | lost`, []string{"2: the packets of process 2 did not run exactly once", "3: 1 faults have not ended", "3: process 3 has proved nothing"}},
	} {
		if diff := cmp.Diff(c.want, judge(recorded(c.history))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

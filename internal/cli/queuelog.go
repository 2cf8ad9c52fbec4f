package cli

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/gpreempt/gpreempt/internal/term"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/discovery/hiplog"
)

// of returns the queues of the process that has one of pids. A log of other processes is
// an error.
func (l *analyzedLog) of(f *finding, pids ...int32) ([]*hiplog.Queue, error) {
	known := l.PIDs
	if len(known) > 0 && !slices.ContainsFunc(known, func(pid int32) bool { return slices.Contains(pids, pid) }) {
		return nil, &term.Failure{
			Code: term.ExitFailure, Message: fmt.Sprintf("the log %s is of pid %s, not %d", l.File, term.Numbers(known), pids[0]),
			Next: fmt.Sprintf("gpctl queue find %d --amd-log %s", known[0], l.File),
		}
	}
	var queues []*hiplog.Queue
	nowhere := 0
	for i := range l.Queues {
		q := &l.Queues[i]
		switch {
		case q.PID != 0 && !slices.Contains(pids, q.PID):
		case q.HWq == 0:
			nowhere++
		default:
			queues = append(queues, q)
		}
	}
	if len(queues) == 0 {
		return nil, &term.Failure{
			Code: term.ExitNotFound, Message: fmt.Sprintf("the log %s contains no address of a queue", l.File), Next: hiplog.Hint,
		}
	}
	if len(known) == 0 {
		f.notes = append(f.notes, "the log has no pids: check that it belongs to this process")
	}
	if nowhere > 0 {
		f.notes = append(f.notes, fmt.Sprintf("%s of the log omitted: the log does not contain their addresses", term.Count(nowhere, "queue")))
	}
	if l.Truncated {
		f.notes = append(f.notes, "the log ends early")
	}
	return queues, nil
}

// fromLog returns the queues of the log only. why is the error of the daemon.
func (f *finding) fromLog(l *analyzedLog, why string) (*finding, error) {
	f.notes = []string{why + "; the result is from the log only", "the queue ids are the runtime's, not the driver's"}
	logged, err := l.of(f, f.pid)
	if err != nil {
		return nil, err
	}
	for _, q := range logged {
		found := foundQueue{log: q, noID: len(q.IDs) == 0, why: "the log does not contain it"}
		if q.Deletions > 0 && q.Deletions >= q.Creations {
			found.active, found.why = new(bool), ""
		}
		ids := q.IDs
		if found.noID {
			ids = []uint32{0}
		}
		// A ring's memory may be reused for a queue with another id.
		for _, id := range ids {
			found.queue = &gpreemptv1.Queue{
				Pid: f.pid, QueueId: id, Type: "compute", RingAddress: uint64(q.HWq), RingBytes: q.SizePackets * aqlPacket, Aql: true, Source: "log",
			}
			f.queues = append(f.queues, found)
		}
	}
	return f, nil
}

// aqlPacket is the size of an AQL packet in bytes.
const aqlPacket = 64

// join adds to each queue that of the log with the same ring address.
func (f *finding) join(l *analyzedLog) error {
	logged, err := l.of(f, append([]int32{f.target.GetPid()}, f.target.GetNamespacePids()...)...)
	if err != nil {
		return err
	}
	joined := map[hiplog.Address]bool{}
	unknown := 0
	for i := range f.queues {
		at := hiplog.Address(f.queues[i].queue.GetRingAddress())
		n := slices.IndexFunc(logged, func(q *hiplog.Queue) bool { return q.HWq == at })
		switch {
		case at == 0:
			unknown++
		case n >= 0:
			f.queues[i].log = logged[n]
			joined[at] = true
		}
	}
	for _, q := range logged {
		if !joined[q.HWq] {
			f.logOnly = append(f.logOnly, q.HWq)
		}
	}
	if unknown > 0 {
		f.notes = append(f.notes, fmt.Sprintf("%s not matched with the log: the address of the ring is unknown", term.Count(unknown, "queue")))
	}
	return nil
}

// logIDs formats the runtime's ids of a queue.
func logIDs(q *hiplog.Queue) string {
	if q == nil {
		return "-"
	}
	return term.Numbers(q.IDs)
}

func logDispatches(q *hiplog.Queue) string {
	if q == nil {
		return "-"
	}
	return strconv.FormatUint(q.Dispatches, 10)
}

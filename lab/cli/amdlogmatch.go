package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/hiplog"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// matchedQueues are the queues of a process, of the daemon and of its log.
type matchedQueues struct {
	PID    int32          `json:"pid"`
	Queues []matchedQueue `json:"queues"`
	// LogOnly are the rings of the log that no queue of the process has.
	LogOnly []hiplog.Address `json:"log_only_ring_addresses"`
	// Notes are limits of the result.
	Notes []string `json:"notes"`
	File  string   `json:"python_config,omitempty"`
}

// matchedQueue is a queue with the data of the log.
type matchedQueue struct {
	// ID is the driver's id, or the runtime's if the queue is from the log only; nil if the log
	// has none.
	ID *uint32 `json:"queue_id"`
	// Address is that of the ring, 0 if it is unknown.
	Address hiplog.Address `json:"ring_address"`
	Type    string         `json:"type"`
	GPU     uint32         `json:"gpu_id"`
	// Active is false for a queue that the log says was destroyed; else it is unknown.
	Active *bool `json:"active"`
	// Log is null for a queue that is not in the log.
	Log *hiplog.Queue `json:"log"`
}

func amdlogMatch(a *term.App) *cobra.Command {
	var container, pyfile string
	cmd := &cobra.Command{
		Use:   "match PID LOG",
		Short: "Match the queues of a process with those in its log",
		Args:  term.Operands("PID", "LOG"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return a.TargetNames(cmd, args, word)
			}
			return nil, cobra.ShellCompDirectiveDefault
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := gpreempt.ParseProcessKey(args[0])
			switch {
			case err != nil:
				return term.Usage(cmd, "%v", err)
			case pyfile == "-":
				return term.Usage(cmd, "invalid --python-config \"-\"; for standard output use -o json")
			}
			log, err := analyzeLog(a, args[1])
			if err != nil {
				return err
			}
			m, err := matchLog(a, cmd, key, container, log)
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("python-config") {
				m.File = strings.ReplaceAll(pyfile, term.PythonFile, strings.ReplaceAll(term.PythonFile, "PID", strconv.Itoa(int(m.PID))))
				about := append([]string{"process   " + strconv.Itoa(int(m.PID)), "log       " + log.File}, m.Notes...)
				if err := term.WritePython(m.File, m.forPython(), about); err != nil {
					return err
				}
			}
			return a.Show(m, func(p *term.Printer) { printMatched(p, m) })
		},
	}
	cmd.Flags().StringVar(&container, "container", "", "its container: name, prefix of the id, or NAMESPACE/POD")
	cmd.Flags().StringVar(&pyfile, "python-config", "", "write the queues to a Python `FILE`")
	cmd.Flags().Lookup("python-config").NoOptDefVal = term.PythonFile
	term.CompleteBy(cmd, "container", a.ContainerNames)
	return cmd
}

// matchLog asks the daemon for the queues of the process. Without a daemon, or when the process has
// ended, the result is from the log only.
func matchLog(a *term.App, cmd *cobra.Command, key gpreempt.ProcessKey, container string, log *analyzedLog) (*matchedQueues, error) {
	m := &matchedQueues{PID: key.PID, Queues: []matchedQueue{}, LogOnly: []hiplog.Address{}, Notes: []string{}}
	var target *gpreemptv1.Target
	var queues []*gpreemptv1.Queue
	err := a.Call(cmd, func(ctx context.Context, admin term.AdminClient) (err error) {
		if target, err = term.OneTarget(ctx, admin, key, container); err != nil {
			return err
		}
		list, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{TargetId: target.GetTargetId()})
		queues = list.GetQueues()
		return err
	})
	if err != nil {
		unavailable, ok := errors.AsType[*term.Failure](err)
		if !ok || !slices.Contains([]int{term.ExitUnreachable, term.ExitDenied, term.ExitNotFound}, unavailable.Code) {
			return nil, err
		}
		return m, m.fromLog(log, unavailable.Message)
	}
	m.PID = target.GetPid()
	return m, m.join(log, queues, append([]int32{m.PID}, target.GetNamespacePids()...))
}

// of returns the queues of the process that has one of pids. A log of other processes is
// an error.
func (m *matchedQueues) of(l *analyzedLog, pids ...int32) ([]*hiplog.Queue, error) {
	known := l.PIDs
	if len(known) > 0 && !slices.ContainsFunc(known, func(pid int32) bool { return slices.Contains(pids, pid) }) {
		return nil, &term.Failure{
			Code: term.ExitFailure, Message: fmt.Sprintf("the log %s is of pid %s, not %d", l.File, term.Numbers(known), pids[0]),
			Next: fmt.Sprintf("gplab amdlog match %d %s", known[0], l.File),
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
		m.Notes = append(m.Notes, "the log has no pids: check that it belongs to this process")
	}
	if nowhere > 0 {
		m.Notes = append(m.Notes, fmt.Sprintf("%s of the log omitted: the log does not contain their addresses", term.Count(nowhere, "queue")))
	}
	if l.Truncated {
		m.Notes = append(m.Notes, "the log ends early")
	}
	return queues, nil
}

// fromLog adds the queues of the log. why is the error of the daemon.
func (m *matchedQueues) fromLog(l *analyzedLog, why string) error {
	m.Notes = append(m.Notes, why+"; the result is from the log only", "the queue ids are the runtime's, not the driver's")
	logged, err := m.of(l, m.PID)
	for _, q := range logged {
		found := matchedQueue{Address: q.HWq, Type: "compute", Log: q}
		if q.Deletions > 0 && q.Deletions >= q.Creations {
			found.Active = new(bool)
		}
		// A ring's memory may be reused for a queue with another id.
		for _, id := range q.IDs {
			found.ID = &id
			m.Queues = append(m.Queues, found)
		}
		if len(q.IDs) == 0 {
			m.Queues = append(m.Queues, found)
		}
	}
	return err
}

// join adds the queues of a process with one of pids, each with that of the log with the same ring address.
func (m *matchedQueues) join(l *analyzedLog, queues []*gpreemptv1.Queue, pids []int32) error {
	logged, err := m.of(l, pids...)
	if err != nil {
		return err
	}
	joined := map[hiplog.Address]bool{}
	unknown := 0
	for _, q := range queues {
		at := hiplog.Address(q.GetRingAddress())
		found := matchedQueue{ID: new(q.GetQueueId()), Address: at, Type: q.GetType(), GPU: q.GetGpuId()}
		n := slices.IndexFunc(logged, func(q *hiplog.Queue) bool { return q.HWq == at })
		switch {
		case at == 0:
			unknown++
		case n >= 0:
			found.Log = logged[n]
			joined[at] = true
		}
		m.Queues = append(m.Queues, found)
	}
	for _, q := range logged {
		if !joined[q.HWq] {
			m.LogOnly = append(m.LogOnly, q.HWq)
		}
	}
	if unknown > 0 {
		m.Notes = append(m.Notes, fmt.Sprintf("%s not matched with the log: the address of the ring is unknown", term.Count(unknown, "queue")))
	}
	return nil
}

func (m *matchedQueues) forPython() (queues []term.PythonQueue) {
	for _, q := range m.Queues {
		queues = append(queues, term.PythonQueue{Address: uint64(q.Address), ID: q.ID, PID: m.PID, Active: q.Active})
	}
	return queues
}

func printMatched(p *term.Printer, m *matchedQueues) {
	t := p.Table("", term.Columns{">#", "ADDRESS", ">QUEUE ID", ">PID", "TYPE", ">GPU", "LOG IDS", ">DISPATCHES"})
	for i, q := range m.Queues {
		at, id, gpu, ids, dispatches := "unknown", "unknown", "-", "-", "-"
		if q.Address != 0 {
			at = fmt.Sprintf("0x%016x", uint64(q.Address))
		}
		if q.ID != nil {
			id = strconv.FormatUint(uint64(*q.ID), 10)
		}
		if q.GPU != 0 {
			gpu = strconv.FormatUint(uint64(q.GPU), 10)
		}
		if q.Log != nil {
			ids, dispatches = term.Numbers(q.Log.IDs), strconv.FormatUint(q.Log.Dispatches, 10)
		}
		t.Row(i+1, at, id, m.PID, q.Type, gpu, ids, dispatches)
	}
	t.Flush()
	for _, note := range m.Notes {
		p.Linef("note   %s", note)
	}
	if len(m.LogOnly) > 0 {
		p.Linef("note   in the log, without a matching queue of the process: %s", addresses(m.LogOnly))
	}
	if m.File != "" {
		p.Linef("file   %s", m.File)
	}
}

package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// reportRun is the hidden command that reports what the daemon makes of the command of a gpctl
// run. It is a process of its own: gpctl run becomes the command.
const reportRun = "run-report"

// startReport starts the report on this process, or prints in one line what prevents it. The
// command runs in any case.
func startReport(a *term.App, cmd *cobra.Command, class gpreemptv1.Class) {
	var why string
	if a.Address != "" {
		why = "its processes are not on the host of " + a.Address
	} else if err := a.Probe(cmd.Context()); err != nil {
		why = term.Unreachable(a.Socket, err, term.GroupOf(a.Socket)).Message
	} else if err := a.Background([]string{reportRun, "--socket", a.Socket, strconv.Itoa(os.Getpid()), api.EnumName(class)}); err != nil {
		why = err.Error()
	}
	if why != "" {
		fmt.Fprintf(a.Err, "gpctl: the command runs tagged %s; what the daemon makes of it is unknown: %s\n", api.EnumName(class), term.Printable(why))
	}
}

func reportRunCommand(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:         reportRun + " PID CLASS",
		Short:       "Report what the daemon makes of a process and its children",
		Hidden:      true,
		Annotations: map[string]string{term.NoData: term.NoData},
		Args:        term.Operands("PID", "CLASS"),
		RunE: func(cmd *cobra.Command, args []string) error {
			pid, err := strconv.ParseInt(args[0], 10, 32)
			if err != nil {
				return term.Usage(cmd, "invalid PID %q", args[0])
			}
			class, err := parseClass(cmd, args[1])
			if err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			began, err := readStat(int32(pid))
			if err != nil {
				return nil // it has ended: there is nothing to report
			}
			var waiter sync.WaitGroup
			defer waiter.Wait()
			defer cancel() // before it waits
			waiter.Go(func() {
				awaitEnd(ctx, a, began)
				cancel()
			})
			err = a.Stream(ctx, func(ctx context.Context, admin term.AdminClient) error {
				return reportOn(ctx, a, admin, int32(pid), class)
			})
			if ctx.Err() != nil || err == nil {
				return nil // the command has ended
			}
			return &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("what the daemon makes of process %d is unknown: %v", pid, err)}
		},
	}
}

// reportOn prints a line about the first process of the tree below root that has GPU queues.
func reportOn(ctx context.Context, a *term.App, admin term.AdminClient, root int32, class gpreemptv1.Class) error {
	changes, err := admin.WatchQueues(ctx, &gpreemptv1.WatchQueuesRequest{})
	if err != nil {
		return err
	}
	reported := errors.New("reported")
	others := map[string]bool{} // targets that are not below root
	err = term.Each(changes, func(m *gpreemptv1.WatchQueuesResponse) error {
		q := m.GetQueue()
		switch {
		case m.GetChange() != gpreemptv1.QueueChange_QUEUE_CHANGE_ADDED || others[q.GetTargetId()]:
			return nil
		case !descends(q.GetPid(), root):
			others[q.GetTargetId()] = true
			return nil
		}
		e, err := admin.ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: q.GetTargetId()})
		if err != nil {
			return err
		}
		fmt.Fprintf(a.Err, "gpctl: %s\n", term.Printable(opinion(e.GetTarget(), class)))
		return reported
	})
	if errors.Is(err, reported) {
		return nil
	}
	return err
}

// opinion describes in a line what the daemon makes of a target that was started with a class.
func opinion(g *gpreemptv1.Target, tagged gpreemptv1.Class) string {
	text := fmt.Sprintf("%s (%d) is %s, priority %d, by %s: ", g.GetComm(), g.GetPid(), api.EnumName(g.GetClass()), g.GetPriority(), term.Or(g.GetDecidedBy(), "default"))
	switch {
	case g.GetClass() == gpreemptv1.Class_CLASS_OFFLINE && g.GetAttachError() != "":
		text += "cannot be suspended: " + g.GetAttachError()
	case g.GetClass() == gpreemptv1.Class_CLASS_OFFLINE && g.GetMechanism() != "":
		text += "leases suspend it by " + g.GetMechanism()
	case g.GetClass() == gpreemptv1.Class_CLASS_OFFLINE:
		text += "leases may suspend it; no mechanism is attached yet"
	case g.GetClass() == gpreemptv1.Class_CLASS_ONLINE:
		text += "never suspended; it has to announce its work itself"
	default:
		text += "never suspended"
	}
	if g.GetClass() != tagged {
		text += fmt.Sprintf(" (the tag says %s: gpctl target explain %d)", api.EnumName(tagged), g.GetPid())
	}
	return text
}

// maxDepth bounds the length of a chain of parents, which may change while it is read.
const maxDepth = 1000

// descends reports whether a process is root or below it.
func descends(pid, root int32) bool {
	for range maxDepth {
		if pid == root {
			return true
		}
		s, err := readStat(pid)
		if err != nil || s.Parent == 0 {
			return false
		}
		pid = s.Parent
	}
	return false
}

// readStat reads a process, unless it has ended.
func readStat(pid int32) (discovery.ProcStat, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return discovery.ProcStat{}, err
	}
	s, err := discovery.ParseProcStat(text)
	if err == nil && !s.Alive() {
		err = os.ErrProcessDone
	}
	return s, err
}

// awaitEnd returns when a process has ended, or with ctx. It looks once a second: a pidfd would say so at once, and nobody
// waits for the end of a report.
func awaitEnd(ctx context.Context, a *term.App, began discovery.ProcStat) {
	for a.Sleep(ctx, time.Second) == nil {
		if now, err := readStat(began.PID); err != nil || now.Start != began.Start {
			return
		}
	}
}

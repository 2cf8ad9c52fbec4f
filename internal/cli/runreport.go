package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"

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
			ended, err := awaitEnd(int(pid), cancel)
			if err != nil {
				return nil // it has ended: there is nothing to report
			}
			defer ended()
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
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return false
		}
		s, err := discovery.ParseProcStat(text)
		if err != nil || s.Parent == 0 {
			return false
		}
		pid = s.Parent
	}
	return false
}

// readable reports whether a descriptor can be read without waiting.
func readable(fd uintptr) bool {
	var set syscall.FdSet
	const bits = 64
	if int(fd) >= bits*len(set.Bits) {
		return false
	}
	set.Bits[fd/bits] |= 1 << (fd % bits)
	n, err := syscall.Select(int(fd)+1, &set, nil, nil, new(syscall.Timeval))
	return n > 0 && err == nil
}

// awaitEnd calls ended when a process ends, unless stop is called before.
func awaitEnd(pid int, ended func()) (stop func(), err error) {
	process, err := os.FindProcess(pid)
	if err != nil {
		return nil, err
	}
	defer func() { _ = process.Release() }() // its handle, of which fd is a copy
	fd := -1
	failed := process.WithHandle(func(handle uintptr) { fd, err = syscall.Dup(int(handle)) })
	if err := errors.Join(failed, err); err != nil {
		return nil, err
	}
	syscall.CloseOnExec(fd)
	if err := syscall.SetNonblock(fd, true); err != nil { // which lets the runtime wait for it
		return nil, errors.Join(err, syscall.Close(fd))
	}
	file := os.NewFile(uintptr(fd), "pidfd")
	conn, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	var waiter sync.WaitGroup
	waiter.Go(func() {
		// A pidfd is readable when its process has ended. The runtime wakes it up for a change only,
		// and that may have come before the wait.
		if err := conn.Read(readable); err == nil {
			ended()
		}
	})
	return func() {
		_ = file.Close() // of a descriptor that is only waited for
		waiter.Wait()
	}, nil
}

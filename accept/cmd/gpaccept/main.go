// Command gpaccept tests on a host whether a GPU can be preempted: docs/trial.md. It
// preempts processes of its own by the daemon's mechanism, and needs no daemon.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/gpreempt/gpreempt/accept"
	"github.com/gpreempt/gpreempt/accept/conformance"
	"github.com/gpreempt/gpreempt/accept/workload"
	"github.com/gpreempt/gpreempt/internal/mechanism/helper"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The main thread never exits. If a goroutine that traces a process ended on it, the
// kernel would keep the process traced.
func init() { runtime.LockOSThread() }

func main() {
	if len(os.Args) == 2 && os.Args[1] == helper.Argument {
		os.Exit(helper.Main())
	}
	err := run(os.Args[1:])
	if err == nil {
		return
	}
	if e, ok := errors.AsType[*gpreempt.Error](err); ok && e.Next != "" {
		fmt.Fprintf(os.Stderr, "gpaccept: %s\n  try: %s\n", e.Message, e.Next)
	} else {
		fmt.Fprintf(os.Stderr, "gpaccept: %v\n", err)
	}
	os.Exit(1)
}

// run is the acceptance or, by its first argument, one of the processes that it starts.
func run(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if len(args) > 0 {
		switch args[0] {
		case conformance.AgentCommand:
			return conformance.Agent()
		case workload.Command:
			return workload.Main(ctx, args[1:], os.Stdin, os.Stdout)
		case accept.HoldCommand:
			return accept.Hold(ctx, discovery.Host("/"), args[1:], os.Stdin, os.Stdout)
		}
	}
	root := accept.Command()
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}

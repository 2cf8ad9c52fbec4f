// Command gpreemptd is the daemon: it suspends the offline GPU queues of a host while
// online work runs.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/gpreempt/gpreempt/internal/daemon"
	"github.com/gpreempt/gpreempt/internal/dumps"
	"github.com/gpreempt/gpreempt/internal/mechanism/helper"
	"github.com/gpreempt/gpreempt/internal/mechanism/nvchannels"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The main thread never exits. If a goroutine that traces a process ended on it, the
// kernel would keep the process traced.
func init() { runtime.LockOSThread() }

func main() {
	if len(os.Args) == 2 && os.Args[1] == helper.Argument {
		os.Exit(helper.Main())
	}
	if len(os.Args) == 2 && os.Args[1] == dumps.Argument {
		os.Exit(dumps.Main())
	}
	if len(os.Args) == 2 && os.Args[1] == nvchannels.Argument {
		os.Exit(nvchannels.Main())
	}
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	// Before anything else: a signal during a slow start must not be lost.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := daemon.Command()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if e, ok := errors.AsType[*gpreempt.Error](err); ok && e.Next != "" {
		fmt.Fprintf(stderr, "gpreemptd: %s\n  try: %s\n", e.Message, e.Next)
	} else {
		fmt.Fprintf(stderr, "gpreemptd: %v\n", err)
	}
	return 1
}

// Command gpreemptd is the daemon: it watches the KFD queues of a host and takes
// offline ones off the GPUs while online work runs.
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

	"github.com/gpreempt/gpreempt/internal/daemoncmd"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The main thread never exits, so a goroutine that traces a process and ends must
// not be on it: the kernel would keep the process traced for ever.
func init() { runtime.LockOSThread() }

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	// Signals first: one that comes during a slow start is not lost.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := daemoncmd.New()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var told *gpreempt.Error
	if errors.As(err, &told) && told.Next != "" {
		fmt.Fprintf(stderr, "gpreemptd: %s\n  try: %s\n", told.Message, told.Next)
	} else {
		fmt.Fprintf(stderr, "gpreemptd: %v\n", err)
	}
	return 1
}

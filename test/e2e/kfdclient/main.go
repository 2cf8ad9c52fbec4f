// Command kfdclient is a GPU program for tests: it creates queues of /dev/kfd by plain
// system calls, runs packets on them, and proves that each ran exactly once and in
// order. It is for the emulator; see package workload. testdata/kfdclient.c is the same
// program in C. Its command meter measures the emulator.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/gpreempt/gpreempt/emu/workload"
)

func main() { os.Exit(run()) }

// run runs the client, or with the argument meter a measurement. It handles signals: SIGTERM and SIGINT stop the client, SIGUSR1 does nothing, and
// SIGUSR2 does nothing but interrupt system calls.
func run() int {
	if len(os.Args) > 1 && os.Args[1] == "meter" {
		return meter(os.Args[2:])
	}
	first := context.Background() //nolint:forbidigo // main makes it
	ctx, cancel := signal.NotifyContext(first, syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGUSR1, syscall.SIGUSR2)
	if err := workload.Interrupting(syscall.SIGUSR2); err != nil {
		fmt.Fprintln(os.Stderr, "kfdclient:", err)
		return 1
	}
	return workload.Main(ctx, workload.Kernel(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
}

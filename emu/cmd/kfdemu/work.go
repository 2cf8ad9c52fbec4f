package main

import (
	"context"
	"fmt"
	"io"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/emu/workload"
)

// exitStatus is the exit status of a program that has printed why it fails.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// sample is a program on the machine: workload.Main or its like.
type sample func(ctx context.Context, sys workload.Sys, args []string, in io.Reader, out, help io.Writer) int

func workCommand() *cobra.Command {
	return sampleCommand(train, "work [flags]", "A sample program that keeps queues busy", `Makes queues of /dev/kfd by plain system calls, keeps them busy with packets, and
proves at the end that each ran exactly once and in order. Says what it does in lines
of JSON. Ends when it gets SIGTERM or reads "stop"; "report" has it say how far it is.

It is for an emulated machine, or the real driver with kfdemu softgpu:

  kfdemu run -- kfdemu work --queues 2 --packets 100 --duration 2000 --runtime

--train stands for a training job that fills the GPU and prints its steps: `+strings.Join(trainArgs, " "))
}

// The sample programs of the demo, as flags.
var (
	trainArgs = append([]string{"--runtime", "--steps", "--queues", strconv.Itoa(jobQueues), "--depth", strconv.Itoa(jobDepth)}, kernel(jobKernel, trainOccupancy)...)
	serveArgs = append([]string{"--packets", strconv.Itoa(requestKernels)}, kernel(kernelTime, onlineOccupancy)...)
)

// train is workload.Main with --train, which stands for trainArgs; flags behind it change them.
func train(ctx context.Context, sys workload.Sys, args []string, in io.Reader, out, help io.Writer) int {
	if len(args) > 0 && args[0] == "--train" {
		args = slices.Concat(trainArgs, args[1:])
	}
	return workload.Main(ctx, sys, args, in, out, help)
}

// serve is workload.Answer, which answers as the server of the demo without flags.
func serve(ctx context.Context, sys workload.Sys, args []string, in io.Reader, out, help io.Writer) int {
	if len(args) == 0 {
		args = serveArgs
	}
	return workload.Answer(ctx, sys, args, in, out, help)
}

func answerCommand() *cobra.Command {
	return sampleCommand(serve, "answer [flags]", "A sample program that works when it is asked to, as an inference server",
		`For each line that it reads, submits as many packets as --packets says to its queue (without
flags as the server of kfdemu demo), and writes "answer" in a line of JSON when the last has ended. Ends with its standard input and
proves then that each packet ran exactly once and in order.

It is for an emulated machine, or the real driver with kfdemu softgpu:

  yes | head -n 100 | kfdemu run -- kfdemu answer --packets 30 --duration 200`)
}

func sampleCommand(run sample, use, short, long string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long,
		DisableFlagParsing: true, // they are the program's own
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			help := cmd.ErrOrStderr()
			if slices.Contains(args, "-h") || slices.Contains(args, "--help") {
				fmt.Fprintf(help, "%s\n\n", cmd.Long)
			}
			if code := run(ctx, workload.Kernel(), args, cmd.InOrStdin(), cmd.OutOrStdout(), help); code != 0 {
				return exitStatus(code)
			}
			return nil
		},
	}
}

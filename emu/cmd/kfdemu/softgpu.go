package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/cmdline"
)

// softGPUDevice is the channel of emu/softgpu.
const softGPUDevice = "/dev/softgpu"

func softGPUCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "softgpu",
		Short: "Execute packets for the real driver on its GPU nodes without a GPU",
		Long: `Executes the packets on the queues that the real driver has mapped, for as long as it has
them mapped. The driver must have GPU nodes without a GPU (emu/softgpu). Writes a line of
JSON when it begins, and one with the number of packets when it ends by SIGTERM.`,
		Args: cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return serveSoftGPU(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
}

func serveSoftGPU(ctx context.Context, out, log io.Writer) (err error) {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	channel, err := os.OpenFile(softGPUDevice, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("the driver has no GPU nodes without a GPU, or another program serves them: %w", err)
	}
	defer func() { err = errors.Join(err, channel.Close()) }()
	gpus, err := kfdemu.NewSoftGPU(channel, channel, func(err error) { fmt.Fprintln(log, "kfdemu:", err) })
	if err != nil {
		return err
	}
	type line struct {
		Event string `json:"event"`
		kfdemu.SoftGPUCounters
	}
	said := json.NewEncoder(out)
	if err := said.Encode(line{Event: "ready"}); err != nil {
		return err
	}
	sum, err := gpus.Serve(ctx)
	return errors.Join(err, said.Encode(line{"done", sum}))
}

package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/gpreempt/gpreempt/internal/term"
)

// reader asks the daemon for what a command shows, and returns the function that prints it for
// people.
type reader func(ctx context.Context, cmd *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error)

// showing makes cmd show what read returns.
func showing(a *term.App, cmd *cobra.Command, read reader) *cobra.Command {
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
			data, people, err := read(ctx, cmd, admin)
			if err != nil {
				return err
			}
			return a.Show(data, people)
		})
	}
	return cmd
}

// repeat calls read now and then each time that the interval has passed, until ctx ends or read
// fails.
func repeat(ctx context.Context, a *term.App, every time.Duration, read func() error) error {
	for {
		if err := read(); err != nil {
			return err
		}
		if err := a.Sleep(ctx, every); err != nil {
			return err
		}
	}
}

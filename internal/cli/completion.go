package cli

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/api"
)

// completionCommand prints completion scripts for shells; packages install them.
func completionCommand() *cobra.Command {
	script := func(shell, where string, generate func(*cobra.Command, io.Writer) error) *cobra.Command {
		return &cobra.Command{
			Use:         shell,
			Annotations: map[string]string{noData: noData},
			Short:       "Print the completion script for " + shell,
			Example:     "  " + where,
			Args:        operands(),
			RunE: func(cmd *cobra.Command, _ []string) error {
				return generate(cmd.Root(), cmd.OutOrStdout())
			},
		}
	}
	return noun("completion", "Print completion scripts for shells",
		script("bash", "source <(gpctl completion bash)", func(root *cobra.Command, w io.Writer) error {
			return root.GenBashCompletionV2(w, true)
		}),
		script("zsh", `gpctl completion zsh > "${fpath[1]}/_gpctl"`, func(root *cobra.Command, w io.Writer) error {
			return root.GenZshCompletion(w)
		}),
		script("fish", "gpctl completion fish | source", func(root *cobra.Command, w io.Writer) error {
			return root.GenFishCompletion(w, true)
		}),
	)
}

// offer completes a word by asking the daemon, briefly: the user waits at a prompt.
func (a *app) offer(cmd *cobra.Command, list func(context.Context, adminClient) ([]cobra.Completion, error)) ([]cobra.Completion, cobra.ShellCompDirective) {
	a.timeout = time.Second
	var choices []cobra.Completion
	err := a.call(cmd, func(ctx context.Context, admin adminClient) error {
		var err error
		choices, err = list(ctx, admin)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return choices, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version of gpctl (gpctl status shows the daemon's)",
		Args:  operands(),
		RunE: func(*cobra.Command, []string) error {
			versions := map[string]string{"version": api.VersionString()}
			return a.show(versions, func(p *printer) { p.linef("gpctl %s", versions["version"]) })
		},
	}
}

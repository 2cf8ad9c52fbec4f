package term

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

// CompletionCommand prints completion scripts for shells; packages install them.
func (a *App) CompletionCommand() *cobra.Command {
	name := a.Program.Name
	script := func(shell, where string, generate func(*cobra.Command, io.Writer) error) *cobra.Command {
		return &cobra.Command{
			Use:         shell,
			Annotations: map[string]string{NoData: NoData},
			Short:       "Print the completion script for " + shell,
			Example:     "  " + where,
			Args:        Operands(),
			RunE: func(cmd *cobra.Command, _ []string) error {
				return generate(cmd.Root(), cmd.OutOrStdout())
			},
		}
	}
	return Noun("completion", "Print completion scripts for shells",
		script("bash", "source <("+name+" completion bash)", func(root *cobra.Command, w io.Writer) error {
			return root.GenBashCompletionV2(w, true)
		}),
		script("zsh", name+` completion zsh > "${fpath[1]}/_`+name+`"`, func(root *cobra.Command, w io.Writer) error {
			return root.GenZshCompletion(w)
		}),
		script("fish", name+" completion fish | source", func(root *cobra.Command, w io.Writer) error {
			return root.GenFishCompletion(w, true)
		}),
	)
}

// Offer completes a word by asking the daemon, briefly: the user waits at a prompt.
func (a *App) Offer(cmd *cobra.Command, list func(context.Context, AdminClient) ([]cobra.Completion, error)) ([]cobra.Completion, cobra.ShellCompDirective) {
	a.Timeout = time.Second
	var choices []cobra.Completion
	err := a.Call(cmd, func(ctx context.Context, admin AdminClient) error {
		var err error
		choices, err = list(ctx, admin)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return choices, cobra.ShellCompDirectiveNoFileComp
}

// VersionCommand prints the version of the program.
func (a *App) VersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: fmt.Sprintf("Show the version of %s (gpctl status shows the daemon's)", a.Program.Name),
		Args:  Operands(),
		RunE: func(*cobra.Command, []string) error {
			versions := map[string]string{"version": api.VersionString()}
			return a.Show(versions, func(p *Printer) { p.Linef("%s %s", a.Program.Name, versions["version"]) })
		},
	}
}

// CompleteGPUs completes GPUs by their HIP indices.
func (a *App) CompleteGPUs(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.Offer(cmd, func(ctx context.Context, admin AdminClient) ([]cobra.Completion, error) {
		resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
		var all []cobra.Completion
		for i, g := range resp.GetGpus() {
			about := fmt.Sprintf("%s, GPU %d, node %d, %s", Printable(g.GetName()), g.GetGpuId(), g.GetNode(), Printable(g.GetBdf()))
			all = append(all, cobra.CompletionWithDesc(strconv.Itoa(i), about))
		}
		return all, err
	})
}

// Named completes TARGET operands by the pids that the daemon knows.
func (a *App) Named(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.TargetNames(cmd, args, word)
}

// TargetNames completes pids of targets.
func (a *App) TargetNames(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.Offer(cmd, func(ctx context.Context, admin AdminClient) ([]cobra.Completion, error) {
		resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
		var pids []cobra.Completion
		for _, g := range resp.GetTargets() {
			about := Printable(g.GetComm()) + ", " + api.EnumName(g.GetClass()) + ", " + api.EnumName(g.GetState())
			pids = append(pids, cobra.CompletionWithDesc(strconv.Itoa(int(g.GetPid())), about))
		}
		return pids, err
	})
}

// ContainerNames completes containers of targets.
func (a *App) ContainerNames(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.Offer(cmd, func(ctx context.Context, admin AdminClient) ([]cobra.Completion, error) {
		resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
		var names []cobra.Completion
		for _, g := range resp.GetTargets() {
			if c := g.GetContainer(); c != nil {
				names = append(names, cobra.CompletionWithDesc(Printable(ContainerName(c)), Printable(Or(c.GetImage(), c.GetRuntime()))))
			}
		}
		slices.Sort(names)
		return slices.Compact(names), err
	})
}

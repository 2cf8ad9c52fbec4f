package daemon

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/cmdline"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/safety"
)

// Command returns the root command of gpreemptd. Its help is also its manual page. Its
// context ends what it runs; the caller prints its error.
func Command() *cobra.Command {
	var cleanup bool
	root := &cobra.Command{
		Use:           "gpreemptd",
		Short:         "Suspend offline GPU queues of AMD GPUs while online work runs",
		Version:       api.VersionString(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Annotations: map[string]string{
			"start": "systemctl start gpreemptd, or gpreemptd serve as root", "stop": "systemctl stop gpreemptd.socket gpreemptd.service",
			"restart": "systemctl restart gpreemptd", "reload": "systemctl reload gpreemptd", "status": "gpctl status", "doctor": "gpctl doctor",
			"cleanup": "gpreemptd --cleanup", "--config": "gpreemptd serve --config FILE", "-c": "gpreemptd serve --config FILE",
			"--socket": "gpreemptd serve --socket PATH",
		},
		Args: cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cleanup {
				return cleanUp(cmd.Context(), cmd.OutOrStdout(), ThisHost())
			}
			return help(cmd, args)
		},
	}
	root.SetVersionTemplate("gpreemptd {{.Version}}\n")
	root.Flags().BoolVar(&cleanup, "cleanup", false, "resume processes left paused by a crashed daemon; safe at any time")
	root.AddCommand(serveCommand(), diagnoseCommand(), configCommand(), versionCommand())
	cmdline.Answer(root)
	return root
}

// help is the RunE of a command that only groups others. Without one, cobra prints help
// instead of an error for a misspelt subcommand.
func help(cmd *cobra.Command, _ []string) error { return cmd.Help() }

func serveCommand() *cobra.Command {
	var opts Options
	cmd := &cobra.Command{
		Use:         "serve",
		SuggestFor:  []string{"run", "daemon"},
		Annotations: map[string]string{cmdline.Extra: "gpreemptd serve --config %s"},
		Short:       "Run the daemon in the foreground",
		Long: `Run the daemon in the foreground until SIGINT, SIGTERM or the end of its
terminal, and resume everything first. SIGHUP applies the changes of the
config file.`,
		Args: cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.ConfigGiven, opts.Host = cmd.Flags().Changed("config"), ThisHost()
			return Run(cmd.Context(), opts)
		},
	}
	cmd.Flags().StringVar(&opts.ConfigPath, "config", config.DefaultPath, "config file; a missing file is an error only with this flag")
	cmd.Flags().StringVar(&opts.Socket, "socket", "", "path of the Unix socket, instead of that in the config file")
	return cmd
}

func diagnoseCommand() *cobra.Command {
	var opts Options
	cmd := &cobra.Command{
		Use:   "diagnose",
		Short: "Check whether this host is supported, for gpctl doctor",
		Long: `Check whether this host is supported, and how, without a daemon, and print the JSON of
the API's DiagnoseResponse: gpctl doctor shows it, and asks the daemon first. It opens the
driver, so that it is one of the driver's processes until it ends, and suspends nothing.`,
		Args: cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.ConfigGiven, opts.Host = cmd.Flags().Changed("config"), ThisHost()
			return safety.WriteReport(cmd.OutOrStdout(), Diagnose(cmd.Context(), opts))
		},
	}
	cmd.Flags().StringVar(&opts.ConfigPath, "config", config.DefaultPath, "config file; a missing file is an error only with this flag")
	return cmd
}

func configCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Write or check the config file", Annotations: map[string]string{"show": "gpctl policy get, or gpreemptd config default"}, Args: cmdline.NoArgs, RunE: help}
	cmd.AddCommand(&cobra.Command{
		Use:   "default",
		Short: "Print the default config file, with every key explained",
		Args:  cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(config.DefaultYAML())
			return err
		},
	}, checkCommand())
	return cmd
}

func checkCommand() *cobra.Command {
	opts := Options{ConfigGiven: true}
	var running bool
	cmd := &cobra.Command{
		Use:        "check [FILE]",
		SuggestFor: []string{"validate", "test", "lint"},
		Short:      "Check a config file: list every error, and what can have no effect on this host",
		Args:       cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				opts.ConfigPath = args[0]
			}
			opts.Host = ThisHost()
			if err := check(opts, cmd.OutOrStdout(), cmd.ErrOrStderr()); err != nil || !running {
				return err
			}
			return showRunning(cmd.Context(), opts, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&opts.ConfigPath, "config", config.DefaultPath, "the config file, as for serve")
	cmd.Flags().BoolVar(&running, "running", false, "show also what its rules make of the processes that run; it changes nothing")
	return cmd
}

// check writes what is wrong with a config file.
func check(opts Options, stdout, stderr io.Writer) error {
	cfg, err := opts.load()
	if err != nil {
		return err
	}
	facts := opts.Host.facts(cfg)
	warnings := cfg.WithoutEffect(facts)
	for _, w := range keyWarnings(cfg.TCP) {
		warnings = append(warnings, &yamlfile.Error{File: opts.ConfigPath, Key: "tcp.key", Problem: w.Text, Remedy: w.Remedy})
	}
	for _, w := range warnings {
		w.Key = "warning: " + w.Key
		if _, err := fmt.Fprintln(stderr, w); err != nil {
			return err
		}
	}
	verdict := "valid"
	if len(warnings) > 0 {
		verdict = fmt.Sprintf("valid, warnings: %d", len(warnings))
	}
	if facts.GPUs == nil {
		verdict += "\nnot checked: what rules name of GPUs, debugfs, containers and Slurm, because no AMD GPU can be read here"
	}
	_, err = fmt.Fprintf(stdout, "%s: %s\n", opts.ConfigPath, verdict)
	return err
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cmdline.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "gpreemptd", api.VersionString())
			return err
		},
	}
}

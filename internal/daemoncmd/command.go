// Package daemoncmd hides the command line of gpreemptd: its commands, their flags and
// what help says of them, which is also its manual page.
package daemoncmd

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/daemon"
)

// New returns the root command. Its context ends what it runs; errors are for the caller
// to print.
func New() *cobra.Command {
	var cleanup bool
	root := &cobra.Command{
		Use:           "gpreemptd",
		Short:         "Take offline GPU queues off AMD GPUs while online work runs",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cleanup {
				return daemon.Cleanup(cmd.Context(), cmd.OutOrStdout())
			}
			return help(cmd, args)
		},
	}
	root.Flags().BoolVar(&cleanup, "cleanup", false, "let run again what a daemon that died left paused; safe at any time")
	root.AddCommand(serveCommand(), diagnoseCommand(), configCommand(), versionCommand())
	return root
}

// help makes a command of one that only groups others: cobra does not look at the
// operands of those, and would take a misspelt command for a question.
func help(cmd *cobra.Command, _ []string) error { return cmd.Help() }

func serveCommand() *cobra.Command {
	var (
		opts    daemon.Options
		machine string
	)
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon in the foreground",
		Long: `Run the daemon in the foreground until SIGINT or SIGTERM, which resume
everything first. SIGHUP reads the config file again and takes over what differs.

With --sim the daemon serves simulated GPUs instead of hardware: nothing on the
host is touched, and everything it reports is simulated.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.ConfigGiven = cmd.Flags().Changed("config")
			if machine != "" {
				spec, err := gpumodel.PresetByName(machine)
				if err != nil {
					return err
				}
				opts.Sim = &spec
			}
			opts.Host = daemon.ThisHost()
			return daemon.Run(cmd.Context(), opts)
		},
	}
	cmd.Flags().StringVar(&opts.ConfigPath, "config", config.DefaultPath, "config file; its absence is an error only when this is given")
	cmd.Flags().StringVar(&opts.Socket, "socket", "", "listen here instead of where the config file says")
	cmd.Flags().StringVar(&machine, "sim", "", "serve this simulated machine: "+daemon.SimMachines())
	cmd.Flags().IntVar(&opts.SimGPUs, "sim-gpus", 1, "number of simulated GPUs")
	cmd.Flags().Uint64Var(&opts.SimSeed, "sim-seed", 1, "seed of the simulation")
	return cmd
}

func diagnoseCommand() *cobra.Command {
	var (
		opts   daemon.Options
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "diagnose",
		Short: "Tell whether and how gpreempt can work on this host",
		Long: `Tell whether and how gpreempt can work on this host, without a daemon; gpctl doctor
shows the same and asks the daemon first. It opens the driver, which makes it one of
the driver's processes until it ends, and suspends nothing.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.ConfigGiven, opts.Host = cmd.Flags().Changed("config"), daemon.ThisHost()
			report, err := daemon.Diagnose(cmd.Context(), opts)
			if err != nil {
				return err
			}
			if asJSON {
				return report.WriteJSON(cmd.OutOrStdout())
			}
			return report.Write(cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&opts.ConfigPath, "config", config.DefaultPath, "config file; its absence is an error only when this is given")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the JSON of the API's DiagnoseResponse")
	return cmd
}

func configCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Write or check the config file", Args: cobra.NoArgs, RunE: help}
	cmd.AddCommand(&cobra.Command{
		Use:   "default",
		Short: "Print the default config file, with every key explained",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(config.DefaultYAML())
			return err
		},
	}, &cobra.Command{
		Use:   "check [FILE]",
		Short: "Check a config file and list every error in it",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path := config.DefaultPath
			if len(args) == 1 {
				path = args[0]
			}
			if _, err := config.Load(path); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: good\n", path)
			return err
		},
	})
	return cmd
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "gpreemptd", api.VersionString())
			return err
		},
	}
}

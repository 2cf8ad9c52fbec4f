// Package cli implements gpctl, the operator's tool: its commands, their output for
// people and programs, its errors and exit codes.
package cli

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/api"
)

// DefaultSocket is the path of the daemon's socket.
const DefaultSocket = "/run/gpreempt/gpreemptd.sock"

// SocketEnv names the environment variable that changes DefaultSocket.
const SocketEnv = "GPREEMPT_SOCKET"

// AddressEnv names the environment variable with the address of a daemon on another
// host. CertEnv, KeyEnv and CAEnv name those with the files that this needs.
const (
	AddressEnv = "GPREEMPT_ADDRESS"
	CertEnv    = "GPREEMPT_CERT"
	KeyEnv     = "GPREEMPT_KEY"
	CAEnv      = "GPREEMPT_CA"
)

// IO is the environment of a run of gpctl, except the daemon.
type IO struct {
	In       io.Reader
	Out, Err io.Writer
	// Getenv looks up an environment variable.
	Getenv func(string) string
	// Now is the wall clock, for ages.
	Now func() time.Time
	// Terminal and ErrTerminal report whether Out and Err are terminals.
	Terminal, ErrTerminal bool
	// Sleep waits for d. When ctx ends first, it returns the cause.
	Sleep func(ctx context.Context, d time.Duration) error
	// Environ returns the environment. Exec replaces gpctl by a program, as execve(2):
	// it returns only when that failed.
	Environ func() []string
	Exec    func(path string, args, env []string) error
	// Background runs gpctl itself in the background, with the environment and the standard
	// error of this run. It is no child of this process.
	Background func(args []string) error

	// args are those of this run, and rec takes the output for people, if it is not nil: for --hosts.
	args []string
	rec  *capture
}

// Main runs gpctl with args, without the program's name, and returns its exit code.
// The end of ctx ends all waiting.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	return Run(ctx, args, IO{
		In: stdin, Out: stdout, Err: stderr, Getenv: getenv, Now: time.Now, Terminal: isTerminal(stdout),
		ErrTerminal: isTerminal(stderr),
		Sleep:       sleep, Environ: os.Environ, Exec: syscall.Exec, Background: background,
	})
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}

// Run is Main with an explicit environment.
func Run(ctx context.Context, args []string, streams IO) int {
	err := execute(ctx, args, streams)
	if err == nil {
		return ExitOK
	}
	f := asFailure(err)
	f.print(streams.Err)
	return f.code
}

func asFailure(err error) *failure {
	f, ok := errors.AsType[*failure](err)
	if !ok {
		f = &failure{code: ExitFailure, message: err.Error()}
	}
	return f
}

func execute(ctx context.Context, args []string, streams IO) error {
	streams.args = args
	cmd := New(streams) //nolint:contextcheck // cobra hands ctx to the commands, in ExecuteContext
	var unknown error
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if words := cmd.Flags().Args(); cmd.HasAvailableSubCommands() && len(words) > 0 {
			unknown = unknownSubcommand(cmd, words[0])
			return
		}
		help(cmd, args)
	})
	cmd.SetArgs(args)
	return errors.Join(cmd.ExecuteContext(ctx), unknown)
}

// isTerminal reports whether w is a character device, which is close enough: nobody
// reads the output on others, such as /dev/null.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// app is one run: its environment and the global flags.
type app struct {
	IO
	socket string
	// address is "tcp://HOST:PORT" of a daemon on another host, "" for the socket.
	// cert, key and ca are the paths of the files for it.
	address, cert, key, ca string
	// hosts is a list of daemons, "" for one.
	hosts string

	output  string
	timeout time.Duration
	// jq and template are texts; expression is the one that is set, or nil.
	jq, template string
	expression   expression
	// simulated names the machine that the daemon serves instead of hardware, or is nil.
	simulated atomic.Pointer[string]
}

// The formats of --output.
const (
	formatTable = "table"
	formatWide  = "wide"
	formatJSON  = "json"
	formatYAML  = "yaml"
)

// noData is the annotation of commands whose output is not data: they have no JSON.
const noData = "no data"

var formats = []string{formatTable, formatWide, formatJSON, formatYAML}

// New returns the command tree, which prints to streams.
func New(streams IO) *cobra.Command {
	a := &app{IO: streams}
	socket := DefaultSocket
	if s := streams.Getenv(SocketEnv); s != "" {
		socket = s
	}
	root := &cobra.Command{
		Use:           "gpctl",
		Short:         "Inspects and controls gpreemptd, which pauses offline GPU work for online work",
		Version:       api.VersionString(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return unknownSubcommand(cmd, args[0])
		},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			given := cmd.Flags().Changed
			switch {
			case !slices.Contains(formats, a.output):
				return usage(cmd, "invalid --output %q; use %s", a.output, strings.Join(formats, ", "))
			case cmd.Annotations[noData] != "" && (given("output") || given("jq") || given("template")):
				return usage(cmd, "%s has one form of output: --output, --jq and --template do not apply", cmd.CommandPath())
			case a.timeout <= 0:
				return usage(cmd, "--timeout must be greater than 0")
			}
			if err := a.checkEmpty(cmd); err != nil {
				return err
			}
			return errors.Join(a.compile(cmd), a.checkHosts(cmd), a.checkAddress(cmd))
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetVersionTemplate("gpctl {{.Version}}\n")
	root.SetIn(streams.In)
	root.SetOut(streams.Out)
	root.SetErr(streams.Err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usage(cmd, "%v", err) })

	flags := root.PersistentFlags()
	flags.StringVar(&a.socket, "socket", socket, "socket of the daemon (env "+SocketEnv+")")
	flags.StringVar(&a.address, "address", streams.Getenv(AddressEnv), "daemon on another host, tcp://HOST:PORT (env "+AddressEnv+")")
	flags.StringVar(&a.hosts, "hosts", "", "daemons on many hosts, `LIST` or @FILE: gpu[01-16],gpu20:7443,NAME=/SOCKET")
	flags.StringVar(&a.cert, "cert", streams.Getenv(CertEnv), "with --address and --hosts: client certificate, PEM (env "+CertEnv+")")
	flags.StringVar(&a.key, "key", streams.Getenv(KeyEnv), "with --address and --hosts: key of the certificate, PEM (env "+KeyEnv+")")
	flags.StringVar(&a.ca, "ca", streams.Getenv(CAEnv), "with --address and --hosts: CA of the daemon's certificate, PEM (env "+CAEnv+")")
	flags.StringVarP(&a.output, "output", "o", formatTable, "format: "+strings.Join(formats, ", "))
	flags.StringVar(&a.jq, "jq", "", "print what this jq `EXPRESSION` selects of the JSON")
	flags.StringVar(&a.template, "template", "", "print the JSON by this Go `TEMPLATE`")
	flags.DurationVar(&a.timeout, "timeout", 15*time.Second, "longest wait for an answer")
	complete(root, "output", formats)

	root.AddCommand(
		a.statusCommand(), a.topCommand(), a.webCommand(), a.gpuCommand(), a.targetCommand(), a.queueCommand(), a.hqdCommand(), a.mqdCommand(), a.amdlogCommand(),
		a.traceCommand(), a.leaseCommand(),
		a.policyCommand(), a.eventsCommand(), a.statsCommand(), a.drainCommand(), a.fleetCommand(), a.runCommand(), a.reportRunCommand(), a.trialCommand(), a.compareCommand(), a.doctorCommand(), a.simCommand(), a.planCommand(), a.reportCommand(),
		completionCommand(), a.versionCommand(),
	)
	a.forHosts(root)
	root.SetHelpCommand(helpCommand(root))
	addHelp(root)
	return root
}

// helpCommand is cobra's, except that an unknown command is an error.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:         "help [COMMAND]",
		Short:       "Show the help of a command",
		Annotations: map[string]string{noData: noData},
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			cmd, _, err := root.Find(args)
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return subcommandNames(cmd), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			switch {
			case err != nil:
				return err
			case len(rest) > 0 && cmd.HasAvailableSubCommands():
				return unknownSubcommand(cmd, rest[0])
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	}
}

//go:embed help.txt
var helpText string

// addHelp sets the long descriptions and the examples of the commands below root.
func addHelp(root *cobra.Command) {
	for section := range strings.SplitSeq(strings.TrimPrefix(helpText, "# "), "\n# ") {
		path, text, _ := strings.Cut(section, "\n")
		cmd, _, err := root.Find(strings.Fields(path)[1:])
		if err != nil || cmd.CommandPath() != path {
			panic("help.txt describes " + path + ", which is no command")
		}
		long, examples, _ := strings.Cut(text, "\nExamples:\n")
		cmd.Long, cmd.Example = strings.TrimSpace(long), strings.TrimRight(examples, "\n")
	}
}

// noun returns a command that only groups subcommands.
func noun(name, short string, subcommands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(cmd, "missing subcommand: %s", strings.Join(subcommandNames(cmd), ", "))
			}
			return unknownSubcommand(cmd, args[0])
		},
	}
	cmd.AddCommand(subcommands...)
	return cmd
}

func subcommandNames(cmd *cobra.Command) []string {
	var names []string
	for _, c := range cmd.Commands() {
		if !c.Hidden {
			names = append(names, c.Name())
		}
	}
	return names
}

func unknownSubcommand(cmd *cobra.Command, word string) error {
	cmd.SuggestionsMinimumDistance = 1 + min(len(word)/5, 1) // of a short word most names are near
	next := "one of " + strings.Join(subcommandNames(cmd), ", ")
	if near := cmd.SuggestionsFor(word); len(near) > 0 {
		next = cmd.CommandPath() + " " + strings.Join(near, ", "+cmd.CommandPath()+" ")
	}
	return &failure{code: ExitUsage, message: fmt.Sprintf("unknown command %q", cmd.CommandPath()+" "+word), next: next}
}

// operands returns a check for exactly the named operands, such as "TARGET".
func operands(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return usage(cmd, "missing argument: %s", strings.Join(names[len(args):], " "))
		case len(args) > len(names):
			return usage(cmd, "unexpected argument %q", args[len(names)])
		}
		return nil
	}
}

// complete sets the fixed completions of a flag.
func complete(cmd *cobra.Command, flag string, choices []string) {
	fixed := cobra.FixedCompletions(choices, cobra.ShellCompDirectiveNoFileComp)
	if err := cmd.RegisterFlagCompletionFunc(flag, fixed); err != nil {
		panic(err) // the flag does not exist: an error in this package
	}
}

// completeBy completes a flag by fn.
func completeBy(cmd *cobra.Command, flag string, fn cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, fn); err != nil {
		panic(err) // the flag does not exist: an error in this package
	}
}

// Package term is what the commands of gpctl and gplab stand on: the connection to the daemon,
// the output for people and programs, failures with exit codes, and words for people.
package term

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/cmdline"
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

// IO is the environment of a run of a program, except the daemon.
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
	// Environ returns the environment. Exec replaces the program by another, as execve(2):
	// it returns only when that failed.
	Environ func() []string
	Exec    func(path string, args, env []string) error

	// Args are those of this run, and rec takes the output for people, if it is not nil: for --hosts.
	Args []string
	Rec  *Capture
}

// Program is a program of commands.
type Program struct {
	Name, Short string
	// Help has the long descriptions and the examples of the commands: a section for each, after a
	// line "# " with the words that run it.
	Help string
	// Instead says what to write instead of subcommands and flags that people look for: see cmdline.Extra.
	Instead map[string]string
	// ManyHosts adds the flag --hosts.
	ManyHosts bool
	// Add adds the commands to root.
	Add func(a *App, root *cobra.Command)
	// Check refuses global flags that do not apply to cmd, before it runs. It may be nil.
	Check func(a *App, cmd *cobra.Command) error
}

// Main runs the program with args, without its name, and returns its exit code. The end of ctx
// ends all waiting.
func (p *Program) Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	return p.Run(ctx, args, IO{
		In: stdin, Out: stdout, Err: stderr, Getenv: getenv, Now: time.Now, Terminal: isTerminal(stdout),
		ErrTerminal: isTerminal(stderr),
		Sleep:       Sleep, Environ: os.Environ, Exec: syscall.Exec,
	})
}

// Sleep waits for d. When ctx ends first, it returns the cause.
func Sleep(ctx context.Context, d time.Duration) error {
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
func (p *Program) Run(ctx context.Context, args []string, streams IO) int {
	err := p.Execute(ctx, args, streams)
	if err == nil {
		return ExitOK
	}
	f := AsFailure(err)
	f.Print(streams.Err, p.Name)
	return f.Code
}

// AsFailure returns err as a failure, with ExitFailure if it is no other one.
func AsFailure(err error) *Failure {
	if f, ok := errors.AsType[*Failure](err); ok {
		return f
	}
	if m, ok := errors.AsType[*cmdline.Mistake](err); ok {
		return &Failure{Code: ExitUsage, Message: m.Message, Next: m.Next}
	}
	return &Failure{Code: ExitFailure, Message: err.Error()}
}

// Execute runs the program without printing its failure.
func (p *Program) Execute(ctx context.Context, args []string, streams IO) error {
	streams.Args = args
	cmd := p.New(streams) //nolint:contextcheck // cobra hands ctx to the commands, in ExecuteContext
	var unknown error
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if words := cmd.Flags().Args(); cmd.HasAvailableSubCommands() && len(words) > 0 {
			unknown = Unknown(cmd, words...)
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

// App is one run: its environment and the global flags.
type App struct {
	IO
	Program *Program
	Socket  string
	// Address is "tcp://HOST:PORT" of a daemon on another host, "" for the socket.
	// cert, key and ca are the paths of the files for it.
	Address, Cert, Key, Ca string
	// Hosts is a list of daemons, "" for one. Only a program with ManyHosts has it.
	Hosts string

	Output  string
	Timeout time.Duration
	// jq is a text; expression is what it says, or nil.
	jq         string
	expression expression
	// Simulated names the machine that the daemon serves instead of hardware, or is nil.
	Simulated atomic.Pointer[string]
}

// The formats of --output.
const (
	FormatTable = "table"
	FormatWide  = "wide"
	FormatJSON  = "json"
	FormatYAML  = "yaml"
)

// NoData is the annotation of commands whose output is not data: they have no JSON.
const NoData = "no data"

var formats = []string{FormatTable, FormatWide, FormatJSON, FormatYAML}

// New returns the command tree, which prints to streams.
func (p *Program) New(streams IO) *cobra.Command {
	a := &App{IO: streams, Program: p}
	socket := DefaultSocket
	if s := streams.Getenv(SocketEnv); s != "" {
		socket = s
	}
	root := &cobra.Command{
		Use:           p.Name,
		Short:         p.Short,
		Annotations:   p.Instead,
		Version:       api.VersionString(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return Unknown(cmd, args...)
		},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			given := cmd.Flags().Changed
			switch {
			case !slices.Contains(formats, a.Output):
				return Usage(cmd, "invalid --output %q; use %s", a.Output, strings.Join(formats, ", "))
			case cmd.Annotations[NoData] != "" && (given("output") || given("jq")):
				return Usage(cmd, "%s has one form of output: --output and --jq do not apply", cmd.CommandPath())
			case a.Timeout <= 0:
				return Usage(cmd, "--timeout must be greater than 0")
			}
			if err := a.checkEmpty(cmd); err != nil {
				return err
			}
			err := a.compile(cmd)
			if p.Check != nil {
				err = errors.Join(err, p.Check(a, cmd))
			}
			return errors.Join(err, a.checkAddress(cmd))
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetVersionTemplate(p.Name + " {{.Version}}\n")
	root.SetIn(streams.In)
	root.SetOut(streams.Out)
	root.SetErr(streams.Err)
	root.SetFlagErrorFunc(wrongFlag)

	flags := root.PersistentFlags()
	flags.StringVar(&a.Socket, "socket", socket, "socket of the daemon (env "+SocketEnv+")")
	flags.StringVar(&a.Address, "address", streams.Getenv(AddressEnv), "daemon on another host, tcp://HOST:PORT (env "+AddressEnv+")")
	for _, file := range a.tlsFiles() {
		flags.StringVar(file.path, file.flag, streams.Getenv(file.env), "with "+p.remote()+": "+file.what+", PEM (env "+file.env+")")
	}
	if p.ManyHosts {
		flags.StringVar(&a.Hosts, "hosts", "", "daemons on many hosts, `LIST` or @FILE: gpu[01-16],gpu20:7443,NAME=/SOCKET")
	}
	flags.StringVarP(&a.Output, "output", "o", FormatTable, "format: "+strings.Join(formats, ", "))
	flags.StringVar(&a.jq, "jq", "", "print what this jq `EXPRESSION` selects of the JSON")
	flags.DurationVar(&a.Timeout, "timeout", 15*time.Second, "longest wait for an answer")
	Complete(root, "output", formats)

	p.Add(a, root)
	root.SetHelpCommand(helpCommand(root))
	addHelp(root, p.Help)
	return root
}

// remote names the flags that select a daemon on another host.
func (p *Program) remote() string {
	if p.ManyHosts {
		return "--address and --hosts"
	}
	return "--address"
}

// Group adds commands to root, under a title in its help.
func Group(root *cobra.Command, title string, commands ...*cobra.Command) {
	root.AddGroup(&cobra.Group{ID: title, Title: title + ":"})
	for _, cmd := range commands {
		cmd.GroupID = title
	}
	root.AddCommand(commands...)
}

// helpCommand is cobra's, except that an unknown command is an error.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:         "help [COMMAND]",
		Short:       "Show the help of a command",
		Annotations: map[string]string{NoData: NoData},
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
				return Unknown(cmd, rest...)
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	}
}

// addHelp sets the long descriptions and the examples of the commands below root.
func addHelp(root *cobra.Command, help string) {
	for section := range strings.SplitSeq(strings.TrimPrefix(help, "# "), "\n# ") {
		path, text, _ := strings.Cut(section, "\n")
		cmd, _, err := root.Find(strings.Fields(path)[1:])
		if err != nil || cmd.CommandPath() != path {
			panic("the help describes " + path + ", which is no command")
		}
		long, examples, _ := strings.Cut(text, "\nExamples:\n")
		cmd.Long, cmd.Example = strings.TrimSpace(long), strings.TrimRight(examples, "\n")
	}
}

// Noun returns a command that only groups subcommands.
func Noun(name, short string, subcommands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return Usage(cmd, "missing subcommand: %s", strings.Join(subcommandNames(cmd), ", "))
			}
			return Unknown(cmd, args...)
		},
	}
	cmd.AddCommand(subcommands...)
	return cmd
}

func subcommandNames(cmd *cobra.Command) []string {
	return strings.Fields(list(available(cmd), " ", (*cobra.Command).Name))
}

// Operands returns a check for exactly the named operands, such as "TARGET".
func Operands(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return &Failure{Code: ExitUsage, Message: "missing argument: " + strings.Join(names[len(args):], " "), Next: usage(cmd)}
		case len(args) > len(names):
			return cmdline.Argument(cmd, args[len(names)])
		}
		if i := slices.Index(args, ""); i >= 0 {
			return &Failure{Code: ExitUsage, Message: names[i] + " is empty: is a variable not set?", Next: usage(cmd)}
		}
		return nil
	}
}

func usage(cmd *cobra.Command) string { return strings.TrimSuffix(cmd.UseLine(), " [flags]") }

// Complete sets the fixed completions of a flag.
func Complete(cmd *cobra.Command, flag string, choices []string) {
	fixed := cobra.FixedCompletions(choices, cobra.ShellCompDirectiveNoFileComp)
	if err := cmd.RegisterFlagCompletionFunc(flag, fixed); err != nil {
		panic(err) // the flag does not exist: an error in this package
	}
}

// CompleteBy completes a flag by fn.
func CompleteBy(cmd *cobra.Command, flag string, fn cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, fn); err != nil {
		panic(err) // the flag does not exist: an error in this package
	}
}

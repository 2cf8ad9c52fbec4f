// Package cli hides what gpctl, the admin's tool, says and how it says it: its
// commands, their output for people and programs, its errors and exit codes.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// DefaultSocket is where gpctl looks for the daemon.
const DefaultSocket = "/run/gpreempt/gpreemptd.sock"

// SocketEnv names the environment variable that changes DefaultSocket.
const SocketEnv = "GPREEMPT_SOCKET"

// AddressEnv names the environment variable that has gpctl ask a daemon on another
// host. CertEnv, KeyEnv and CAEnv name those for the files that needs.
const (
	AddressEnv = "GPREEMPT_ADDRESS"
	CertEnv    = "GPREEMPT_CERT"
	KeyEnv     = "GPREEMPT_KEY"
	CAEnv      = "GPREEMPT_CA"
)

// IO is all that a run of gpctl sees of the world, besides the daemon.
type IO struct {
	In       io.Reader
	Out, Err io.Writer
	// Getenv looks up an environment variable.
	Getenv func(string) string
	// Now is the wall clock, for ages.
	Now func() time.Time
	// Terminal and ErrTerminal tell that a person watches Out and Err.
	Terminal, ErrTerminal bool
	// Sleep waits for d, or until ctx ends, which it says.
	Sleep func(ctx context.Context, d time.Duration) error
	// Environ returns the environment, and Exec replaces gpctl by a program, as
	// execve(2): it returns when that failed.
	Environ func() []string
	Exec    func(path string, args, env []string) error
}

// Main runs gpctl with args, without the program's name, and returns its exit code.
// When ctx ends, so does what gpctl waits for.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	return Run(ctx, args, IO{
		In: stdin, Out: stdout, Err: stderr, Getenv: getenv, Now: time.Now, Terminal: isTerminal(stdout),
		ErrTerminal: isTerminal(stderr),
		Sleep:       sleep, Environ: os.Environ, Exec: syscall.Exec,
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

// Run is Main with everything given.
func Run(ctx context.Context, args []string, streams IO) int {
	cmd := New(streams) //nolint:contextcheck // cobra hands ctx to the commands, in ExecuteContext
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return ExitOK
	}
	f, ok := errors.AsType[*failure](err)
	if !ok {
		f = &failure{code: ExitFailure, message: err.Error()}
	}
	f.print(streams.Err)
	return f.code
}

// isTerminal takes any character device for a terminal: what it gets wrong, such
// as /dev/null, nobody reads.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// app is one run: the world and the global flags.
type app struct {
	IO
	socket string
	// address is "tcp://HOST:PORT" of a daemon on another host, "" for the socket;
	// cert, key and ca are files for it.
	address, cert, key, ca string

	output  string
	timeout time.Duration
	// simulated names what the daemon serves in place of hardware, "" with it.
	simulated string
}

// The formats of --output.
const (
	formatTable = "table"
	formatWide  = "wide"
	formatJSON  = "json"
	formatYAML  = "yaml"
)

var formats = []string{formatTable, formatWide, formatJSON, formatYAML}

// New returns the command tree, which prints to streams.
func New(streams IO) *cobra.Command {
	a := &app{IO: streams}
	socket := DefaultSocket
	if s := streams.Getenv(SocketEnv); s != "" {
		socket = s
	}
	root := &cobra.Command{
		Use:   "gpctl",
		Short: "Shows and steers gpreemptd, which lends the GPUs of offline work to online work",
		Long: `gpctl shows and steers gpreemptd, which takes offline work off the GPUs of this
host while online work needs them.

Start with:
  gpctl status                what runs, what is suspended, what is wrong
  gpctl target list           the processes that own GPU queues
  gpctl target explain PID    why one of them is, or is not, suspended
  gpctl queue find PID        its queues, wherever it runs
  gpctl doctor                whether and how gpreempt can work on this host

Exit codes:
  0  done
  1  failed
  2  the command line is wrong
  3  the daemon cannot be reached
  4  there is no such target, lease, GPU or queue
  5  permission denied, by the daemon or on its socket
  6  refused: an argument out of range, a condition not met, a limit reached
  7  doctor: a check failed
  8  doctor, trace: this host has no AMD GPU

Environment:
  ` + SocketEnv + `   path of the daemon's socket, as --socket
  ` + AddressEnv + `  address of a daemon on another host, as --address; and so
                    ` + CertEnv + `, ` + KeyEnv + `, ` + CAEnv + `
  NO_COLOR          no colour, even on a terminal`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return unknownVerb(cmd, args[0])
		},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case !slices.Contains(formats, a.output):
				return usage(cmd, "--output %q is none of %s", a.output, strings.Join(formats, ", "))
			case a.timeout <= 0:
				return usage(cmd, "--timeout must be more than 0")
			}
			return a.checkAddress(cmd)
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetIn(streams.In)
	root.SetOut(streams.Out)
	root.SetErr(streams.Err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usage(cmd, "%v", err) })

	flags := root.PersistentFlags()
	flags.StringVar(&a.socket, "socket", socket, "socket of the daemon (env "+SocketEnv+")")
	flags.StringVar(&a.address, "address", streams.Getenv(AddressEnv), "daemon on another host, tcp://HOST:PORT (env "+AddressEnv+")")
	flags.StringVar(&a.cert, "cert", streams.Getenv(CertEnv), "with --address: your certificate, PEM (env "+CertEnv+")")
	flags.StringVar(&a.key, "key", streams.Getenv(KeyEnv), "with --address: its key, PEM (env "+KeyEnv+")")
	flags.StringVar(&a.ca, "ca", streams.Getenv(CAEnv), "with --address: who vouches for the daemon, PEM (env "+CAEnv+")")
	flags.StringVarP(&a.output, "output", "o", formatTable, "format: "+strings.Join(formats, ", "))
	flags.DurationVar(&a.timeout, "timeout", 15*time.Second, "how long to wait for an answer")
	complete(root, "output", formats)

	root.AddCommand(
		a.statusCommand(), a.gpuCommand(), a.targetCommand(), a.queueCommand(), a.hqdCommand(), a.mqdCommand(), a.amdlogCommand(),
		a.traceCommand(), a.leaseCommand(),
		a.policyCommand(), a.eventsCommand(), a.statsCommand(), a.drainCommand(), a.runCommand(), a.doctorCommand(), a.demoCommand(),
		completionCommand(), a.versionCommand(),
	)
	return root
}

// noun returns a command that only groups verbs.
func noun(name, short string, verbs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(cmd, "%s needs a verb: %s", name, strings.Join(verbNames(cmd), ", "))
			}
			return unknownVerb(cmd, args[0])
		},
	}
	cmd.AddCommand(verbs...)
	return cmd
}

func verbNames(cmd *cobra.Command) []string {
	var names []string
	for _, c := range cmd.Commands() {
		if !c.Hidden {
			names = append(names, c.Name())
		}
	}
	return names
}

func unknownVerb(cmd *cobra.Command, word string) error {
	cmd.SuggestionsMinimumDistance = 2
	f := &failure{
		code:    ExitUsage,
		message: fmt.Sprintf("%s has no command %q", cmd.CommandPath(), word),
		next:    "its commands are " + strings.Join(verbNames(cmd), ", "),
	}
	if near := cmd.SuggestionsFor(word); len(near) > 0 {
		f.next = cmd.CommandPath() + " " + near[0]
	}
	return f
}

// operands asks for exactly the operands named, as "TARGET".
func operands(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return usage(cmd, "%s is missing", strings.Join(names[len(args):], " and "))
		case len(args) > len(names):
			return usage(cmd, "%q is one operand too many", args[len(names)])
		}
		return nil
	}
}

// complete offers words for a flag.
func complete(cmd *cobra.Command, flag string, choices []string) {
	fixed := cobra.FixedCompletions(choices, cobra.ShellCompDirectiveNoFileComp)
	if err := cmd.RegisterFlagCompletionFunc(flag, fixed); err != nil {
		panic(err) // the flag does not exist: a mistake in this package
	}
}

// completeBy offers for a flag what fn finds.
func completeBy(cmd *cobra.Command, flag string, fn cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, fn); err != nil {
		panic(err) // the flag does not exist: a mistake in this package
	}
}

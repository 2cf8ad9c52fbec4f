package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/pkg/client"
)

// withDaemon is the command that kfdemu run --daemon runs on the machine.
const withDaemon = "with-daemon"

// plainYAML is the config of that daemon: no process is offline by itself.
const plainYAML = `access: {online_groups: [], admin_groups: []} # root and the user of the machine have all rights
log: {level: warn}
`

func withDaemonCommand() *cobra.Command {
	return &cobra.Command{
		Use: withDaemon + " PROGRAM [ARGUMENT...]", Hidden: true, DisableFlagParsing: true, Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runWithDaemon(cmd.Context(), args) },
	}
}

// runWithDaemon runs a program beside a gpreemptd, on the machine of this process. The daemon has a
// folder of its own, which is removed unless the daemon fails.
func runWithDaemon(ctx context.Context, args []string) (err error) {
	self, err := lookBeside()
	if err != nil {
		return err
	}
	daemon, err := find(self, "gpreemptd")
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "gpreempt-")
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(dir, "gpreemptd.log"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	// The program's signals are its own: it decides when to end.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)

	socket := filepath.Join(dir, "gpreemptd.sock")
	served, err := startDaemon(daemon, plainYAML, dir, socket, log)
	if err != nil {
		return err
	}
	defer func() {
		if ended := served.interrupt(); ended != nil {
			err = errors.Join(err, fmt.Errorf("%w: its log is %s", ended, log.Name()))
			return
		}
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	c, err := client.Dial("unix://" + socket)
	if err != nil {
		return err
	}
	s := &stage{client: c}
	if err := errors.Join(s.awaitDaemon(ctx, served, ""), c.Close()); err != nil {
		return err
	}
	program := exec.Command(args[0], args[1:]...) //nolint:gosec,noctx // G204: the user's program, which ends by its own decision
	program.Stdin, program.Stdout, program.Stderr = os.Stdin, os.Stdout, os.Stderr
	program.Env = append(os.Environ(), "GPREEMPT_SOCKET="+socket)
	// A terminal sends Ctrl-C to the program, too.
	return runWithSignals(program, signals, func(s os.Signal) bool { return s != os.Interrupt })
}

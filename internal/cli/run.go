package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The tags: the daemon reads them in the environment a process began with.
const (
	classEnv    = "GPREEMPT_CLASS"
	priorityEnv = "GPREEMPT_PRIORITY"
)

// How gpctl run ends when there is no command to become; env(1) ends so too.
const (
	exitCannotRun = 126
	exitNoCommand = 127
)

func (a *app) runCommand() *cobra.Command {
	var (
		class string
		rank  uint32
	)
	cmd := &cobra.Command{
		Use:   "run --class CLASS -- COMMAND [ARGUMENT...]",
		Short: "Run a command whose processes have a class",
		Long: `Tags a command with its class: sets ` + classEnv + `, and ` + priorityEnv + ` with
--priority, in its environment and becomes that command. No daemon is needed to start it.

The daemon reads the tags in the environment a process began with. They decide where no
rule of its configuration matches: rules go first, and an admin (gpctl target classify)
before both. gpctl target explain tells which of them decided.

Children inherit the tags. What clears or makes an environment of its own does not hand
them on: give sudo --preserve-env=` + classEnv + `, and a container
-e ` + classEnv + `=offline.

Ends as the command does; with 127 when there is no such command and 126 when it cannot
be run, as env(1).`,
		Example: "  gpctl run --class offline -- python3 train.py --epochs 90\n  gpctl run --class online --priority 11 -- ./server",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(cmd, "COMMAND is missing")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if class == "" {
				return usage(cmd, "--class is missing: it is one of %s", strings.Join(api.EnumNames[gpreemptv1.Class](), ", "))
			}
			c, err := parseClass(cmd, class)
			if err != nil {
				return err
			}
			tags := []string{classEnv + "=" + api.EnumName(c)}
			if cmd.Flags().Changed("priority") {
				if rank > uint32(gpreempt.MaxPriority) {
					return usage(cmd, "--priority %d is outside 0 to %d", rank, gpreempt.MaxPriority)
				}
				tags = append(tags, priorityEnv+"="+strconv.FormatUint(uint64(rank), 10))
			}
			// A priority that is inherited was meant for another class.
			env := slices.DeleteFunc(slices.Clone(a.Environ()), func(v string) bool {
				return strings.HasPrefix(v, classEnv+"=") || strings.HasPrefix(v, priorityEnv+"=")
			})
			return a.become(args, append(env, tags...))
		},
	}
	// What follows COMMAND is its own.
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringVar(&class, "class", "", "the class: "+strings.Join(api.EnumNames[gpreemptv1.Class](), ", "))
	cmd.Flags().Uint32Var(&rank, "priority", 0, "priority 0 to 15 (default: the class's)")
	complete(cmd, "class", api.EnumNames[gpreemptv1.Class]())
	return cmd
}

// become looks for the command argv[0] as execvp(3) does and replaces gpctl by it;
// it returns when it could not.
func (a *app) become(argv, env []string) error {
	name := argv[0]
	paths := []string{name}
	if !strings.Contains(name, "/") {
		paths = nil
		for _, dir := range filepath.SplitList(or(a.Getenv("PATH"), "/bin:/usr/bin")) {
			paths = append(paths, or(dir, ".")+"/"+name)
		}
	}
	var denied error
	for _, path := range paths {
		err := a.Exec(path, argv, env)
		if errors.Is(err, syscall.ENOEXEC) {
			// A script without #!.
			err = a.Exec("/bin/sh", slices.Concat([]string{"sh", path}, argv[1:]), env)
		}
		switch {
		case err == nil: // replaced: who comes back here is a test
			return nil
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		case errors.Is(err, fs.ErrPermission):
			denied = err
		default:
			return &failure{code: exitCannotRun, message: fmt.Sprintf("cannot run %s: %v", path, err)}
		}
	}
	if denied != nil {
		return &failure{code: exitCannotRun, message: fmt.Sprintf("cannot run %s: %v", name, denied), next: "chmod +x, if it is a program"}
	}
	return &failure{code: exitNoCommand, message: fmt.Sprintf("there is no command %s", name)}
}

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
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The tags: the daemon reads them in the environment with which a process started.
const (
	classEnv    = "GPREEMPT_CLASS"
	priorityEnv = "GPREEMPT_PRIORITY"
)

// The exit codes of gpctl run when it cannot execute the command, as those of env(1).
const (
	exitCannotRun = 126
	exitNoCommand = 127
)

func runCommand(a *term.App) *cobra.Command {
	var (
		class string
		rank  uint32
	)
	cmd := &cobra.Command{
		Use:         "run --class CLASS -- COMMAND [ARGUMENT...]",
		Annotations: map[string]string{term.NoData: term.NoData},
		Short:       "Run a command with a class",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return term.Usage(cmd, "missing argument: COMMAND")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if class == "" {
				return &term.Failure{
					Code: term.ExitUsage, Message: "missing --class; use " + strings.Join(term.EnumNames[gpreemptv1.Class](), ", "),
					Next: "gpctl run --class offline -- " + strings.Join(args, " "),
				}
			}
			c, err := parseClass(cmd, class)
			if err != nil {
				return err
			}
			tags := []string{classEnv + "=" + api.EnumName(c)}
			if cmd.Flags().Changed("priority") {
				if rank > uint32(gpreempt.MaxPriority) {
					return term.Usage(cmd, "--priority %d is outside 0 to %d", rank, gpreempt.MaxPriority)
				}
				tags = append(tags, priorityEnv+"="+strconv.FormatUint(uint64(rank), 10))
			}
			// An inherited priority belongs to another class.
			env := slices.DeleteFunc(slices.Clone(a.Environ()), func(v string) bool {
				return strings.HasPrefix(v, classEnv+"=") || strings.HasPrefix(v, priorityEnv+"=")
			})
			return become(a, args, append(env, tags...))
		},
	}
	// The flags after COMMAND belong to it.
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringVar(&class, "class", "", "the class: "+strings.Join(term.EnumNames[gpreemptv1.Class](), ", "))
	cmd.Flags().Uint32Var(&rank, "priority", 0, "priority 0 to 15 (default: the class's)")
	term.Complete(cmd, "class", term.EnumNames[gpreemptv1.Class]())
	return cmd
}

// become searches for the command argv[0] as execvp(3) does and replaces gpctl by it.
// It returns only when that failed.
func become(a *term.App, argv, env []string) error {
	name := argv[0]
	paths := []string{name}
	if !strings.Contains(name, "/") {
		paths = nil
		for _, dir := range filepath.SplitList(term.Or(a.Getenv("PATH"), "/bin:/usr/bin")) {
			paths = append(paths, term.Or(dir, ".")+"/"+name)
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
		case err == nil: // only a test returns here
			return nil
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		case errors.Is(err, fs.ErrPermission):
			denied = err
		default:
			return &term.Failure{Code: exitCannotRun, Message: fmt.Sprintf("cannot execute %s: %v", path, err)}
		}
	}
	if denied != nil {
		return &term.Failure{Code: exitCannotRun, Message: fmt.Sprintf("cannot execute %s: %v", name, denied), Next: "chmod +x, if it is a program"}
	}
	next := "check the name and PATH"
	if words := strings.Fields(name); len(words) > 1 {
		next = "the command without quotes: -- " + strings.Join(words, " ")
	}
	return &term.Failure{Code: exitNoCommand, Message: fmt.Sprintf("command not found: %s", name), Next: next}
}

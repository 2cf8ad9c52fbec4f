package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// setup describes an emulated machine and what runs on it while its rows run.
type setup struct {
	// flags are those of kfdemu run.
	flags []string
	// config is of the daemon, beside what every emulated machine needs; "-" starts none.
	config string
	// environment is of the daemon, beside that of every command.
	environment []string
	// programs run on it, named by a variable with the pid that they print.
	programs []program
}

// program is a command line that runs while the machine does; its first line is JSON with a pid.
type program struct{ variable, command string }

// baseConfig is the default but for groups and the known hazards, of which an emulated GPU has none.
const baseConfig = `access: {online_groups: [], admin_groups: []}
safety:
  hazards:
    - {id: emulated, gfx: ["gfx*"], action: allow, why: It is emulated.}
`

// world has what is common to all machines.
type world struct {
	dir      string // of all files that are made
	root     string // of the clone
	captures string // "" without
	cannot   error  // why nothing can be emulated here
}

// errCannotEmulate reports why this host cannot run an emulated machine.
var errCannotEmulate = errors.New("this host cannot emulate a machine")

func newWorld(ctx context.Context, captures string) (*world, error) {
	root, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	w := &world{root: root}
	if _, err := os.Stat(filepath.Join(root, "build", "kfdemu")); err != nil {
		return nil, fmt.Errorf("%w: run it by make rows", err)
	}
	if captures, err = filepath.Abs(captures); err != nil {
		return nil, err
	}
	if _, err := os.Stat(captures); err == nil {
		w.captures = captures
	}
	if w.dir, err = os.MkdirTemp("", "rows-"); err != nil {
		return nil, err
	}
	// A job is known by the name of its program.
	if err := os.Link(filepath.Join(root, "build", "kfdemu"), filepath.Join(w.dir, "train")); err != nil {
		if err := os.Symlink(filepath.Join(root, "build", "kfdemu"), filepath.Join(w.dir, "train")); err != nil {
			return nil, errors.Join(err, w.close())
		}
	}
	if out, err := exec.CommandContext(ctx, filepath.Join(root, "build", "kfdemu"), "check", "--trace").CombinedOutput(); err != nil {
		w.cannot = fmt.Errorf("%w: %s", errCannotEmulate, strings.TrimSpace(string(out)))
	}
	return w, nil
}

func (w *world) close() error { return os.RemoveAll(w.dir) }

// needs are what rows may need, with a command that fails without it.
var needs = map[string]string{
	"captures": "", // the folder
	"C":        "command -v cc make pkg-config protoc nanopb_generator.py >/dev/null && test -e /usr/include/pb.h -a -e /usr/include/nghttp2/nghttp2.h",
	"Python":   "$PYTHON -c 'import google.protobuf'",
	"torch":    "$PYTHON -c 'import torch'",
	"root":     "test $(id -u) = 0",
}

// lacks says what of a row's needs is not here, "" if nothing.
func (w *world) lacks(ctx context.Context, names []string) string {
	var missing []string
	for _, name := range names {
		check, known := needs[name]
		switch {
		case !known:
			return "an unknown need: " + name
		case name == "captures":
			if w.captures == "" {
				missing = append(missing, "the real captures")
			}
		default:
			cmd := exec.CommandContext(ctx, "sh", "-c", check)
			cmd.Env = w.environment()
			if cmd.Run() != nil {
				missing = append(missing, name)
			}
		}
	}
	if len(missing) == 0 {
		return ""
	}
	return "not here: " + strings.Join(missing, ", ")
}

// environment is that of every command.
func (w *world) environment() []string {
	python := os.Getenv("PYTHON")
	if python == "" {
		python = "/usr/bin/python3"
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { // rows call make, as from a shell
		return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS")
	})
	return append(env, "PATH="+filepath.Join(w.root, "build")+":"+w.dir+":"+os.Getenv("PATH"), "CAPTURES="+w.captures,
		"PYTHON="+python, "PYTHONPATH="+filepath.Join(w.root, "bindings", "python"), "PYTHONDONTWRITEBYTECODE=1", "NO_COLOR=1")
}

// machine is a running machine.
type machine struct {
	w      *world
	name   string
	socket string // of the machine; "" is this host
	dir    string
	vars   map[string]string
	// running are its processes, the machine first.
	running []*child
}

// child is a process that lasts until its standard input ends, or SIGTERM.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// start starts a machine with its daemon and programs. The error is errCannotEmulate where the host cannot.
func (w *world) start(ctx context.Context, name string) (*machine, error) {
	m := &machine{w: w, name: name, dir: filepath.Join(w.dir, "machine-"+name), vars: map[string]string{}}
	m.vars["DIR"] = m.dir
	if err := os.Mkdir(m.dir, 0o750); err != nil {
		return m, err
	}
	if name == "" {
		return m, nil
	}
	if w.cannot != nil {
		return m, w.cannot
	}
	s, known := machines[name]
	if !known {
		return m, fmt.Errorf("there is no machine %q", name)
	}
	m.vars["GPREEMPT_SOCKET"], m.vars["RUNTIME_DIRECTORY"] = filepath.Join(m.dir, "gpreemptd.sock"), m.dir
	c, err := m.launch(ctx, "machine", slices.Concat([]string{"run"}, s.flags, []string{"--", "sh", "-c", "echo $KFDEMU_SOCKET; exec cat"})...)
	if err != nil {
		return m, err
	}
	if m.socket, err = c.hear(); err != nil {
		return m, err
	}
	m.vars["KFDEMU_SOCKET"] = m.socket
	for _, p := range s.programs {
		c, err := m.launch(ctx, p.variable, "exec", "--socket", m.socket, "--", "sh", "-c", p.command)
		if err != nil {
			return m, err
		}
		line, err := c.hear()
		if err != nil {
			return m, fmt.Errorf("%s: %w", p.command, err)
		}
		var ready struct{ PID int }
		if err := json.Unmarshal([]byte(line), &ready); err != nil {
			return m, fmt.Errorf("%s: %q: %w", p.command, line, err)
		}
		m.vars[p.variable] = fmt.Sprint(ready.PID)
	}
	if s.config == "-" {
		return m, nil
	}
	config := filepath.Join(m.dir, "config.yaml")
	if err := os.WriteFile(config, []byte(baseConfig+s.config), 0o600); err != nil {
		return m, err
	}
	args := append([]string{"exec", "--socket", m.socket, "--", "env"}, s.environment...)
	if _, err := m.launch(ctx, "gpreemptd", append(args, "gpreemptd", "serve", "--config", config, "--socket", m.vars["GPREEMPT_SOCKET"])...); err != nil {
		return m, err
	}
	return m, m.await(ctx)
}

// await waits until the daemon serves.
func (m *machine) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	for {
		out := m.sh(ctx, "gpctl status")
		if matches("up [0-9.]+", out) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the daemon does not serve: %s", out)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// launch runs kfdemu with its standard error in a file.
func (m *machine) launch(ctx context.Context, name string, args ...string) (*child, error) {
	c := &child{cmd: exec.CommandContext(ctx, filepath.Join(m.w.root, "build", "kfdemu"), args...)}
	c.cmd.Env, c.cmd.Dir = m.environment(), m.w.root
	log, err := os.Create(filepath.Join(m.dir, name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	c.cmd.Stderr = log
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	m.running = append(m.running, c)
	return c, nil
}

// hear returns the next line it says.
func (c *child) hear() (string, error) {
	says, err := c.out.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("%v said nothing: %w", c.cmd.Args, err)
	}
	return strings.TrimSpace(says), nil
}

// close ends what runs, the last first, and waits for it.
func (m *machine) close() (err error) {
	for _, c := range slices.Backward(m.running) {
		_, _ = io.WriteString(c.in, "stop\n") // what has ended reads nothing
		_ = c.in.Close()
		if strings.Contains(strings.Join(c.cmd.Args, " "), "gpreemptd serve") {
			_ = c.cmd.Process.Signal(syscall.SIGTERM)
		}
		_, _ = io.Copy(io.Discard, c.out)
		if ended := c.cmd.Wait(); ended != nil {
			err = errors.Join(err, fmt.Errorf("%v: %w", c.cmd.Args, ended))
		}
	}
	return err
}

// environment is that of commands on the machine.
func (m *machine) environment() []string {
	env := m.w.environment()
	for name, value := range m.vars {
		env = append(env, name+"="+value)
	}
	return env
}

// command returns a command on the machine.
func (m *machine) command(ctx context.Context, args ...string) *exec.Cmd {
	if m.socket != "" {
		args = append([]string{"kfdemu", "exec", "--socket", m.socket, "--"}, args...)
		args[0] = filepath.Join(m.w.root, "build", "kfdemu")
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env, cmd.Dir = m.environment(), m.w.root
	return cmd
}

// expand replaces {NAME} by the machine's variables.
func (m *machine) expand(pattern string) string {
	for name, value := range m.vars {
		pattern = strings.ReplaceAll(pattern, "{"+name+"}", value)
	}
	return pattern
}

// shell runs an interactive shell on a machine.
func (w *world) shell(ctx context.Context, name string) error {
	m, err := w.start(ctx, name)
	if err == nil {
		cmd := m.command(ctx, "sh", "-i")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		err = cmd.Run()
	}
	return errors.Join(err, m.close())
}

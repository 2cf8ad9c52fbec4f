// Command rows runs one command for each requirement of the design documents, R1 to R69, on emulated machines and real
// captures, judges what it prints, and prints a table. make rows builds what it needs. docs/design-documents.md says
// what the documents ask for and where the driver works otherwise.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "rows:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("rows", flag.ContinueOnError)
	captures := flags.String("captures", "../shared/captures", "`folder` of real dumps and logs; rows that read them are skipped without it")
	only := flags.String("only", "", "run only the rows whose name matches this `pattern`, such as 'R5|R4.', and those that they need")
	shell := flags.String("shell", "", "start this `machine` and a shell on it, in which the commands of its rows can be typed")
	flags.DurationVar(&retryTime, "retry", retryTime, "how long a row that waits for a state is tried again")
	out := flags.String("o", "build/rows.json", "`file` for the results as JSON, with all output")
	if err := flags.Parse(args); err != nil {
		return err
	}
	w, err := newWorld(ctx, *captures)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if *shell != "" {
		return w.shell(ctx, *shell)
	}
	pattern, err := regexp.Compile("^(" + *only + ")$")
	if err != nil {
		return err
	}
	selected := needed(table, func(r row) bool { return *only == "" || pattern.MatchString(r.id) })
	began := time.Now()
	var results []result
	var mu sync.Mutex // guards results and standard output
	var group sync.WaitGroup
	names := machinesOf(selected)
	next := make(chan string, len(names))
	for _, on := range names {
		next <- on
	}
	close(next)
	for range 2 { // most rows wait
		group.Go(func() {
			for on := range next {
				w.runOn(ctx, on, selected, func(r result) {
					mu.Lock()
					defer mu.Unlock()
					results = append(results, r)
					r.progress(os.Stdout)
				})
			}
		})
	}
	group.Wait()
	fmt.Fprintf(os.Stdout, "%.0f s\n", time.Since(began).Seconds())
	slices.SortFunc(results, func(a, b result) int { return a.number() - b.number() })
	if err := write(os.Stdout, *out, results); err != nil {
		return err
	}
	return errors.Join(ctx.Err(), failures(results))
}

// needed returns the rows that match, and those that they depend on, in the order of the table.
func needed(rows []row, match func(row) bool) (selected []row) {
	wanted := map[string]bool{}
	for _, r := range slices.Backward(rows) {
		if wanted[r.id] || match(r) {
			wanted[r.id], wanted[r.after] = true, true
		}
	}
	for _, r := range rows {
		if wanted[r.id] {
			selected = append(selected, r)
		}
	}
	return selected
}

// machinesOf returns the machines that rows run on, each once, first the one that takes longest.
func machinesOf(rows []row) (names []string) {
	for _, r := range rows {
		if slices.Contains(names, r.on) {
			continue
		}
		if names = append(names, r.on); r.on == "trial" {
			slices.Reverse(names)
		}
	}
	return names
}

// write prints the table and writes the results to a file.
func write(w io.Writer, file string, results []result) error {
	text, err := json.MarshalIndent(results, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		return err
	}
	if err := os.WriteFile(file, append(text, '\n'), 0o600); err != nil {
		return err
	}
	counts := map[verdict]int{}
	fmt.Fprintf(w, "\n%-4s %-8s %s\n", "ROW", "VERDICT", "WHAT IT ASKS FOR; THE COMMAND; WHY NOT WORKS")
	for _, r := range results {
		counts[r.Verdict]++
		fmt.Fprintf(w, "%-4s %-8s %s\n", r.Row, r.Verdict, r.Asks)
		for line := range strings.Lines(r.Command) {
			fmt.Fprintf(w, "              $ %s\n", strings.TrimSpace(line))
		}
		if r.Why != "" {
			fmt.Fprintf(w, "              %s\n", strings.ReplaceAll(r.Why, "\n", "\n              "))
		}
	}
	_, err = fmt.Fprintf(w, "\n%d of %d rows count: %d work, %d are refused with their reason; %d partly, %d skipped, %d failed. All machines are EMULATED. %s has all output.\n",
		counts[works]+counts[refused], len(results), counts[works], counts[refused], counts[partly], counts[skipped], counts[failed], file)
	return err
}

// failures names the rows that do not do what they did.
func failures(results []result) error {
	var names []string
	for _, r := range results {
		if r.Verdict == failed {
			names = append(names, r.Row)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("failed: %s", strings.Join(names, ", "))
}

// progress prints a row as it ends, with all output if it failed.
func (r result) progress(w io.Writer) {
	fmt.Fprintf(w, "%-4s %-8s %6.1f s  %s\n", r.Row, r.Verdict, r.Seconds, r.Asks)
	if r.Verdict == failed {
		fmt.Fprintf(w, "%s\n%s\n", r.Why, r.Output)
	}
}

// runOn starts a machine and runs its rows in their order.
func (w *world) runOn(ctx context.Context, on string, rows []row, ended func(result)) {
	m, reason := w.start(ctx, on)
	for _, r := range rows {
		if r.on != on {
			continue
		}
		got := result{Row: r.id, Asks: r.asks, Machine: on, Command: r.command}
		switch lacks := w.lacks(ctx, r.needs); {
		case lacks != "":
			got.Verdict, got.Why = skipped, lacks
		case errors.Is(reason, errCannotEmulate):
			got.Verdict, got.Why = skipped, reason.Error()
		case reason != nil:
			got.Verdict, got.Why = failed, reason.Error()
		default:
			got = m.try(ctx, r, got)
		}
		ended(got)
	}
	if err := m.close(); err != nil {
		fmt.Fprintf(os.Stderr, "machine %q: %v\n", on, err)
	}
}

// retryTime is how long a row that waits for a state is tried again.
var retryTime = time.Minute

// longest is how long a command may take.
const longest = 5 * time.Minute

// try runs the command of a row and checks what it printed; one that waits for a state is repeated.
func (m *machine) try(ctx context.Context, r row, got result) result {
	began := time.Now()
	for {
		got.Output = m.sh(ctx, r.command)
		got.Verdict, got.Why = judge(r, got.Output, m.expand)
		if got.Verdict != failed || !r.waits || ctx.Err() != nil || time.Since(began) > retryTime {
			got.Seconds = time.Since(began).Seconds()
			return got
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// sh runs a shell line on the machine and returns what it wrote, standard error included. How it ends is part of
// that: the rows judge text only.
func (m *machine) sh(ctx context.Context, line string) string {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	cmd := m.command(ctx, "sh", "-c", line)
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return fmt.Sprintf("%s\n%v\n", out, err)
	}
	return string(out)
}

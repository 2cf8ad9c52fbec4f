package e2e

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpreempt/gpreempt/internal/cli"
	"github.com/gpreempt/gpreempt/internal/config"
	daemonpkg "github.com/gpreempt/gpreempt/internal/daemon"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// docs is where the documents are, and operations the one whose words are all checked.
const (
	docs       = "../../docs"
	operations = docs + "/operate.md"
)

func readText(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

var (
	codeSpan = regexp.MustCompile("`([^`\n]+)`")
	codeLine = regexp.MustCompile(`(?m)^    (?:sudo )?(?:build/)?((?:gpctl|gplab|gpreemptd)\b.*)$`)
	// commandEnd is where the shell, or a comment, takes over.
	commandEnd = regexp.MustCompile(`\s*(?:[|;>&]|\s#).*$`)
)

// commandLines returns the lines of code in a document that call our programs.
func commandLines(document string) (lines []string) {
	for _, m := range codeLine.FindAllStringSubmatch(document, -1) {
		lines = append(lines, m[1])
	}
	return lines
}

// commands returns every call of our programs in a document, as words.
func commands(document string) [][]string {
	lines := commandLines(document)
	for _, m := range codeSpan.FindAllStringSubmatch(document, -1) {
		if program, _, _ := strings.Cut(m[1], " "); program == "gpctl" || program == "gplab" || program == "gpreemptd" {
			lines = append(lines, m[1])
		}
	}
	return inWords(lines)
}

// shellWord is a word, which spaces in quotes do not end.
var shellWord = regexp.MustCompile(`(?:'[^']*'|"[^"]*"|[^\s'"])+`)

// inWords splits commands, without those that repeat, and without what follows in the shell.
func inWords(lines []string) (all [][]string) {
	for _, line := range lines {
		words := shellWord.FindAllString(strings.TrimSuffix(commandEnd.ReplaceAllString(line, ""), `\`), -1)
		if len(words) > 1 && !slices.ContainsFunc(all, func(w []string) bool { return slices.Equal(w, words) }) {
			all = append(all, words)
		}
	}
	return all
}

// understood parses a command as its program does, and runs nothing.
func understood(words []string) error {
	if words[0] == "gplab" { // another module: its program says which commands and flags it has
		out, err := exec.Command(gplab, append(words[1:], "--help")...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	root := daemonpkg.Command()
	if words[0] == "gpctl" {
		root = cli.Program.New(term.IO{Out: io.Discard, Err: io.Discard, Getenv: func(string) string { return "" }})
	}
	cmd, rest, err := root.Find(words[1:])
	if err != nil {
		return err
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return err
	}
	operands := cmd.Flags().Args()
	if cmd.HasAvailableSubCommands() && len(operands) > 0 {
		return cobra.NoArgs(cmd, operands)
	}
	return cmd.ValidateArgs(operands)
}

// found returns what a pattern's first group finds.
func found(pattern, text string) (all []string) {
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// configKeys are those of the config file.
func configKeys() []string {
	keys := []string{"rules", "safety.hazards"}
	section := ""
	for line := range strings.Lines(string(config.DefaultYAML())) {
		m := regexp.MustCompile(`^( *)#?([a-z_]+):( ?)`).FindStringSubmatch(line)
		switch {
		case m == nil:
		case m[1] == "" && m[3] == "":
			section = m[2] + "."
		case m[1] == "":
			keys = append(keys, m[2])
		default:
			keys = append(keys, section+m[2])
		}
	}
	return keys
}

func TestDocumentsNameOnlyCommandsThatExist(t *testing.T) {
	files := []string{"../../README.md", "../../README.zh-CN.md", docs + "/zh-CN/quickstart.md"}
	for _, pattern := range []string{docs + "/*.md", docs + "/lab/*.md", examples + "/*/README.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	checked := 0
	for _, path := range files {
		for _, words := range inWords(commandLines(readText(t, path))) {
			checked++
			if err := understood(words); err != nil {
				t.Errorf("%s: %q: %v", path, strings.Join(words, " "), err)
			}
		}
	}
	if checked < 15 {
		t.Errorf("%d commands were found", checked)
	}
}

func TestRunbookNamesOnlyWhatExists(t *testing.T) {
	runbook := readText(t, operations)
	check := func(what string, known, named []string) {
		t.Helper()
		if len(named) == 0 {
			t.Errorf("%s names no %s", operations, what)
		}
		for _, name := range named {
			if !slices.Contains(known, name) {
				t.Errorf("%s is no %s", name, what)
			}
		}
	}
	keys := configKeys()
	sections := map[string]bool{}
	for _, key := range keys {
		section, _, _ := strings.Cut(key, ".")
		sections[section] = true
	}
	named := slices.DeleteFunc(found("`([a-z]+\\.[a-z_]+)[`:]", runbook), func(name string) bool {
		section, _, _ := strings.Cut(name, ".")
		return !sections[section]
	})
	check("key of the config file", keys, named)
	check("metric", found("`(gpreempt_[a-z_]+)`", readText(t, docs+"/reference/metrics.md")), found("`(gpreempt_[a-z_]+)", runbook))
	var codes []string
	for _, kind := range gpreempt.WarningKinds() {
		codes = append(codes, kind.Code)
	}
	codes = append(codes, found("(?m)^\\| `([A-Z_]+)`", readText(t, docs+"/reference/errors.md"))...)
	codes = append(codes, "GPREEMPT_SOCKET", "GPREEMPT_JOB")
	check("warning, reason or variable", codes, found("`([A-Z]+(?:_[A-Z]+)+)`", runbook))
	_, verdicts, _ := strings.Cut(runbook, "\n## Causes")
	verdicts, _, _ = strings.Cut(verdicts, "\n## ")
	rows := strings.Join(found(`(?m)^\| ([^|]*) \|`, verdicts), "\n")
	causes := found(`(?m)^\s*Cause\w+\s+Cause = "([a-z-]+)"`, readText(t, "../../pkg/scheduler/action.go"))
	for _, obstacle := range gpreempt.Obstacles() {
		causes = append(causes, string(obstacle))
	}
	check("cause", causes, found("`([a-z-]+)`", rows))
	for _, link := range found(`\]\(([^)#]+)(?:#[^)]*)?\)`, runbook) {
		if _, err := os.Stat(filepath.Join(docs, link)); err != nil {
			t.Errorf("a link leads nowhere: %v", err)
		}
	}
}

// elsewhere are commands that have tests of their own: what asks several daemons, what serves until it is stopped, what
// needs a host's tracefs, what is no client.
var elsewhere = [][]string{{"gpctl", "fleet"}, {"gpctl", "web"}, {"gplab", "trace", "kfd"}, {"gpreemptd"}}

// TestEveryCommandOfTheRunbookWorks runs them in their order, as somebody would who
// tries one after the other on simulated GPUs.
func TestEveryCommandOfTheRunbookWorks(t *testing.T) {
	d := start(t, atOnce)
	pid := d.startOffline()
	n := 0
	for _, words := range commands(readText(t, operations)) {
		if slices.ContainsFunc(elsewhere, func(begin []string) bool {
			return len(words) >= len(begin) && slices.Equal(words[:len(begin)], begin)
		}) || slices.Contains(words, "--hosts") || slices.Equal(words, []string{"gpctl", "top"}) { // without --once it needs a terminal
			continue
		}
		work := announcement()
		work.MaxWait = durationpb.New(time.Millisecond) // some of them let no GPU become quiet
		lease, err := d.online.NotifyOnline(t.Context(), work)
		if err != nil {
			t.Fatal(err)
		}
		args := strings.Fields(strings.NewReplacer(
			"PID", strconv.Itoa(int(pid)), "LEASE", lease.GetLeaseId(), "GPU", strconv.Itoa(int(d.target(pid).GetGpuIds()[0])),
			"NAME=VALUE", "share_floor=0.2", "--follow", "--all", // which ends
		).Replace(strings.Join(words[1:], " ")))
		program := gpctl
		if words[0] == "gplab" {
			program = gplab
		}
		if r := d.client(program, args...); r.Code != 0 {
			t.Errorf("%s %s: exit status %d: %s%s", words[0], strings.Join(args, " "), r.Code, r.Out, r.Err)
		} else {
			n++
		}
		d.complete(lease.GetLeaseId())
		if slices.Equal(words, []string{"gpctl", "policy", "set", "shadow"}) {
			d.check(0, "balanced", "policy", "set", "balanced") // as its undo does
		}
	}
	t.Logf("%d commands work", n)
	d.stopJob(pid)
}

package e2e

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// step is a command of a document, and what the document shows as its output.
type step struct{ command, output string }

// steps returns the commands of a document in their order, without comments.
func steps(document string) (all []step) {
	fence, shown := "", false
	for line := range strings.Lines(document) {
		line = strings.TrimSuffix(line, "\n")
		command, indented := strings.CutPrefix(line, "    ")
		switch {
		case strings.HasPrefix(line, "```"):
			if fence == "" {
				fence = line
			} else {
				fence, shown = "", false
			}
		case fence == "```" && shown:
			all[len(all)-1].output += line + "\n"
		case fence != "" || line == "":
		case indented:
			command, _, _ = strings.Cut(command, " #")
			all = append(all, step{command: strings.TrimSpace(command)})
			shown = true // what follows at once is its output
		default:
			shown = false
		}
	}
	return all
}

func TestStepsOfADocument(t *testing.T) {
	got := steps("# T\n\n    make x   # builds\n    y -a # b\n\n```\nout ...\n```\n\ntext\n\n```\nother\n```\n\n```python\n    code\n```\n\n    z\n\n```yaml\nk: v\n```\n")
	want := []step{{command: "make x"}, {command: "y -a", output: "out ...\n"}, {command: "z"}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(step{})); diff != "" {
		t.Error(diff)
	}
}

// notRun are the commands of README.md and the quick start that this test does not run, and why.
var notRun = map[string]string{
	"make demo":                      "it builds, and measures for half a minute: a step of make nightly; TestDemo... run the demo",
	"make clib":                      "the same Makefile builds the library of TestCLibrary...",
	"build/kfdemu demo --live":       "the machine on which the others run",
	"build/kfdemu demo --live --top": "TestDemoWithTopShowsItAndEndsWithIt",
	"export GPREEMPT_SOCKET":         "set for the machine",
	"pip install ./bindings/python":  "it needs a package registry; here PYTHONPATH has the package",
}

// TestEveryCommandForNewcomersWorks runs the commands in the mode they are shown in: those of
// the live demo beside it, on an emulated machine where there can be one.
func TestEveryCommandForNewcomersWorks(t *testing.T) {
	args := []string{"--live"}
	if cannotEmulate() != "" {
		args = append(args, "--sim")
	}
	demo, _ := liveDemo(t, args...)
	socket, pid := demo.await(socketLine), demo.await(`training job \(process (\d+)\)`)
	programs := filepath.Dir(kfdemuBinary)
	for _, path := range []string{"../../README.md", docs + "/quickstart.md"} {
		run := 0
		for _, s := range steps(readText(t, path)) {
			name, _, _ := strings.Cut(s.command, "=")
			if notRun[name] != "" {
				continue
			}
			run++
			t.Run(s.command, func(t *testing.T) {
				command := strings.NewReplacer("build/", programs+"/", "PID", pid).Replace(s.command)
				switch {
				case strings.Contains(command, "python3"):
					command = strings.ReplaceAll(command, "python3", python(t))
				case strings.HasPrefix(command, "gcc"), strings.HasSuffix(command, "/inference"):
					clib(t)
				}
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				defer cancel()
				cmd := exec.CommandContext(ctx, "sh", "-c", command)
				cmd.Dir = "../.."
				cmd.Env = environment("GPREEMPT_SOCKET="+socket, "PYTHONPATH=bindings/python", "PYTHONDONTWRITEBYTECODE=1")
				var out bytes.Buffer
				cmd.Stdout, cmd.Stderr = &out, &out
				_ = cmd.Run() // its exit status is compared
				good := []int{0}
				if strings.HasSuffix(command, "gpctl doctor") {
					good = []int{0, 7, 8} // what it found on this host
				}
				if code := cmd.ProcessState.ExitCode(); !slices.Contains(good, code) {
					t.Errorf("%s: exit status %d\n%s", s.command, code, out.String())
				}
				for line := range strings.Lines(s.output) {
					pattern := strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(line)), `\.\.\.`, `.*`)
					if !regexp.MustCompile(strings.ReplaceAll(pattern, " ", ` *`)).MatchString(out.String()) {
						t.Errorf("%s: no line like %q in\n%s", s.command, line, out.String())
					}
				}
			})
		}
		if run == 0 {
			t.Errorf("no command of %s was run", path)
		}
	}
	if err := demo.program.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	if code := demo.end(); code != 0 {
		t.Errorf("the demo ended with %d\n%s", code, &demo.shown)
	}
}

// python returns a Python that has protobuf.
func python(t *testing.T) string {
	t.Helper()
	for _, path := range []string{"/usr/bin/python3", "python3"} {
		if exec.CommandContext(t.Context(), path, "-c", "import google.protobuf").Run() == nil {
			return path
		}
	}
	t.Skip("no python3 with protobuf: the package python3-protobuf is missing")
	return ""
}

func TestCommandsThatAreNotRunAreInADocument(t *testing.T) {
	text := readText(t, "../../README.md") + readText(t, docs+"/quickstart.md")
	for command := range notRun {
		if !slices.ContainsFunc(steps(text), func(s step) bool { return strings.HasPrefix(s.command, command) }) {
			t.Errorf("%q is in no document any more", command)
		}
	}
}

func TestConfigFileOfREADMEIsGood(t *testing.T) {
	for _, path := range []string{"../../README.md", "../../README.zh-CN.md"} {
		_, rest, _ := strings.Cut(readText(t, path), "```yaml\n")
		text, _, found := strings.Cut(rest, "```\n")
		if !found {
			t.Fatalf("%s shows no config file", path)
		}
		file := filepath.Join(t.TempDir(), "gpreemptd.yaml")
		if err := os.WriteFile(file, []byte("access: {online_groups: [], admin_groups: []}\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), gpreemptd, "config", "check", "--config", file).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", path, err, out)
		}
	}
}

// The documents in Chinese have the commands, and the outputs, of those in English.
func TestTranslationsHaveTheSameCommands(t *testing.T) {
	for english, chinese := range map[string]string{
		"../../README.md": "../../README.zh-CN.md", docs + "/quickstart.md": docs + "/zh-CN/quickstart.md",
	} {
		want, got := steps(readText(t, english)), steps(readText(t, chinese))
		if len(want) == 0 {
			t.Errorf("%s has no command", english)
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(step{})); diff != "" {
			t.Errorf("%s (-want) and %s (+got) differ:\n%s", english, chinese, diff)
		}
	}
}

func TestDesignDocumentsHaveTheSameNamesInBothLanguages(t *testing.T) {
	names := func(path string) []string { return found("`([^`]+)`", readText(t, path)) }
	if diff := cmp.Diff(names(docs+"/design-documents.md"), names(docs+"/zh-CN/design-documents.md")); diff != "" {
		t.Errorf("names in the code font (-English +Chinese):\n%s", diff)
	}
}

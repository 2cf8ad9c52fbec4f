package arch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// mutateEnv has a pattern: the mutations whose row, file or tests match it are run.
const mutateEnv = "GPREEMPT_MUTATE"

// Each change of mutations.txt is made in an overlay, not in the tree. One that no named test
// notices is a survivor: the test is at fault.
func TestEachMutationIsKilledByATestOfItsRow(t *testing.T) {
	pattern := os.Getenv(mutateEnv)
	if pattern == "" {
		t.Skip("takes half an hour: make mutate")
	}
	only, err := regexp.Compile(pattern)
	if err != nil {
		t.Fatal(err)
	}
	root := "../.."
	all, err := loadMutations(os.DirFS(root), mutationsFile)
	if err != nil {
		t.Fatal(err)
	}
	chosen := slices.DeleteFunc(slices.Clone(all.all), func(m mutation) bool { return !only.MatchString(m.String()) })
	began := time.Now()
	r := runner{root: root, dir: t.TempDir(), limit: 2 * time.Minute}
	results := r.all(t.Context(), os.Stdout, chosen, runtime.NumCPU())
	if !report(os.Stdout, all, results, time.Since(began)) {
		t.Error("not every mutation was killed")
	}
}

// verdict is what became of a mutation.
type verdict string

const (
	killed   verdict = "killed"
	survived verdict = "survived"
	noName   verdict = "not by a test" // the run failed, but no named test did
	broken   verdict = "does not build"
	late     verdict = "timed out"
	failing  verdict = "fails without" // a named test fails without the change
	skipped  verdict = "skipped"       // all named tests skip here
)

var verdicts = []verdict{killed, survived, noName, broken, late, failing, skipped}

type outcome struct {
	mutation
	verdict verdict
	detail  string
	took    time.Duration
}

type runner struct {
	root, dir string
	limit     time.Duration // for the tests of one mutation
}

// bench is the mutations of one package whose tests are in one package: they share a test binary.
type bench struct {
	pkg       string // of the tests
	mutations []mutation
}

// all runs the tests of each bench, some benches at a time.
func (r runner) all(ctx context.Context, w io.Writer, mutations []mutation, jobs int) (results []outcome) {
	var benches []*bench
	at := map[[2]string]*bench{}
	for _, m := range mutations {
		key := [2]string{filepath.Dir(m.file), m.pkg()}
		if at[key] == nil {
			at[key] = &bench{pkg: m.pkg()}
			benches = append(benches, at[key])
		}
		at[key].mutations = append(at[key].mutations, m)
	}
	var mu sync.Mutex // of w and results
	var wg sync.WaitGroup
	next := make(chan int)
	for range jobs {
		wg.Go(func() {
			for i := range next {
				r.bench(ctx, benches[i], filepath.Join(r.dir, strconv.Itoa(i)), func(o outcome) {
					mu.Lock()
					defer mu.Unlock()
					results = append(results, o)
					fmt.Fprintf(w, "%3d/%d %-14s %5.1f s %s: %s\n", len(results), len(mutations), o.verdict, o.took.Seconds(), o.file, o.detail)
				})
			}
		})
	}
	for i := range benches {
		next <- i
	}
	close(next)
	wg.Wait()
	return results
}

var (
	ended   = regexp.MustCompile(`(?m)^--- (PASS|FAIL|SKIP): (\w+)`)
	running = regexp.MustCompile(`(?m)^=== (?:RUN|CONT) +(\w+)`)
)

// bench makes one binary with all mutations that can be in one, and runs it once without any and
// once with each. What is not killed by it is made again, in a binary of its own.
func (r runner) bench(ctx context.Context, b *bench, dir string, done func(outcome)) {
	binary, in, out := r.shared(ctx, b, dir)
	without := map[string]string{}
	if binary != "" {
		var names []string
		for _, m := range b.mutations {
			names = append(names, m.names()...)
		}
		out, _ = r.run(ctx, b.pkg, binary, names, "", 10*r.limit)
		for _, m := range ended.FindAllStringSubmatch(out, -1) {
			without[m[2]] = m[1]
		}
	}
	for i, m := range b.mutations {
		began := time.Now()
		o := outcome{mutation: m}
		skips := 0
		for _, name := range m.names() {
			switch without[name] {
			case "SKIP":
				skips++
			case "PASS":
			default:
				o.verdict, o.detail = failing, name+"\n"+lastLines(out)
			}
		}
		switch {
		case o.verdict == failing:
		case skips == len(m.tests):
			o.verdict, o.detail = skipped, strings.Join(m.names(), " ")
		default:
			o.verdict, o.detail = survived, ""
			if in[i] {
				o.verdict, o.detail = judge(r.run(ctx, b.pkg, binary, m.names(), strconv.Itoa(i), r.limit))
			}
			if o.verdict == survived {
				o.verdict, o.detail = r.alone(ctx, m, filepath.Join(dir, strconv.Itoa(i)))
			}
			if o.detail == "" {
				o.detail = strings.Join(m.names(), " ")
			}
		}
		o.took = time.Since(began)
		done(o)
	}
}

// alone makes one mutation in a binary of its own.
func (r runner) alone(ctx context.Context, m mutation, dir string) (verdict, string) {
	text, err := m.apply(os.DirFS(r.root))
	if err != nil {
		return broken, err.Error()
	}
	binary, out := r.build(ctx, m.pkg(), dir, map[string]string{m.file: text})
	if binary == "" {
		return broken, lastLines(out)
	}
	return judge(r.run(ctx, m.pkg(), binary, m.names(), "none", r.limit))
}

// shared builds the binary with all mutations that it can have: they are chosen by mutantEnv.
// in says which it has; out is the output of a build that failed.
func (r runner) shared(ctx context.Context, b *bench, dir string) (binary string, in map[int]bool, out string) {
	in = map[int]bool{}
	for i := range b.mutations {
		in[i] = true
	}
	for range 3 {
		files := schemata(os.DirFS(r.root), b.mutations, in)
		if binary, out = r.build(ctx, b.pkg, dir, files); binary != "" {
			return binary, in, out
		}
		bad := inMutant.FindAllStringSubmatch(out, -1)
		if len(bad) == 0 {
			clear(in)
		}
		for _, m := range bad { // alone it shows whether it builds
			i, _ := strconv.Atoi(m[1])
			delete(in, i)
		}
	}
	return binary, in, out
}

// build makes the test binary of a package in its module, with files in place of those of the tree.
func (r runner) build(ctx context.Context, pkg, dir string, files map[string]string) (binary, out string) {
	err := os.MkdirAll(dir, 0o700)
	replace := map[string]string{}
	for name, text := range files {
		changed := filepath.Join(dir, strings.ReplaceAll(name, "/", "_"))
		absolute, failed := filepath.Abs(filepath.Join(r.root, name))
		replace[absolute] = changed
		err = errors.Join(err, failed, os.WriteFile(changed, []byte(text), 0o600))
	}
	data, failed := json.Marshal(map[string]map[string]string{"Replace": replace})
	overlay := filepath.Join(dir, "overlay.json")
	if err = errors.Join(err, failed, os.WriteFile(overlay, data, 0o600)); err != nil {
		return "", err.Error()
	}
	binary = filepath.Join(dir, "test")
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay", overlay, "-o", binary, ".")
	cmd.Dir = filepath.Join(r.root, pkg)
	text, err := cmd.CombinedOutput()
	if err != nil {
		return "", string(text) + err.Error()
	}
	return binary, ""
}

// run runs tests of a binary: all of them without a mutant, else until one fails.
func (r runner) run(ctx context.Context, pkg, binary string, names []string, mutant string, limit time.Duration) (string, error) {
	// The process that hangs may be one that keeps the test itself from its end.
	ctx, cancel := context.WithTimeout(ctx, limit+time.Minute)
	defer cancel()
	// Subtests that wait for what never comes to pass do so at the same time.
	cmd := exec.CommandContext(ctx, binary, "-test.v", "-test.parallel=16", "-test.failfast="+strconv.FormatBool(mutant != ""), "-test.timeout", limit.String(), "-test.run", "^("+strings.Join(names, "|")+")$")
	cmd.Dir = filepath.Join(r.root, pkg)
	if usesRapid(cmd.Dir) { // what fails here is no finding to be kept in testdata
		cmd.Args = append(cmd.Args, "-rapid.nofailfile")
	}
	cmd.Env = append(os.Environ(), mutantEnv+"="+mutant)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	err := cmd.Run()
	return "\n" + out.String(), err
}

// judge returns what the run of the tests says about the mutation, and the tests that failed.
func judge(out string, err error) (verdict, string) {
	switch {
	case err == nil:
		return survived, ""
	case strings.Contains(out, "panic: test timed out"), strings.Contains(err.Error(), "signal: killed"):
		return late, ""
	}
	var by []string
	for _, m := range ended.FindAllStringSubmatch(out, -1) {
		if m[1] == "FAIL" {
			by = append(by, m[2])
		}
	}
	if len(by) == 0 && (strings.Contains(out, "\npanic: ") || strings.Contains(out, "\nfatal error: ")) {
		// A crash outside of the test's goroutine: of the test that was running.
		if last := running.FindAllStringSubmatch(out, -1); len(last) > 0 {
			by = append(by, last[len(last)-1][1])
		}
	}
	if len(by) == 0 {
		return noName, lastLines(out)
	}
	return killed, strings.Join(by, " ")
}

func usesRapid(dir string) bool {
	files, _ := filepath.Glob(filepath.Join(dir, "*_test.go")) // the pattern is valid
	return slices.ContainsFunc(files, func(file string) bool {
		text, err := os.ReadFile(file)
		return err == nil && bytes.Contains(text, []byte("\"pgregory.net/rapid\""))
	})
}

// lastLines returns the last lines of an output.
func lastLines(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	return strings.Join(lines[max(0, len(lines)-12):], "\n")
}

// report writes the table of the results.
func report(w io.Writer, all *mutations, results []outcome, took time.Duration) (ok bool) {
	count := map[verdict]int{}
	rows := map[string]bool{}
	for _, r := range results {
		count[r.verdict]++
		rows[r.row] = true
	}
	fmt.Fprintln(w)
	for _, v := range verdicts {
		if v == killed || count[v] == 0 {
			continue
		}
		for _, r := range results {
			if r.verdict == v {
				fmt.Fprintf(w, "%s: %s\n", v, r.mutation)
				if r.detail != "" {
					fmt.Fprintf(w, "\t%s\n", r.detail)
				}
			}
		}
	}
	fmt.Fprintf(w, "%-16s %6d\n%-16s %6d\n", "rows", len(rows), "mutations", len(results))
	for _, v := range verdicts {
		fmt.Fprintf(w, "%-16s %6d\n", v, count[v])
	}
	fmt.Fprintf(w, "%-16s %6d\n", "rows without", len(all.reasons))
	fmt.Fprintf(w, "%-16s %6.0f\n", "seconds", took.Seconds())
	return count[killed]+count[skipped] == len(results)
}

func TestRunnerTellsWhatBecomesOfAMutation(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module example.com/m\n\ngo 1.26\n",
		"a/a.go": "package a\n\nconst limit = 3\n\nfunc less(x int) bool {\n\treturn x < limit\n}\n\nfunc unused() int { return 1 }\n",
		"a/a_test.go": "package a\n\nimport \"testing\"\n\nfunc TestLess(t *testing.T) {\n\tif !less(2) || less(3) {\n\t\tt.Error(2)\n\t}\n}\n\n" +
			"func TestSkips(t *testing.T) { t.Skip() }\n\nfunc TestFails(t *testing.T) { t.Fail() }\n",
	} {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	r := runner{root: root, dir: t.TempDir(), limit: time.Minute}
	got := map[string]verdict{}
	for _, o := range r.all(t.Context(), io.Discard, []mutation{
		{row: "in a function", file: "a/a.go", was: "x < limit", is: "x <= limit", tests: []string{"a.TestLess"}},
		{row: "in no function", file: "a/a.go", was: "limit = 3", is: "limit = 4", tests: []string{"a.TestLess"}},
		{row: "of what no test calls", file: "a/a.go", was: "return 1", is: "return 2", tests: []string{"a.TestLess"}},
		{row: "no Go", file: "a/a.go", was: "return 1", is: "return y", tests: []string{"a.TestLess"}},
		{row: "a test that skips", file: "a/a.go", was: "return 1", is: "return 3", tests: []string{"a.TestSkips"}},
		{row: "a test that fails", file: "a/a.go", was: "return 1", is: "return 4", tests: []string{"a.TestFails"}},
	}, 2) {
		got[o.row] = o.verdict
	}
	want := map[string]verdict{
		"in a function": killed, "in no function": killed, "of what no test calls": survived,
		"no Go": broken, "a test that skips": skipped, "a test that fails": failing,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("verdicts (-want +got):\n%s", diff)
	}
}

func TestOutputOfARunIsAVerdict(t *testing.T) {
	failed := errors.New("exit status 1")
	for _, c := range []struct {
		out     string
		err     error
		verdict verdict
		by      string
	}{
		{"\n=== RUN   TestA\n--- PASS: TestA (0.00s)\nPASS\n", nil, survived, ""},
		{"\n--- FAIL: TestA (0.00s)\n    --- FAIL: TestA/b (0.00s)\n--- PASS: TestB (0.00s)\nFAIL\n", failed, killed, "TestA"},
		{"\n=== RUN   TestA\n--- PASS: TestA (0.00s)\n=== RUN   TestB\n=== RUN   TestB/c\npanic: x\n\ngoroutine 7\n", failed, killed, "TestB"},
		{"\n=== RUN   TestA\npanic: test timed out after 1s\n--- FAIL: TestA (1.00s)\n", failed, late, ""},
		{"\n=== RUN   TestA\n", errors.New("signal: killed"), late, ""},
		{"\n--- PASS: TestA (0.00s)\nPASS\nleaked goroutines\n", failed, noName, "--- PASS: TestA (0.00s)\nPASS\nleaked goroutines"},
	} {
		v, by := judge(c.out, c.err)
		if diff := cmp.Diff([]any{c.verdict, c.by}, []any{v, by}); diff != "" {
			t.Errorf("verdict on %q (-want +got):\n%s", c.out, diff)
		}
	}
}

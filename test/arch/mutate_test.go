package arch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
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

// all runs the tests without a change, and then each mutation, some at a time.
func (r runner) all(ctx context.Context, w io.Writer, mutations []mutation, jobs int) []outcome {
	without := r.without(ctx, w, mutations)
	results := make([]outcome, len(mutations))
	var mu sync.Mutex // of w and done
	done := 0
	var wg sync.WaitGroup
	next := make(chan int)
	for range jobs {
		wg.Go(func() {
			for i := range next {
				began := time.Now()
				res := r.one(ctx, mutations[i], i, without)
				res.took = time.Since(began)
				mu.Lock()
				results[i] = res
				done++
				fmt.Fprintf(w, "%3d/%d %-14s %5.1f s %s: %s\n", done, len(mutations), res.verdict, res.took.Seconds(), res.file, res.detail)
				mu.Unlock()
			}
		})
	}
	for i := range mutations {
		next <- i
	}
	close(next)
	wg.Wait()
	return results
}

// without returns PASS, SKIP, FAIL or nothing for each test of the mutations in the tree as it is.
func (r runner) without(ctx context.Context, w io.Writer, mutations []mutation) map[string]string {
	packages := map[string][]string{}
	for _, m := range mutations {
		for _, test := range m.tests {
			dir, name, _ := strings.Cut(test, ".")
			if !slices.Contains(packages[dir], name) {
				packages[dir] = append(packages[dir], name)
			}
		}
	}
	seen := map[string]string{}
	for _, dir := range slices.Sorted(maps.Keys(packages)) {
		began := time.Now()
		out, err := r.test(ctx, dir, packages[dir], "", 10*r.limit)
		for _, m := range ended.FindAllStringSubmatch(out, -1) {
			seen[dir+"."+m[2]] = m[1]
		}
		fmt.Fprintf(w, "without a change %5.1f s %s: %d tests\n", time.Since(began).Seconds(), dir, len(packages[dir]))
		if err != nil {
			fmt.Fprintf(w, "%s\n", lastLines(out))
		}
	}
	return seen
}

var ended = regexp.MustCompile(`(?m)^--- (PASS|FAIL|SKIP): (\w+)`)
var running = regexp.MustCompile(`(?m)^=== (?:RUN|CONT) +(\w+)`)

// one makes the change and runs its tests.
func (r runner) one(ctx context.Context, m mutation, number int, without map[string]string) outcome {
	res := outcome{mutation: m, verdict: survived}
	text, err := m.apply(os.DirFS(r.root))
	if err != nil {
		res.verdict, res.detail = broken, err.Error()
		return res
	}
	overlay, err := r.overlay(m.file, text, number)
	if err != nil {
		res.verdict, res.detail = broken, err.Error()
		return res
	}
	packages := map[string][]string{}
	skips := 0
	for _, test := range m.tests {
		dir, name, _ := strings.Cut(test, ".")
		switch without[test] {
		case "SKIP":
			skips++
		case "PASS":
			packages[dir] = append(packages[dir], name)
		default:
			res.verdict, res.detail = failing, test
			return res
		}
	}
	if skips == len(m.tests) {
		res.verdict, res.detail = skipped, strings.Join(m.tests, " ")
		return res
	}
	var by []string
	for _, dir := range slices.Sorted(maps.Keys(packages)) {
		v, names := judge(r.test(ctx, dir, packages[dir], overlay, r.limit))
		by = append(by, names...)
		if res.verdict == survived || v == broken {
			res.verdict = v
		}
	}
	if len(by) > 0 && res.verdict != broken {
		res.verdict = killed
	}
	res.detail = strings.Join(by, " ")
	return res
}

// judge returns what the run of the tests says about the mutation, and the tests that failed.
func judge(out string, err error) (verdict, []string) {
	switch {
	case err == nil:
		return survived, nil
	case strings.Contains(out, "[build failed]"), strings.Contains(out, "cannot be built"):
		return broken, []string{lastLines(out)}
	case strings.Contains(out, "panic: test timed out"), !strings.Contains(out, "\nFAIL"):
		return late, nil
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
		return noName, nil
	}
	return killed, by
}

// overlay writes the changed file, and what makes go build read it for the file of the tree.
func (r runner) overlay(file, text string, number int) (string, error) {
	absolute, err := filepath.Abs(filepath.Join(r.root, file))
	if err != nil {
		return "", err
	}
	changed := filepath.Join(r.dir, fmt.Sprintf("%d.go", number))
	if err := os.WriteFile(changed, []byte(text), 0o600); err != nil {
		return "", err
	}
	data, err := json.Marshal(map[string]map[string]string{"Replace": {absolute: changed}})
	if err != nil {
		return "", err
	}
	name := filepath.Join(r.dir, fmt.Sprintf("%d.json", number))
	return name, os.WriteFile(name, data, 0o600)
}

// test runs tests of one package, in the module that it belongs to. An overlay is in GOFLAGS,
// so that it holds for the programs which a test builds, too.
func (r runner) test(ctx context.Context, dir string, names []string, overlay string, limit time.Duration) (string, error) {
	// The process that hangs may be one that keeps the test itself from its end.
	ctx, cancel := context.WithTimeout(ctx, limit+2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "test", "-vet=off", "-ldflags=-s -w", "-v", "-timeout", limit.String(), "-run", "^("+strings.Join(names, "|")+")$", ".")
	cmd.Dir = filepath.Join(r.root, dir)
	cmd.Env = os.Environ()
	if overlay != "" {
		cmd.Env = append(cmd.Env, "GOFLAGS="+strings.TrimSpace(os.Getenv("GOFLAGS")+" -overlay="+overlay))
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	err := cmd.Run()
	return "\n" + out.String(), err
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

func TestOutputOfARunIsAVerdict(t *testing.T) {
	failed := errors.New("exit status 1")
	for _, c := range []struct {
		out     string
		err     error
		verdict verdict
		by      []string
	}{
		{"\n=== RUN   TestA\n--- PASS: TestA (0.00s)\nPASS\nok  \tx\t0.1s\n", nil, survived, nil},
		{"\n--- FAIL: TestA (0.00s)\n    --- FAIL: TestA/b (0.00s)\n--- PASS: TestB (0.00s)\nFAIL\nFAIL\tx\t0.1s\n", failed, killed, []string{"TestA"}},
		{"\n=== RUN   TestA\n--- PASS: TestA (0.00s)\n=== RUN   TestB\n=== RUN   TestB/c\npanic: x\n\ngoroutine 7\nFAIL\tx\t0.1s\n", failed, killed, []string{"TestB"}},
		{"\n=== RUN   TestA\npanic: test timed out after 1s\n--- FAIL: TestA (1.00s)\nFAIL\tx\t1.1s\n", failed, late, nil},
		{"\n=== RUN   TestA\n", failed, late, nil},
		{"\n--- PASS: TestA (0.00s)\nPASS\nleaked goroutines\nFAIL\tx\t0.1s\n", failed, noName, nil},
		{"\n# x\n./a.go:1: undefined: y\nFAIL\tx [build failed]\nFAIL\n", failed, broken, []string{"# x\n./a.go:1: undefined: y\nFAIL\tx [build failed]\nFAIL"}},
	} {
		v, by := judge(c.out, c.err)
		if diff := cmp.Diff([]any{c.verdict, c.by}, []any{v, by}); diff != "" {
			t.Errorf("verdict on %q (-want +got):\n%s", c.out, diff)
		}
	}
}

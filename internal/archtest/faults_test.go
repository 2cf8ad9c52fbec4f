package archtest

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// faultTable is the page that says what breaks and which test breaks it.
const faultTable = "docs/reliability.md"

var (
	anyTest    = regexp.MustCompile(`Test[A-Z]\w*`)
	namedTest  = regexp.MustCompile("`([a-z0-9/]+)\\.(Test[A-Z]\\w*)`")
	definition = regexp.MustCompile(`(?m)^func (Test\w+)\(\w+ \*testing\.T\)`)
)

func TestFaultTableNamesTestsThatExist(t *testing.T) {
	for _, problem := range checkFaults(os.DirFS("../..")) {
		t.Error(problem)
	}
}

// checkFaults tells which rows of the fault table name no test, and which tests of it
// there are not.
func checkFaults(root fs.FS) (problems []string) {
	text, err := fs.ReadFile(root, faultTable)
	if err != nil {
		return []string{err.Error()}
	}
	tests := map[string][]string{} // by package
	rows := 0
	for n, line := range strings.Split(string(text), "\n") {
		named := namedTest.FindAllStringSubmatch(line, -1)
		if len(named) != len(anyTest.FindAllString(line, -1)) {
			problems = append(problems, fmt.Sprintf("%s:%d: write a test as `package.TestName`", faultTable, n+1))
		}
		row := strings.Count(line, "|") == 6 && !strings.HasPrefix(line, "| fault ") && !strings.HasPrefix(line, "|---")
		if row {
			rows++
		}
		if row && len(named) == 0 {
			problems = append(problems, fmt.Sprintf("%s:%d: no test shows this", faultTable, n+1))
		}
		for _, name := range named {
			dir, test := name[1], name[2]
			if _, known := tests[dir]; !known {
				tests[dir] = testsOf(root, dir)
			}
			if !slices.Contains(tests[dir], test) {
				problems = append(problems, fmt.Sprintf("%s:%d: %s has no test %s", faultTable, n+1, dir, test))
			}
		}
	}
	if rows == 0 {
		problems = append(problems, faultTable+" has no rows of five columns")
	}
	return problems
}

// testsOf lists the tests of a package, those of every build tag.
func testsOf(root fs.FS, dir string) (names []string) {
	files, err := fs.Glob(root, path.Join(dir, "*_test.go"))
	if err != nil {
		return nil
	}
	for _, file := range files {
		text, err := fs.ReadFile(root, file)
		if err != nil {
			continue
		}
		for _, m := range definition.FindAllSubmatch(text, -1) {
			names = append(names, string(m[1]))
		}
	}
	return names
}

func TestMistakesInTheFaultTableAreFound(t *testing.T) {
	page := func(row string) fs.FS {
		return fstest.MapFS{
			faultTable:      {Data: []byte("# R\n| fault | promise | test | seen | tried on |\n|---|---|---|---|---|\n" + row + "\n")},
			"a/b_test.go":   {Data: []byte("package a\n\nfunc TestOne(t *testing.T) {\n}\n")},
			"a/c_test.go":   {Data: []byte("//go:build hw\n\nfunc TestTwo(t *testing.T) {\n}\n\nfunc TestHelper(t *testing.T, x int) {\n}\n")},
			"a/code.go":     {Data: []byte("package a\n\nfunc TestThree(t *testing.T) {\n}\n")},
			"b/other.go":    {Data: []byte("package b\n")},
			"unrelated.txt": {Data: []byte("TestFour")},
		}
	}
	for row, want := range map[string][]string{
		"| f | p | `a.TestOne`, `a.TestTwo` | s | real |": nil,
		"| f | p | nothing | s | real |":                  {faultTable + ":4: no test shows this"},
		"| f | p | TestOne | s | real |":                  {faultTable + ":4: write a test as `package.TestName`", faultTable + ":4: no test shows this"},
		"| f | p | `a.TestThree` | s | real |":            {faultTable + ":4: a has no test TestThree"},
		"| f | p | `a.TestHelper` | s | real |":           {faultTable + ":4: a has no test TestHelper"},
		"| f | p | `b.TestOne` | s | real |":              {faultTable + ":4: b has no test TestOne"},
		"nothing at all":                                  {faultTable + " has no rows of five columns"},
	} {
		if diff := cmp.Diff(want, checkFaults(page(row))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", row, diff)
		}
	}
}

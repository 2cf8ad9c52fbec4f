package arch

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const mutationsFile = "test/arch/testdata/mutations.txt"

// mutations is mutations.txt:
//
//	== docs/reliability.md
//	= the first words of a row
//	pkg/x/y.go TestA TestB internal/z.TestC
//	- text that y.go contains once
//	+ text in its place
//
// A test without a package is in that of the file. The text of several lines is joined by
// newlines; `+` alone removes it. A row may have several changes, or instead of all one line
// `none: REASON`.
type mutations struct {
	rows    []promise
	all     []mutation
	reasons map[string]string // by the row's key
}

// mutation is one change of the product. Its tests are names with the directory of their
// package, such as pkg/x.TestA.
type mutation struct {
	row, file, was, is string
	tests              []string
}

func (m mutation) String() string {
	return fmt.Sprintf("%s: %s: %q -> %q (%s)", m.row, m.file, m.was, m.is, strings.Join(m.tests, " "))
}

// pkg returns the package of its tests, names their names.
func (m mutation) pkg() string {
	dir, _, _ := strings.Cut(m.tests[0], ".")
	return dir
}

func (m mutation) names() (names []string) {
	for _, test := range m.tests {
		_, name, _ := strings.Cut(test, ".")
		names = append(names, name)
	}
	return names
}

// promise is a row of a document with the tests that it names, with their package or without.
type promise struct {
	document, text string
	tests          []string
}

// loadMutations reads the table, and the rows of the documents that it names.
func loadMutations(root fs.FS, name string) (*mutations, error) {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return nil, err
	}
	t := &mutations{reasons: map[string]string{}}
	var document, key string
	var m *mutation
	for i, line := range strings.Split(strings.TrimSuffix(string(text), "\n"), "\n") {
		switch sign, rest, _ := strings.Cut(line, " "); {
		case line == "" || sign == "#":
		case sign == "==":
			document, key, m = rest, "", nil
			rows, err := rowsOf(root, document)
			if err != nil {
				return nil, err
			}
			t.rows = append(t.rows, rows...)
		case sign == "=":
			key, m = document+": "+rest, nil
		case sign == "none:":
			t.reasons[key] = rest
		case sign == "-" && m != nil:
			m.was = joinLines(m.was, rest)
		case sign == "+" && m != nil:
			m.is = joinLines(m.is, rest)
		case key != "" && strings.Contains(sign, "/"):
			t.all = append(t.all, mutation{row: key, file: sign})
			m = &t.all[len(t.all)-1]
			for test := range strings.FieldsSeq(rest) {
				if !strings.Contains(test, ".") {
					test = path.Dir(sign) + "." + test
				}
				m.tests = append(m.tests, test)
			}
		default:
			return nil, fmt.Errorf("%s:%d: unexpected line %q", name, i+1, line)
		}
	}
	return t, nil
}

func joinLines(text, line string) string {
	if text == "" {
		return line
	}
	return text + "\n" + line
}

// apply returns the file's text with the change.
func (m mutation) apply(root fs.FS) (string, error) {
	text, err := fs.ReadFile(root, m.file)
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(text), m.was); m.was == "" || n != 1 {
		return "", fmt.Errorf("%s contains %q %d times, not once", m.file, m.was, n)
	}
	return strings.Replace(string(text), m.was, m.is, 1), nil
}

var testName = regexp.MustCompile(`(?:[a-z0-9_/]+\.)?\b(?:Test|Fuzz)[A-Z0-9]\w*`)

// rowsOf returns the rows of the tables of a document that have a column of tests.
func rowsOf(root fs.FS, document string) (rows []promise, err error) {
	text, err := fs.ReadFile(root, document)
	if err != nil {
		return nil, err
	}
	var promises bool
	lines := strings.Split(string(text), "\n")
	for i, line := range lines {
		switch {
		case !strings.HasPrefix(line, "| "):
		case strings.HasPrefix(lines[i+1], "|---"):
			promises = strings.Contains(line, "| test |") || strings.Contains(line, "| shown by |")
		case promises:
			rows = append(rows, promise{document, strings.TrimPrefix(line, "| "), testName.FindAllString(line, -1)})
		}
	}
	return rows, nil
}

// names returns whether the row names the test. Those of other modules have a target of make.
func (r promise) names(test string) bool {
	if strings.HasPrefix(test, "deploy/kubernetes/") {
		return strings.Contains(r.text, "`make kubernetes-test`")
	}
	_, short, _ := strings.Cut(test, ".")
	for _, named := range r.tests {
		if named == test || named == short {
			return true
		}
	}
	return false
}

// find returns the rows of the documents that the key stands for: it should be one.
func (t *mutations) find(key string) (found []promise) {
	document, words, _ := strings.Cut(key, ": ")
	for _, r := range t.rows {
		if r.document == document && strings.HasPrefix(r.text, words) {
			found = append(found, r)
		}
	}
	return found
}

// The mutations are run by make mutate; here they are only held to the tree as it is.
func TestEachRowHasAMutationThatStillApplies(t *testing.T) {
	problems, err := checkMutations(os.DirFS("../.."))
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Error(problem)
	}
}

// checkMutations returns a line for each row without a mutation, and for each mutation whose text, row
// or test is not there once.
func checkMutations(root fs.FS) (problems []string, err error) {
	t, err := loadMutations(root, mutationsFile)
	if err != nil {
		return nil, err
	}
	have := map[string]bool{}
	for key := range t.reasons {
		found := t.find(key)
		if len(found) != 1 {
			problems = append(problems, key+": not the beginning of one row")
			continue
		}
		have[found[0].text] = true
	}
	for _, m := range t.all {
		found := t.find(m.row)
		if len(found) != 1 {
			problems = append(problems, m.row+": not the beginning of one row")
			continue
		}
		have[found[0].text] = true
		if _, err := m.apply(root); err != nil {
			problems = append(problems, m.row+": "+err.Error())
		}
		if len(m.tests) == 0 {
			problems = append(problems, m.row+": "+m.file+" has no test")
			continue
		}
		for _, test := range m.tests {
			if !strings.HasPrefix(test, m.pkg()+".") {
				problems = append(problems, m.row+": "+test+" is not in the package of the first test")
			}
			if !found[0].names(test) {
				problems = append(problems, m.row+": the row does not name "+test)
			}
			if !hasTest(root, test) {
				problems = append(problems, m.row+": no test "+test)
			}
		}
	}
	for _, r := range t.rows {
		if !have[r.text] {
			problems = append(problems, r.document+": "+r.text[:min(len(r.text), 60)]+": no mutation")
		}
	}
	return problems, nil
}

// hasTest returns whether a package has the test.
func hasTest(root fs.FS, test string) bool {
	dir, name, _ := strings.Cut(test, ".")
	files, err := fs.Glob(root, path.Join(dir, "*_test.go"))
	if err != nil {
		return false
	}
	for _, file := range files {
		text, err := fs.ReadFile(root, file)
		if err == nil && strings.Contains(string(text), "\nfunc "+name+"(") {
			return true
		}
	}
	return false
}

func TestStaleMutationsAreFound(t *testing.T) {
	root := fstest.MapFS{
		"docs/a.md": {Data: []byte("| asset | what |\n|---|---|\n| none | `TestA` |\n\n" +
			"| fault | test |\n|---|---|\n| one | `a.TestA`, `TestB/sub` |\n| two | `TestA` |\n| three | |\n| three times | |\n| four | |\n")},
		"a/a.go":      {Data: []byte("package a\n\nvar x = 1 + 1\n")},
		"a/a_test.go": {Data: []byte("package a\n\nfunc TestA(t *testing.T) {}\n\nfunc TestB(t *testing.T) {}\n")},
		mutationsFile: {Data: []byte("# A comment.\n== docs/a.md\n= one\na/a.go b.TestB a.TestA\n- x = 1 +\n+ x = 2 +\na/a.go a.TestB\n- 1\n+ 2\n" +
			"= two\na/a.go\n- var x\n+ var y\n= three\nnone: no reason\n= none\na/b.go TestA\n- x\n+ y\n= three times\nnone: a reason\n")},
	}
	want := []string{
		"docs/a.md: three: not the beginning of one row",
		"docs/a.md: one: no test b.TestB",
		"docs/a.md: one: a.TestA is not in the package of the first test",
		`docs/a.md: one: a/a.go contains "1" 2 times, not once`,
		"docs/a.md: two: a/a.go has no test",
		"docs/a.md: none: not the beginning of one row",
		"docs/a.md: three | |: no mutation",
		"docs/a.md: four | |: no mutation",
	}
	got, err := checkMutations(root)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

package arch

import (
	"fmt"
	"go/ast"
	"io/fs"
	"os"
	"regexp"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// documents promise something and name the tests that show it.
var documents = []string{
	"docs/reliability.md",
	"docs/threat-model.md",
}

// namedTest is the name of a test in a document, with its package or without.
var namedTest = regexp.MustCompile("`((?:[a-z0-9_/]+\\.)?(?:Test|Fuzz|Benchmark)[A-Z0-9][A-Za-z0-9_]*)`")

func TestDocumentsNameTestsThatExist(t *testing.T) {
	root := os.DirFS("../..")
	module, err := load(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range checkDocuments(module, root, documents) {
		t.Error(problem)
	}
}

// checkDocuments returns a line for each test a document names and the tree has
// not, and for each document that names none.
func checkDocuments(t *tree, root fs.FS, documents []string) (problems []string) {
	tests := t.tests()
	for _, document := range documents {
		text, err := fs.ReadFile(root, document)
		if err != nil {
			problems = append(problems, err.Error())
			continue
		}
		named := namedTest.FindAllSubmatch(text, -1)
		if len(named) == 0 {
			problems = append(problems, document+" names no test: write their names as `TestName`")
		}
		for _, m := range named {
			if name := string(m[1]); !tests[name] {
				problems = append(problems, fmt.Sprintf("%s names %s, which is not a test: name the one that holds it now", document, name))
			}
		}
	}
	return problems
}

// tests returns the names of all functions in test files, without and with the package.
func (t *tree) tests() map[string]bool {
	names := map[string]bool{}
	for _, p := range t.packages {
		for _, f := range p.files {
			if !f.test {
				continue
			}
			for _, decl := range f.syntax.Decls {
				if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil {
					names[fn.Name.Name] = true
					names[p.dir+"."+fn.Name.Name] = true
				}
			}
		}
	}
	return names
}

func TestDocumentThatNamesALostTestIsFound(t *testing.T) {
	root := fstest.MapFS{
		"go.mod":      {Data: []byte("module example.com/m\n")},
		"a_test.go":   {Data: []byte("package m\nfunc TestThere() {}\nfunc (x) TestMethod() {}\ntype x int\n")},
		"a.go":        {Data: []byte("package m\nfunc TestNotInATestFile() {}\n")},
		"b/b_test.go": {Data: []byte("package b\nfunc TestB() {}\n")},
		"good.md":     {Data: []byte("| `TestThere`, `TestB`, `b.TestB` | and FuzzNothing, which is not marked |")},
		"bad.md":      {Data: []byte("`TestGone` `FuzzGone` `TestMethod` `TestNotInATestFile` `TestThere` `b.TestThere`")},
		"none.md":     {Data: []byte("nothing")},
	}
	module, err := load(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"bad.md names TestGone, which is not a test: name the one that holds it now",
		"bad.md names FuzzGone, which is not a test: name the one that holds it now",
		"bad.md names TestMethod, which is not a test: name the one that holds it now",
		"bad.md names TestNotInATestFile, which is not a test: name the one that holds it now",
		"bad.md names b.TestThere, which is not a test: name the one that holds it now",
		"none.md names no test: write their names as `TestName`",
	}
	if diff := cmp.Diff(want, checkDocuments(module, root, []string{"good.md", "bad.md", "none.md"})); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

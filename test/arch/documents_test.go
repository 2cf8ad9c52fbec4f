package arch

import (
	"fmt"
	"go/ast"
	"io/fs"
	"os"
	"path"
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

// indexed are the documents that README.md has to link, or their folder.
var indexed = []string{"docs/*.md", "docs/*/*.md"}

func TestIndexHasEveryDocumentAndLinksLead(t *testing.T) {
	for _, problem := range checkIndex(os.DirFS("../.."), "README.md", indexed) {
		t.Error(problem)
	}
}

// target is what a link of a document leads to, if that is a file.
var target = regexp.MustCompile(`\]\(([^)#:\s]+)(?:#[^)]*)?\)`)

// checkIndex returns a line for each document that the index does not link, and for each link
// of a document, of an example's README and of a file of the root that leads to no file.
func checkIndex(root fs.FS, index string, documents []string) (problems []string) {
	linked := map[string]bool{}
	found := func(patterns ...string) (names []string) {
		for _, pattern := range patterns {
			matches, err := fs.Glob(root, pattern)
			if err != nil {
				problems = append(problems, err.Error())
			}
			names = append(names, matches...)
		}
		return names
	}
	names := found(documents...)
	for _, name := range append(names, found("*.md", "examples/*/*.md", "bindings/*/*.md")...) {
		text, err := fs.ReadFile(root, name)
		if err != nil {
			problems = append(problems, err.Error())
		}
		for _, m := range target.FindAllSubmatch(text, -1) {
			to := path.Join(path.Dir(name), string(m[1]))
			if _, err := fs.Stat(root, to); err != nil {
				problems = append(problems, fmt.Sprintf("%s links %s: %v", name, m[1], err))
			}
			linked[to] = linked[to] || name == index
		}
	}
	for _, name := range names {
		if name != index && !linked[name] && !linked[path.Dir(name)] {
			problems = append(problems, fmt.Sprintf("%s has no line for %s", index, name))
		}
	}
	return problems
}

func TestDocumentMissingInTheIndexIsFound(t *testing.T) {
	root := fstest.MapFS{
		"README.md":     {Data: []byte("[a](docs/a.md#x) [decisions](docs/adr/) [web](https://example.org) [here](#a)")},
		"docs/a.md":     {Data: []byte("[b](b.md) [gone](gone.md) [b](../docs/b.md)")},
		"docs/b.md":     {Data: []byte("nothing")},
		"docs/adr/1.md": {Data: []byte("[up](../a.md)")},
		"docs/x/y.md":   {Data: []byte("nothing")},
	}
	want := []string{
		"docs/a.md links gone.md: open docs/gone.md: file does not exist",
		"README.md has no line for docs/b.md",
		"README.md has no line for docs/x/y.md",
	}
	if diff := cmp.Diff(want, checkIndex(root, "README.md", indexed)); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

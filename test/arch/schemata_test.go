package arch

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const (
	// mutantEnv chooses a mutation in a binary that has several.
	mutantEnv = "GPREEMPT_MUTANT"
	// mutantVar has its value in the package that is changed.
	mutantVar = "gpreemptMutant"
)

// inMutant finds the mutation in an error of the compiler.
var inMutant = regexp.MustCompile(`mutant(\d+)\.go:`)

// schemata returns the files of one package in which each function with mutations begins with a
// copy of itself for each of them, which runs in its place if that mutation is chosen. Those that
// are not in a function, or no longer apply, are removed from in.
func schemata(root fs.FS, mutations []mutation, in map[int]bool) map[string]string {
	copies := map[string]map[int]string{} // by file and offset of a body
	for i, m := range mutations {
		if !in[i] {
			continue
		}
		at, code := schema(root, m, i)
		if code == "" {
			delete(in, i)
			continue
		}
		if copies[m.file] == nil {
			copies[m.file] = map[int]string{}
		}
		copies[m.file][at] += code
	}
	files := map[string]string{}
	for file, bodies := range copies {
		data, err := fs.ReadFile(root, file)
		if err != nil {
			panic(err) // schema has read it
		}
		text := string(data)
		at := make([]int, 0, len(bodies))
		for offset := range bodies {
			at = append(at, offset)
		}
		slices.Sort(at)
		for _, offset := range slices.Backward(at) {
			line := 1 + strings.Count(text[:offset], "\n")
			text = text[:offset] + bodies[offset] + fmt.Sprintf("\n//line %s:%d\n", path.Base(file), line) + text[offset:]
		}
		files[file] = text
		files[path.Join(path.Dir(file), "gpreempt_mutant.go")] = fmt.Sprintf("package %s\n\nimport \"os\"\n\nvar %s = os.Getenv(%q)\n", packageOf(text), mutantVar, mutantEnv)
	}
	return files
}

func packageOf(text string) string {
	file, err := parser.ParseFile(token.NewFileSet(), "", text, parser.PackageClauseOnly)
	if err != nil {
		panic(err) // schema has parsed it
	}
	return file.Name.Name
}

// schema returns the code of a mutation, and where the body begins to which it belongs; "" if it is
// in no body.
func schema(root fs.FS, m mutation, number int) (at int, code string) {
	data, err := fs.ReadFile(root, m.file)
	text := string(data)
	if _, stale := m.apply(root); err != nil || stale != nil {
		return 0, ""
	}
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "", text, parser.SkipObjectResolution)
	if err != nil {
		return 0, ""
	}
	from := strings.Index(text, m.was)
	for _, decl := range file.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if !ok || fn.Body == nil {
			continue
		}
		begin, end := fset.Position(fn.Body.Lbrace).Offset+1, fset.Position(fn.Body.Rbrace).Offset
		if from < begin || from+len(m.was) > end {
			continue
		}
		body := text[begin:from] + m.is + text[from+len(m.was):end]
		if fn.Type.Results == nil {
			body += "\nreturn\n"
		}
		return begin, fmt.Sprintf("\n//line mutant%d.go:1\nif %s == \"%d\" {%s}\n", number, mutantVar, number, body)
	}
	return 0, ""
}

func TestSchemataHaveEachMutationOfAFunction(t *testing.T) {
	const text = "package a\n\nconst limit = 1\n\nfunc f(x int) int {\n\treturn x + limit\n}\n\nfunc g() { f(2) }\n"
	root := fstest.MapFS{"a/a.go": {Data: []byte(text)}}
	in := map[int]bool{0: true, 1: true, 2: true, 3: true, 4: true}
	got := schemata(root, []mutation{
		{file: "a/a.go", was: "x + limit", is: "x - limit"},
		{file: "a/a.go", was: "limit = 1", is: "limit = 2"},
		{file: "a/a.go", was: "f(2)", is: "f(3)"},
		{file: "a/a.go", was: "gone", is: "f(3)"},
		{file: "a/a.go", was: "x + limit", is: "x"},
	}, in)
	want := map[string]string{
		"a/a.go": "package a\n\nconst limit = 1\n\nfunc f(x int) int {" +
			"\n//line mutant0.go:1\nif gpreemptMutant == \"0\" {\n\treturn x - limit\n}\n" +
			"\n//line mutant4.go:1\nif gpreemptMutant == \"4\" {\n\treturn x\n}\n" +
			"\n//line a.go:5\n\n\treturn x + limit\n}\n\nfunc g() {" +
			"\n//line mutant2.go:1\nif gpreemptMutant == \"2\" { f(3) \nreturn\n}\n" +
			"\n//line a.go:9\n f(2) }\n",
		"a/gpreempt_mutant.go": "package a\n\nimport \"os\"\n\nvar gpreemptMutant = os.Getenv(\"GPREEMPT_MUTANT\")\n",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[int]bool{0: true, 2: true, 4: true}, in); diff != "" {
		t.Errorf("in (-want +got):\n%s", diff)
	}
}

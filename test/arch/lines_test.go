package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// oneLine are the functions of internal/term that make a line of what they get: what would break it becomes a
// question mark, for foreign text. The program's own texts of several lines are for Printer.Lines.
var oneLine = []string{"Linef", "Line", "Row", "Printable"}

// brokenLines returns the calls of a function for one line with a constant of several lines.
func brokenLines(files []*ast.File, fset *token.FileSet) (found []string) {
	several := map[string]bool{} // constants and variables
	long := func(e ast.Expr) bool {
		switch e := e.(type) {
		case *ast.BasicLit:
			text, err := strconv.Unquote(e.Value)
			return err == nil && strings.Contains(strings.TrimSuffix(text, "\n"), "\n")
		case *ast.Ident:
			return several[e.Name]
		}
		return false
	}
	for _, file := range files {
		for _, d := range file.Decls {
			if g, ok := d.(*ast.GenDecl); ok {
				for _, spec := range g.Specs {
					if v, ok := spec.(*ast.ValueSpec); ok {
						for i, value := range v.Values {
							several[v.Names[i].Name] = several[v.Names[i].Name] || long(value)
						}
					}
				}
			}
		}
	}
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			name := ""
			switch f := call.Fun.(type) {
			case *ast.SelectorExpr:
				name = f.Sel.Name
			case *ast.Ident:
				name = f.Name
			}
			if slices.Contains(oneLine, name) && slices.ContainsFunc(call.Args, long) {
				found = append(found, fset.Position(call.Pos()).String())
			}
			return true
		})
	}
	return found
}

func TestOwnTextsOfSeveralLinesAreNotFilteredAsForeignOnes(t *testing.T) {
	for _, dir := range []string{"internal/cli", "internal/term", "lab/cli", "accept/cmd/gpaccept"} {
		names, err := fs.Glob(os.DirFS("../.."), dir+"/*.go")
		if err != nil || len(names) == 0 {
			t.Fatal(dir, err)
		}
		fset := token.NewFileSet()
		var files []*ast.File
		for _, name := range names {
			file, err := parser.ParseFile(fset, "../../"+name, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasSuffix(name, "_test.go") {
				files = append(files, file)
			}
		}
		for _, place := range brokenLines(files, fset) {
			t.Errorf("%s: a text of several lines becomes one line with question marks: use Printer.Lines", place)
		}
	}
}

func TestBrokenLinesAreFound(t *testing.T) {
	const source = "package m\nconst keys = `a\nb`\nconst one = \"a\"\nfunc f(p P) { p.Linef(\"%s\", keys); p.Lines(keys); p.Linef(one); term.Printable(\"a\\nb\") }\n"
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "m.go", source, 0)
	if err != nil {
		t.Fatal(err)
	}
	if found := brokenLines([]*ast.File{file}, fset); len(found) != 2 {
		t.Errorf("found %q, want the first and the last call", found)
	}
}

package log

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the table of docs/logs.md")

const (
	document = "../../docs/logs.md"
	head     = "| key | type | meaning |\n|---|---|---|\n"
)

// types are the types of zap's fields in the document.
var types = map[string]string{
	"String": "text", "Stringer": "text", "ByteString": "text", "Any": "text", "Error": "text", "Bool": "true or false",
	"Int": "number", "Int32": "number", "Int64": "number", "Uint32": "number", "Uint64": "number", "Duration": "duration", "Time": "time",
}

// TestDocumentOfTheKeys generates the table from the source: each function returns one
// expression, a field with its own key.
func TestDocumentOfTheKeys(t *testing.T) {
	source, err := parser.ParseFile(token.NewFileSet(), "fields.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	table.WriteString(head)
	known := map[string]bool{}
	for _, d := range source.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Name.Name == "Subject" {
			continue
		}
		made := f.Body.List[0].(*ast.ReturnStmt).Results[0].(*ast.CallExpr)
		kind, key := made.Fun.(*ast.SelectorExpr).Sel.Name, "error"
		if lit, ok := made.Args[0].(*ast.BasicLit); ok {
			if key, err = strconv.Unquote(lit.Value); err != nil {
				t.Fatal(err)
			}
		}
		about, ok := strings.CutPrefix(f.Doc.Text(), f.Name.Name+" ")
		if !ok || types[kind] == "" || known[key] {
			t.Errorf("%s, of key %q and type %s: comment, type or key", f.Name.Name, key, kind)
		}
		known[key] = true
		mark := ""
		if Subject(key) {
			mark = " *"
		}
		meaning, _, _ := strings.Cut(strings.ReplaceAll(about, "\n", " "), ". ")
		meaning = strings.TrimPrefix(strings.TrimPrefix(meaning, "is "), "reports ")
		fmt.Fprintf(&table, "| `%s`%s | %s | %s |\n", key, mark, types[kind], strings.ReplaceAll(meaning, "|", `\|`))
	}
	for _, key := range subjects {
		if !known[key] {
			t.Errorf("subject %q is not a key", key)
		}
	}
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	before, after, _ := strings.Cut(string(text), head)
	if *update {
		if err := os.WriteFile(document, []byte(before+table.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(head+after, table.String()); diff != "" {
		t.Errorf("%s (-want +got); go test ./internal/log -update writes it:\n%s", document, diff)
	}
}

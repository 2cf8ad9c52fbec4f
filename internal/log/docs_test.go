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

// TestDocumentOfTheKeys generates the table from the source: each field has its own key, and
// a comment with its meaning.
func TestDocumentOfTheKeys(t *testing.T) {
	source, err := parser.ParseFile(token.NewFileSet(), "fields.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	table.WriteString(head)
	known := map[string]bool{}
	ast.Inspect(source, func(n ast.Node) bool {
		f, ok := n.(*ast.ValueSpec)
		if !ok || f.Names[0].Name == "subjects" {
			return true
		}
		kind, key := "Error", "error"
		if made, ok := f.Values[0].(*ast.CallExpr); ok {
			kind = "Stringer"
			if len(made.Args) == 2 {
				kind = made.Args[1].(*ast.SelectorExpr).Sel.Name
			}
			if key, err = strconv.Unquote(made.Args[0].(*ast.BasicLit).Value); err != nil {
				t.Fatal(err)
			}
		}
		meaning := strings.TrimSpace(f.Comment.Text())
		if meaning == "" || types[kind] == "" || known[key] {
			t.Errorf("%s, of key %q and type %s: comment, type or key", f.Names[0].Name, key, kind)
		}
		known[key] = true
		mark := ""
		if Subject(key) {
			mark = " *"
		}
		fmt.Fprintf(&table, "| `%s`%s | %s | %s |\n", key, mark, types[kind], strings.ReplaceAll(meaning, "|", `\|`))
		return true
	})
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

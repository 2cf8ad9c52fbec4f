package scenario

import (
	"flag"
	"fmt"
	"go/ast"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write docs/reference/scenarios.md")

// TestReferenceOfScenariosIsFresh compares docs/reference/scenarios.md with the comments of the
// format's types, the library and the models.
func TestReferenceOfScenariosIsFresh(t *testing.T) {
	const page = "../../docs/reference/scenarios.md"
	want := reference(t)
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("docs/reference/scenarios.md is not what the package says: run make gen (-want +got):\n%s", diff)
	}
}

// reference returns the page.
func reference(t *testing.T) string {
	var b strings.Builder
	b.WriteString("# Reference of scenarios\n\nGenerated from internal/scenario by `make gen`. " +
		"A scenario is a YAML file; times have a unit, such as `200us`, `1.5ms` or `1h`. [The simulator](../lab/simulator.md#scenarios) has an example.\n")
	for _, s := range structs(t) {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n| key | meaning |\n|---|---|\n", s.name, s.about)
		for _, f := range s.fields {
			fmt.Fprintf(&b, "| `%s` | %s |\n", f[0], f[1])
		}
	}
	b.WriteString("\n## Kinds of arrivals\n\n| kind | keys |\n|---|---|\n")
	for _, kind := range kinds {
		fmt.Fprintf(&b, "| `%s` | `%s` |\n", kind, strings.Join(uses[ArrivalKind(kind)], "`, `"))
	}
	b.WriteString("\n## The library\n\nFigures that a source does not have are marked *assumed* in the file. No figure was measured with gpreempt.\n\n" +
		"| name | shows | source |\n|---|---|---|\n")
	for _, s := range Library() {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", s.Name, s.About, s.Source)
	}
	b.WriteString("\n## Models\n\nOne request with batch 1 on an MI50 (SJTU-IPADS/reef at 58dabe0). With `model`, `total` and `kernels` scale it.\n\n" +
		"| model | kernels | total | mean | p50 | p90 | max |\n|---|---|---|---|---|---|---|\n")
	for _, name := range Models() {
		w := models[name]
		fmt.Fprintf(&b, "| `%s` | %d | %v | %v | %v | %v | %v |\n", name, w.Kernels, w.Total, w.Mean, w.P50, w.P90, w.Max)
	}
	return b.String()
}

// structure is a type of the format. A field is its key and its comment.
type structure struct {
	name, about string
	fields      [][2]string
}

// structs returns the types of scenario.go that have keys, with the comments of both. Names of
// fields in them become keys.
func structs(t *testing.T) (all []structure) {
	file, err := parser.ParseFile(token.NewFileSet(), "scenario.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	keys := map[string]string{}
	for _, decl := range file.Decls {
		types, ok := decl.(*ast.GenDecl)
		if !ok || types.Tok != token.TYPE {
			continue
		}
		spec := types.Specs[0].(*ast.TypeSpec)
		body, ok := spec.Type.(*ast.StructType)
		if !ok {
			continue
		}
		s := structure{name: spec.Name.Name, about: sentence(types.Doc)}
		for _, f := range body.Fields.List {
			tag, err := strconv.Unquote(f.Tag.Value)
			if err != nil {
				t.Fatal(err)
			}
			key, _, _ := strings.Cut(reflect.StructTag(tag).Get("yaml"), ",")
			if key == "-" {
				continue
			}
			keys[f.Names[0].Name] = key
			if f.Doc == nil {
				t.Errorf("%s.%s has no comment", s.name, f.Names[0].Name)
				continue
			}
			s.fields = append(s.fields, [2]string{key, sentence(f.Doc)})
		}
		all = append(all, s)
	}
	word := regexp.MustCompile(`\b[A-Z]\w*`)
	for i := range all {
		named := func(text string) string {
			return word.ReplaceAllStringFunc(text, func(w string) string {
				if key, ok := keys[w]; ok && w != all[i].name {
					return "`" + key + "`"
				}
				return w
			})
		}
		all[i].about = named(all[i].about)
		for j := range all[i].fields {
			all[i].fields[j][1] = named(all[i].fields[j][1])
		}
	}
	return all
}

// sentence returns a comment as one line.
func sentence(g *ast.CommentGroup) string {
	var p comment.Parser
	text := (&comment.Printer{TextWidth: -1}).Text(p.Parse(g.Text()))
	return strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", " ")
}

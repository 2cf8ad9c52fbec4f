package arch

import (
	"go/ast"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// TestEveryWarningIsOfTheTable holds that warnings are made from the table of
// pkg/gpreempt and in no other way, and that each of its rows is used.
func TestEveryWarningIsOfTheTable(t *testing.T) {
	module, err := loadModule()
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	declared := map[string]string{} // variable -> code
	for _, p := range module.packages {
		for _, f := range p.files {
			if f.test {
				continue
			}
			ast.Inspect(f.syntax, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.ValueSpec:
					if name := n.Names[0].Name; strings.HasPrefix(name, "Warn") && p.dir == "pkg/gpreempt" {
						declared[name] = strings.Trim(n.Values[0].(*ast.CallExpr).Args[0].(*ast.BasicLit).Value, `"`)
					}
				case *ast.SelectorExpr:
					if pkg, ok := n.X.(*ast.Ident); ok && pkg.Name == "gpreempt" && strings.HasPrefix(n.Sel.Name, "Warn") {
						used[n.Sel.Name] = true
					}
				case *ast.CompositeLit:
					if typ, ok := n.Type.(*ast.SelectorExpr); ok && typ.Sel.Name == "Warning" && len(n.Elts) > 0 {
						if pkg, ok := typ.X.(*ast.Ident); ok && pkg.Name == "gpreempt" {
							t.Errorf("%s makes a gpreempt.Warning by hand: use the Warn method of a kind", f.name)
						}
					}
				}
				return true
			})
		}
	}
	var codes, table []string
	for name, code := range declared {
		codes = append(codes, code)
		if !used[name] {
			t.Errorf("no code uses %s, %s: take it out of the table", name, code)
		}
	}
	for _, k := range gpreempt.WarningKinds() {
		table = append(table, k.Code)
		if k.Means == "" || k.Remedy == "" || k.Severity != gpreempt.SeverityError && k.Severity != gpreempt.SeverityWarning {
			t.Errorf("the row of %s is not complete", k.Code)
		}
	}
	slices.Sort(codes)
	slices.Sort(table)
	if diff := cmp.Diff(codes, table); diff != "" {
		t.Errorf("codes that are declared, and those of the table (-declared +table):\n%s", diff)
	}
}

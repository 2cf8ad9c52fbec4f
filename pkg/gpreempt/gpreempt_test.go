package gpreempt

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"
)

func TestClassesAreReadAsTheyAreWritten(t *testing.T) {
	for _, c := range []Class{Unmanaged, Online, Offline} {
		for _, text := range []string{c.String(), strings.ToUpper(c.String())} {
			if got, err := ParseClass(text); err != nil || got != c {
				t.Errorf("ParseClass(%q) = %v, %v", text, got, err)
			}
		}
	}
	if _, err := ParseClass("batch"); err == nil || !strings.Contains(err.Error(), "online, offline, unmanaged") {
		t.Errorf("an unknown class gives %v, which does not name the known ones", err)
	}
}

func TestNothingIsPreemptibleByDefault(t *testing.T) {
	var c Class
	if c != Unmanaged {
		t.Errorf("the zero class is %v", c)
	}
}

func FuzzParseProcessKey(f *testing.F) {
	for _, seed := range []string{"1", "4211@8839012", "2147483647@18446744073709551615", "", "@", "0", "-1@2", "1@", "1@x", "4294967297", "1@2@3"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		k, err := ParseProcessKey(text)
		if err != nil {
			if k != (ProcessKey{}) {
				t.Errorf("%q gives both %v and %v", text, k, err)
			}
			return
		}
		if k.PID <= 0 {
			t.Errorf("%q gives pid %d", text, k.PID)
		}
		if again, err := ParseProcessKey(k.String()); err != nil || again != k {
			t.Errorf("%q gives %v, which reads back as %v, %v", text, k, again, err)
		}
	})
}

func TestProcessKeysAreOrderedByPIDThenStart(t *testing.T) {
	ordered := []ProcessKey{{1, 5}, {1, 6}, {2, 1}, {10, 0}}
	for i, a := range ordered {
		for j, b := range ordered {
			want := min(max(i-j, -1), 1)
			if got := a.Compare(b); got != want {
				t.Errorf("%v compares to %v as %d, want %d", a, b, got, want)
			}
		}
	}
}

func TestErrorsMatchByReasonThroughWrapping(t *testing.T) {
	err := fmt.Errorf("announce: %w", &Error{Code: CodeNotFound, Reason: ReasonUnknownLease, Message: "no such lease", Next: "announce again"})
	if !errors.Is(err, &Error{Reason: ReasonUnknownLease}) || errors.Is(err, &Error{Reason: ReasonUnknownGPU}) {
		t.Error("errors.Is does not go by reason")
	}
	if got := ReasonOf(err); got != ReasonUnknownLease {
		t.Errorf("ReasonOf gives %q", got)
	}
	if got := ReasonOf(errors.New("other")); got != "" {
		t.Errorf("ReasonOf another error gives %q", got)
	}
	if got, want := err.Error(), "announce: no such lease: announce again"; got != want {
		t.Errorf("the text is %q, want %q", got, want)
	}
}

// reasons returns every Reason constant of this package, from its source.
func reasons(t *testing.T) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "errors.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if typ, ok := spec.Type.(*ast.Ident); !ok || typ.Name != "Reason" {
			return true
		}
		value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, value)
		return true
	})
	return all
}

func TestEveryReasonIsInTheAPIDocument(t *testing.T) {
	doc, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	all := reasons(t)
	if len(all) < 20 {
		t.Fatalf("found only %d reasons in errors.go", len(all))
	}
	for _, r := range all {
		if !strings.Contains(string(doc), "\n| `"+r+"` |") {
			t.Errorf("docs/api.md has no row for %s", r)
		}
	}
}

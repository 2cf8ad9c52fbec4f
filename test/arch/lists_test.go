package arch

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/doc"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// list is a part of a document that is made from the tree: what stands between the comments
// "<!-- name: make gen -->" and "<!-- end of name -->".
type list struct {
	document, name string
	make           func(root fs.FS) (string, error)
}

var lists = []list{
	{"docs/architecture.md", "programs", listOfPrograms},
	{"docs/architecture.md", "mechanisms", listOfMechanisms},
	{"docs/architecture.md", "promises", listOfPromises},
	{"docs/reference/packages.md", "packages", listOfPackages},
}

func TestListsOfTheDocuments(t *testing.T) {
	root := os.DirFS("../..")
	for _, l := range lists {
		t.Run(l.name, func(t *testing.T) {
			text, err := l.make(root)
			if err != nil {
				t.Fatal(err)
			}
			got, err := fs.ReadFile(root, l.document)
			if err != nil {
				t.Fatal(err)
			}
			want, err := between(string(got), l.name, text)
			if err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := os.WriteFile("../../"+l.document, []byte(want), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(want, string(got)); diff != "" {
				t.Errorf("%s is stale: run make gen (-want +got):\n%s", l.document, diff)
			}
		})
	}
}

// between returns the document with text in the part of that name.
func between(document, name, text string) (string, error) {
	begin, end := "<!-- "+name+": make gen -->\n", "<!-- end of "+name+" -->"
	head, rest, began := strings.Cut(document, begin)
	_, tail, ended := strings.Cut(rest, end)
	if !began || !ended {
		return "", fmt.Errorf("no part between %q and %q", begin, end)
	}
	return head + begin + "\n" + text + "\n" + end + tail, nil
}

// packageDoc returns the documentation of the package in dir.
func packageDoc(root fs.FS, dir string) (*comment.Doc, error) {
	names, err := fs.Glob(root, path.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		source, err := fs.ReadFile(root, name)
		if err != nil {
			return nil, err
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, source, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			return nil, err
		}
		if f.Doc != nil && !ast.IsGenerated(f) {
			return new(comment.Parser).Parse(f.Doc.Text()), nil
		}
	}
	return nil, fmt.Errorf("%s has no package comment", dir)
}

// sentence returns what the package comment says in its first sentence, without the words
// "Package name" and "Command name" before it.
func sentence(root fs.FS, dir string) (string, error) {
	d, err := packageDoc(root, dir)
	if err != nil {
		return "", err
	}
	text := new(doc.Package).Synopsis(string(new(comment.Printer).Text(d)))
	for _, prefix := range []string{"Package ", "Command "} {
		if rest, ok := strings.CutPrefix(text, prefix); ok {
			_, text, _ = strings.Cut(rest, " ")
		}
	}
	return strings.ReplaceAll(text, "|", `\|`), nil
}

// sentences returns a table with a row for each directory.
func sentences(root fs.FS, head string, dirs []string, name func(dir string) string) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "| %s | |\n|---|---|\n", head)
	for _, dir := range dirs {
		text, err := sentence(root, dir)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "| `%s` | %s |\n", name(dir), text)
	}
	return b.String(), nil
}

// listOfPrograms has the commands, those in modules of their own too.
func listOfPrograms(root fs.FS) (string, error) {
	var dirs []string
	for _, pattern := range []string{"cmd/*/main.go", "*/cmd/*/main.go", "deploy/kubernetes/*/main.go", "deploy/kubernetes/csi/*/main.go"} {
		names, err := fs.Glob(root, pattern)
		if err != nil {
			return "", err
		}
		for _, name := range names {
			dirs = append(dirs, path.Dir(name))
		}
	}
	if len(dirs) == 0 {
		return "", errors.New("no program was found")
	}
	return sentences(root, "program", dirs, func(dir string) string {
		return dir
	})
}

// listOfMechanisms has the packages below internal/mechanism; helper runs others.
func listOfMechanisms(root fs.FS) (string, error) {
	var dirs []string
	for _, entry := range table {
		if strings.HasPrefix(entry.pkg, "internal/mechanism/") && path.Base(entry.pkg) != "helper" {
			dirs = append(dirs, entry.pkg)
		}
	}
	return sentences(root, "mechanism", dirs, path.Base)
}

// listOfPromises is the numbered list of the package comment of the scheduler.
func listOfPromises(root fs.FS) (string, error) {
	d, err := packageDoc(root, "pkg/scheduler")
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(d.Content, func(b comment.Block) bool { _, ok := b.(*comment.List); return ok })
	if i < 0 {
		return "", errors.New("the package comment of pkg/scheduler has no list of promises")
	}
	text := new(comment.Printer).Markdown(&comment.Doc{Content: d.Content[i : i+1]})
	return string(bytes.TrimLeft(text, "\n")), nil
}

// listOfPackages is the import table, with what each package may do.
func listOfPackages(root fs.FS) (string, error) {
	var b strings.Builder
	b.WriteString("| package | | may use |\n|---|---|---|\n")
	for _, entry := range table {
		if entry.pkg == apiV1 {
			continue
		}
		text, err := sentence(root, entry.pkg)
		if err != nil {
			return "", err
		}
		var may []string
		for _, m := range []struct {
			is   bool
			text string
		}{
			{entry.pure, "nothing outside its arguments"},
			{entry.stdOnly, "the standard library only"},
			{entry.kernel, "system calls"},
			{entry.unsafe, "unsafe"},
		} {
			if m.is {
				may = append(may, m.text)
			}
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", entry.pkg, text, strings.Join(may, ", "))
	}
	return b.String(), nil
}

func TestListOfADocumentIsReplaced(t *testing.T) {
	const document = "a\n<!-- x: make gen -->\nold\n<!-- end of x -->\nb\n"
	got, err := between(document, "x", "new\n")
	if want := "a\n<!-- x: make gen -->\n\nnew\n\n<!-- end of x -->\nb\n"; got != want || err != nil {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	if _, err := between(document, "y", "new\n"); err == nil {
		t.Error("a document without the part is accepted")
	}
}

func TestSentenceIsTheFirstOfThePackageComment(t *testing.T) {
	root := fstest.MapFS{
		"a/a.go":      {Data: []byte("package a\n")},
		"a/b.go":      {Data: []byte("// Package a reads a|b: the\n// first. It is more.\npackage a\n")},
		"cmd/c/c.go":  {Data: []byte("// Command c shows.\npackage main\n")},
		"none/n.go":   {Data: []byte("package none\n")},
		"mine/doc.go": {Data: []byte("// Gpreempt-csi is a driver.\npackage main\n")},
	}
	var got []string
	for _, dir := range []string{"a", "cmd/c", "mine"} {
		text, err := sentence(root, dir)
		if err != nil {
			t.Error(err)
		}
		got = append(got, text)
	}
	if diff := cmp.Diff([]string{`reads a\|b: the first.`, "shows.", "Gpreempt-csi is a driver."}, got); diff != "" {
		t.Errorf("sentences (-want +got):\n%s", diff)
	}
	if _, err := sentence(root, "none"); err == nil {
		t.Error("a package without a comment is accepted")
	}
}

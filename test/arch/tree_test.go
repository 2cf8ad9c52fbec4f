package arch

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// parts are the nested modules that belong to the tree: they are held to the table, too.
var parts = []string{"lab"}

// tree is the Go source of one module and of its parts. It is read file by file and not asked
// from the go command, so that the test cache sees what the result depends on
// and a package that does not compile is still checked.
type tree struct {
	module string
	// packages by directory, slash-separated, below the root.
	packages map[string]*pkg
	// loggers is what loggerNames gives, once it has.
	loggers map[string]bool
}

// pkg is the source of one directory.
type pkg struct {
	dir   string
	files []file
}

// file is one Go file, parsed.
type file struct {
	name string // its path below the root
	test bool
	// imports by path; the value is the name the file uses, "" for the default.
	imports map[string]string
	syntax  *ast.File
	fset    *token.FileSet
}

// loadModule returns the tree of this module, which no test changes.
var loadModule = sync.OnceValues(func() (*tree, error) { return load(os.DirFS("../..")) })

// load reads every Go file below root that belongs to its module or to one of parts.
func load(root fs.FS) (*tree, error) {
	t := &tree{packages: map[string]*pkg{}}
	var err error
	if t.module, err = modulePath(root); err != nil {
		return nil, err
	}
	fset := token.NewFileSet()
	err = fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return enter(root, name)
		}
		if path.Ext(name) != ".go" {
			return nil
		}
		f, err := parse(root, fset, name)
		if err != nil {
			return err
		}
		dir := path.Dir(name)
		if t.packages[dir] == nil {
			t.packages[dir] = &pkg{dir: dir}
		}
		t.packages[dir].files = append(t.packages[dir].files, f)
		return nil
	})
	return t, err
}

// enter returns fs.SkipDir for the directories the go command leaves out too:
// hidden ones, testdata, and other modules than parts.
func enter(root fs.FS, dir string) error {
	if dir == "." {
		return nil
	}
	base := path.Base(dir)
	if base == "testdata" || base == "vendor" || strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") {
		return fs.SkipDir
	}
	if _, err := fs.Stat(root, path.Join(dir, "go.mod")); err == nil && !slices.Contains(parts, dir) {
		return fs.SkipDir
	}
	return nil
}

func parse(root fs.FS, fset *token.FileSet, name string) (file, error) {
	source, err := fs.ReadFile(root, name)
	if err != nil {
		return file{}, err
	}
	syntax, err := parser.ParseFile(fset, name, source, parser.SkipObjectResolution)
	if err != nil {
		return file{}, err
	}
	f := file{
		name:    name,
		test:    strings.HasSuffix(name, "_test.go"),
		imports: map[string]string{},
		syntax:  syntax,
		fset:    fset,
	}
	for _, spec := range syntax.Imports {
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return file{}, fmt.Errorf("%s: import %s: %w", name, spec.Path.Value, err)
		}
		f.imports[imported] = ""
		if spec.Name != nil {
			f.imports[imported] = spec.Name.Name
		}
	}
	return f, nil
}

func modulePath(root fs.FS) (string, error) {
	f, err := root.Open("go.mod")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if module, ok := strings.CutPrefix(s.Text(), "module "); ok {
			return strings.TrimSpace(module), nil
		}
	}
	return "", fmt.Errorf("go.mod has no module line")
}

// own returns the directory of an import of this module's.
func (t *tree) own(imported string) (dir string, ok bool) {
	return strings.CutPrefix(imported, t.module+"/")
}

// dirs returns the directories with Go files, sorted.
func (t *tree) dirs() []string {
	var dirs []string
	for dir := range t.packages {
		dirs = append(dirs, dir)
	}
	slices.Sort(dirs)
	return dirs
}

// code returns the files that are not tests.
func (p *pkg) code() []file {
	return slices.DeleteFunc(slices.Clone(p.files), func(f file) bool { return f.test })
}

// uses returns where the file uses any of the names of a package, as
// "file:line: package.Name".
func (f file) uses(imported string, names ...string) []string {
	local, ok := f.imports[imported]
	if !ok {
		return nil
	}
	if local == "" {
		local = path.Base(imported)
	}
	var found []string
	ast.Inspect(f.syntax, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && x.Name == local && slices.Contains(names, sel.Sel.Name) {
			found = append(found, fmt.Sprintf("%s: %s.%s", f.fset.Position(sel.Pos()), local, sel.Sel.Name))
		}
		return true
	})
	return found
}

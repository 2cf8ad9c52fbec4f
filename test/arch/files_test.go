package arch

import (
	"fmt"
	"go/ast"
	"slices"
	"strings"
)

// readers are the functions that open a path as it is. Of a path that a user chose they wait
// for the writer of a FIFO, and read a device or an endless file.
var readers = map[string][]string{"os": {"Open", "ReadFile", "DirFS"}, "crypto/tls": {"LoadX509KeyPair"}}

// ownPaths are the files that read paths which nobody outside the program chose, and whose
// paths are not constants; each with the path.
var ownPaths = map[string]string{
	"accept/report.go":                        "the directory that it has written to",
	"accept/pytorch.go":                       "the directory that the profiler has written to",
	"lab/cli/amdlog.go":                       "a log, which may come through a pipe to the user's own command",
	"internal/daemon/listen.go":               "the lock, whose directory is checked",
	"lab/evidence/files.go":                   "the directory that it has written to",
	"lab/kfdtrace/functions.go":               "kallsyms",
	"lab/kfdtrace/tracefs.go":                 "tracefs",
	"internal/mechanism/freezer/mount.go":     "procfs below the root of the host",
	"internal/mechanism/freezer/owncgroup.go": "procfs below the root of the host",
	"internal/mechanism/journal.go":           "the boot id",
	"internal/proc/proc.go":                   "procfs",
	"pkg/discovery/host.go":                   "the root of the host",
	"pkg/nvrm/sys.go":                         "devices",
}

// checkReaders finds paths that are not read by internal/regular. The programs of the product
// are checked; those that test it are not.
func checkReaders(t *tree) (problems []string) {
	used := map[string]bool{}
	for dir, p := range t.packages {
		if !within(dir, "accept") && !within(dir, "cmd") && !within(dir, "internal") && !within(dir, "lab") && !within(dir, "pkg") || within(dir, "internal/regular") ||
			within(dir, "internal/testutil") || within(dir, "accept/conformance") {
			continue
		}
		for _, f := range p.files {
			if f.test {
				continue
			}
			ast.Inspect(f.syntax, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || !f.reads(call) {
					return true
				}
				if used[f.name] = true; ownPaths[f.name] == "" {
					problems = append(problems, fmt.Sprintf("%s: read the path with internal/regular: it is not a constant, and a user may have chosen it",
						f.fset.Position(call.Pos())))
				}
				return true
			})
		}
	}
	for name := range ownPaths {
		if !used[name] && t.packages[name[:strings.LastIndexByte(name, '/')]] != nil {
			problems = append(problems, name+" is in ownPaths of test/arch/files_test.go and opens no such path: remove it")
		}
	}
	slices.Sort(problems)
	return problems
}

// reads reports whether a call opens a path, which is not a constant, by one of readers.
func (f file) reads(call *ast.CallExpr) bool {
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || len(call.Args) == 0 {
		return false
	}
	for from, functions := range readers {
		name, imported := f.imports[from]
		if name == "" {
			name = from[strings.LastIndexByte(from, '/')+1:]
		}
		if imported && isName(selector.X, name) && slices.Contains(functions, selector.Sel.Name) {
			path := call.Args[0]
			if inner, ok := path.(*ast.CallExpr); ok && len(inner.Args) > 0 {
				path = inner.Args[0] // the format of fmt.Sprintf
			}
			text, constant := literal(path)
			return !constant || !strings.HasPrefix(text, "/")
		}
	}
	return false
}

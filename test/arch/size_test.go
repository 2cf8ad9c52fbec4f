package arch

import (
	"bytes"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
)

const (
	// maxLines is the length of a file that still reads well as one.
	maxLines = 500
	// maxPackages bounds the packages of the module, generated and test kit included, without its parts.
	maxPackages = 57
)

// maxLinked bounds the lines by hand that a program links.
var maxLinked = map[string]int{"cmd/gpctl": 18_000}

func TestProgramsLinkFewLines(t *testing.T) {
	module, err := loadModule()
	if err != nil {
		t.Fatal(err)
	}
	for program, most := range maxLinked {
		lines := 0
		dirs, _ := module.linked(program)
		for _, dir := range dirs {
			if p := module.packages[dir]; p != nil && !generated(dir) {
				for _, f := range p.code() {
					lines += f.fset.File(f.syntax.FileStart).LineCount() - 1
				}
			}
		}
		if t.Logf("%s links %d lines", program, lines); lines > most {
			t.Errorf("%s links %d lines, more than %d", program, lines, most)
		}
	}
}

func TestNoFileIsTooLong(t *testing.T) {
	root := os.DirFS("../..")
	for _, name := range readable(t, root) {
		if !strings.HasSuffix(name, ".go") {
			continue
		}
		data, err := fs.ReadFile(root, name)
		if err != nil {
			t.Fatal(err)
		}
		if n := bytes.Count(data, []byte("\n")); n > maxLines {
			t.Errorf("%s has %d lines, more than %d: split it by meaning", name, n, maxLines)
		}
	}
}

func TestModuleHasFewPackages(t *testing.T) {
	module, err := loadModule()
	if err != nil {
		t.Fatal(err)
	}
	own := slices.DeleteFunc(module.dirs(), func(dir string) bool {
		return slices.ContainsFunc(parts, func(part string) bool { return within(dir, part) })
	})
	if n := len(own); n > maxPackages {
		t.Errorf("%d packages, more than %d: put what changes together into one", n, maxPackages)
	}
}

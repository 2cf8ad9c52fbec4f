package arch

import (
	"bytes"
	"io/fs"
	"os"
	"path"
	"strings"
	"testing"
)

const (
	// maxLines is the length of a file that still reads well as one.
	maxLines = 500
	// maxPackages bounds the packages of the product.
	maxPackages = 44
	// maxProduct bounds its lines, without tests and generated code; make count prints them.
	maxProduct = 55_000
	// maxWords and maxPages bound the documents that are written by hand, and those in docs.
	maxWords, maxPages = 45_000, 20
)

// maxLinked bounds the lines of this module that a program links, counted in the same way.
var maxLinked = map[string]int{"cmd/gpreemptd": 43_000, "cmd/gpctl": 15_000, "accept/cmd/gpaccept": 30_000}

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

func TestProductHasFewPackages(t *testing.T) {
	module, err := loadModule()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, dir := range module.dirs() {
		if purpose, _ := purposeOf(dir); purpose != kit && purpose != acceptance && purpose != lab && !generated(dir) {
			n++
		}
	}
	if n > maxPackages {
		t.Errorf("%d packages, more than %d: put what changes together into one", n, maxPackages)
	}
}

func TestProductAndProgramsStayWithinTheirLines(t *testing.T) {
	module, err := loadModule()
	if err != nil {
		t.Fatal(err)
	}
	lines := func(dir string) (n int) {
		if p := module.packages[dir]; p != nil && !generated(dir) {
			for _, f := range p.code() {
				n += f.fset.File(f.syntax.FileStart).LineCount()
			}
		}
		return n
	}
	product := 0
	for _, dir := range module.dirs() {
		if purpose, _ := purposeOf(dir); purpose != kit && purpose != acceptance && purpose != lab {
			product += lines(dir)
		}
	}
	if product > maxProduct {
		t.Errorf("the product has %d lines, more than %d", product, maxProduct)
	}
	for program, limit := range maxLinked {
		n := 0
		for dir := range linked(module, program) {
			n += lines(dir)
		}
		if n > limit {
			t.Errorf("%s links %d lines, more than %d", program, n, limit)
		}
	}
}

// byHand reports whether a file is a document that no program writes and that is no translation.
func byHand(name string) bool {
	switch {
	case path.Ext(name) != ".md", name == "CHANGELOG.md", path.Base(name) == "README.zh-CN.md":
		return false
	}
	return !within(name, "docs/reference") && !within(name, "docs/zh-CN")
}

func TestDocumentsAreShort(t *testing.T) {
	root := os.DirFS("../..")
	words, pages := 0, 0
	for _, name := range readable(t, root) {
		if !byHand(name) {
			continue
		}
		text, err := fs.ReadFile(root, name)
		if err != nil {
			t.Fatal(err)
		}
		words += len(strings.Fields(string(text)))
		if path.Dir(name) == "docs" {
			pages++
		}
	}
	if words > maxWords || pages > maxPages {
		t.Errorf("%d words by hand and %d pages in docs, more than %d or %d: a new page replaces an old one", words, pages, maxWords, maxPages)
	}
}

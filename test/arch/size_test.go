package arch

import (
	"bytes"
	"io/fs"
	"os"
	"strings"
	"testing"
)

const (
	// maxLines is the length of a file that still reads well as one.
	maxLines = 500
	// maxPackages bounds the packages of the product.
	maxPackages = 44
)

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
		if purpose, _ := purposeOf(dir); purpose != kit && purpose != acceptance && !generated(dir) {
			n++
		}
	}
	if n > maxPackages {
		t.Errorf("%d packages, more than %d: put what changes together into one", n, maxPackages)
	}
}

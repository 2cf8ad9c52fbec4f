package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// released makes the artifacts with stand-ins for the programs, and returns their folder and
// where they were staged.
func released(t *testing.T) (r release, dir, name string) {
	t.Helper()
	r = release{version: "v1.2.3", packages: "1.2.3", date: time.Unix(1e9, 0).UTC(), out: t.TempDir()}
	dir, name = t.TempDir(), "gpreempt-v1.2.3-linux-amd64"
	for _, program := range programs {
		if err := stage(filepath.Join(dir, name, program), []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.stage(dir); err != nil {
		t.Fatal(err)
	}
	return r, dir, name
}

// deadLinks returns each link to a file in the Markdown below dir that leads to none.
func deadLinks(t *testing.T, dir string) (dead []string, documents int) {
	t.Helper()
	target := regexp.MustCompile(`(?:\]\(|(?:src|href)=")([^)\s"#]+)`)
	files := tree(t, dir)
	for name, text := range files {
		if path.Ext(name) != ".md" {
			continue
		}
		documents++
		for _, m := range target.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], ":") {
				continue
			}
			if _, err := os.Stat(filepath.Join(dir, path.Dir(name), m[1])); err != nil {
				dead = append(dead, name+": "+m[1])
			}
		}
	}
	return dead, documents
}

// unpacked returns the folder into which the deb of a config is unpacked.
func unpacked(t *testing.T, r release, config string, s staged) (root string) {
	t.Helper()
	if err := r.pack(config, "deb", s); err != nil {
		t.Fatal(err)
	}
	root = t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "dpkg-deb", "-x", filepath.Join(r.out, r.made[0]), root).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return root
}

func TestDocumentsOfThePackageHaveNoDeadLink(t *testing.T) {
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("no dpkg-deb")
	}
	r, dir, name := released(t)
	root := unpacked(t, r, "gpreempt.yaml", staged{dir: dir, bin: filepath.Join(dir, name), arch: "amd64"})
	dead, documents := deadLinks(t, filepath.Join(root, "usr/share/doc/gpreempt"))
	if len(dead) > 0 || documents < 20 {
		t.Errorf("%d documents with dead links:\n%s", documents, strings.Join(dead, "\n"))
	}
	for unit, text := range tree(t, filepath.Join(root, "usr/lib/systemd/system")) {
		for _, m := range regexp.MustCompile(`(?m)^Documentation=file:(.*)$`).FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
				t.Errorf("%s: %v", unit, err)
			}
		}
	}
}

func TestArchiveHasUnitsConfigAndDocuments(t *testing.T) {
	r, dir, name := released(t)
	if err := r.archive(dir, name); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	packed, err := os.ReadFile(filepath.Join(r.out, name+".tar.gz"))
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	for files := tar.NewReader(z); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(files)
		if err != nil {
			t.Fatal(err)
		}
		if err := stage(filepath.Join(root, header.Name), text, header.FileInfo().Mode()); err != nil {
			t.Fatal(err)
		}
	}
	got := tree(t, filepath.Join(root, name))
	want := []string{"LICENSE", "gpreemptd.yaml", "man/man8/gpaccept.8.gz", "completions/bash/gpctl", "doc/README.md"}
	for _, unit := range units {
		want = append(want, "systemd/"+unit)
	}
	for _, file := range append(want, programs...) {
		if got[file] == "" {
			t.Errorf("no %s", file)
		}
	}
	if dead, _ := deadLinks(t, filepath.Join(root, name, "doc")); len(dead) > 0 {
		t.Errorf("dead links:\n%s", strings.Join(dead, "\n"))
	}
	check := exec.CommandContext(t.Context(), "sha256sum", "--quiet", "--strict", "-c", "SHA256SUMS")
	check.Dir = filepath.Join(root, name)
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("sha256sum: %v: %s", err, out)
	}
}

func TestLinksLeadToWhatIsInstalled(t *testing.T) {
	for _, tt := range []struct{ in, name, text, want string }{
		{in: "a page beside it", name: "docs/README.md", text: "[x](api.md#calls)", want: "[x](api.md#calls)"},
		{in: "a folder", name: "docs/README.md", text: "[`e`](../examples/c)", want: "[`e`](examples/c)"},
		{in: "from above", name: "CHANGELOG.md", text: "[x](docs/api.md)", want: "[x](api.md)"},
		{in: "from below", name: "examples/c/README.md", text: "[x](../../docs/api.md)", want: "[x](../../api.md)"},
		{in: "what is not installed", name: "docs/api.md", text: "a [b [c]](../internal/cli) d ![e](../go.mod)", want: "a b [c] d e"},
		{in: "other hosts, and itself", name: "docs/api.md", text: "[x](https://go.dev/a) [y](#b)", want: "[x](https://go.dev/a) [y](#b)"},
	} {
		if diff := cmp.Diff(tt.want, relink(tt.text, tt.name)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.in, diff)
		}
	}
}

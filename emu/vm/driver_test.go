package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// write creates files with their directories.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// read returns the content of a file.
func read(t *testing.T, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestUnchangedDriverIsNotBuiltAgain(t *testing.T) {
	cache, additions := t.TempDir(), t.TempDir()
	t.Setenv(CacheEnv, cache)
	t.Setenv("PATH", t.TempDir()) // no tool is needed
	write(t, additions, map[string]string{"a.c": "1", "Kbuild": "2"})
	sum, err := digest(additions, "")
	if err != nil {
		t.Fatal(err)
	}
	write(t, cache, map[string]string{"driver-6.12.1/amdgpu-" + sum + ".ko": "module"})
	k := Kernel{Release: "6.12.1"}
	if built, err := k.BuildDriver(t.Context(), additions, "", io.Discard); string(built) != "module" || err != nil {
		t.Errorf("%q, %v", built, err)
	}
	write(t, additions, map[string]string{"README.md": "not compiled"})
	if built, err := k.BuildDriver(t.Context(), additions, "", io.Discard); string(built) != "module" || err != nil {
		t.Errorf("with another document: %q, %v", built, err)
	}
	write(t, additions, map[string]string{"a.c": "3"})
	_, err = k.BuildDriver(t.Context(), additions, "", io.Discard)
	if missing, ok := errors.AsType[*MissingError](err); !ok || !strings.Contains(missing.Remedy, "apt-get install") {
		t.Errorf("with another source: %v", err)
	}
}

func TestDriverIsUnchangedButForTheAdditions(t *testing.T) {
	additions := t.TempDir()
	write(t, additions, map[string]string{"a.c": "int a;", "list": "a b", "Kbuild": "amdgpu-y += softgpu/a.o", "README.md": "text"})
	tree := driverTree{kernel: Kernel{Release: "6.12.1+deb12-amd64"}, dir: t.TempDir()}
	write(t, tree.dir, map[string]string{
		"usr/src/linux-headers-6.12.1+deb12-amd64/Makefile": "include /usr/src/linux-headers-6.12.1+deb12-common/Makefile\n",
		"drivers/gpu/drm/amd/amdgpu/Makefile":               "amdgpu-y := x.o",
	})
	if err := tree.prepare(tree.dir); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time, nothing has changed
		if err := tree.add(additions); err != nil {
			t.Fatal(err)
		}
	}
	amdgpu := tree.amdgpu()
	got := map[string]string{
		"headers": read(t, tree.dir, tree.headers(), "Makefile"), "Makefile": read(t, amdgpu, "Makefile"),
		"a.c": read(t, amdgpu, "softgpu", "a.c"), "list": read(t, amdgpu, "softgpu", "list"),
	}
	want := map[string]string{
		"headers":  "include " + tree.dir + "/usr/src/linux-headers-6.12.1+deb12-common/Makefile\n",
		"Makefile": "amdgpu-y := x.o\namdgpu-y += softgpu/a.o", "a.c": "int a;", "list": "a b",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	before, err := os.Stat(filepath.Join(amdgpu, "softgpu", "a.c"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, additions, map[string]string{"list": "a b c"})
	if err := tree.add(additions); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(filepath.Join(amdgpu, "softgpu", "a.c"))
	if err != nil {
		t.Fatal(err)
	}
	if !before.ModTime().Equal(after.ModTime()) || read(t, amdgpu, "softgpu", "list") != "a b c" {
		t.Error("a file that did not change was written, or one that changed was not")
	}
}

func TestBuildSaysWhichCompilerIsMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	tree := driverTree{kernel: Kernel{Release: "6.12.1"}, dir: t.TempDir()}
	write(t, tree.dir, map[string]string{"usr/src/linux-headers-6.12.1/.kernelvariables": "CC = $(CROSS_COMPILE)gcc-12\n"})
	err := tree.compiler()
	if missing, ok := errors.AsType[*MissingError](err); !ok || missing.Remedy != "apt-get install gcc-12" {
		t.Errorf("%v", err)
	}
}

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

// The build sees paths as in the root that it runs in.
func TestDriverOfANewerDebianIsBuiltInItsRoot(t *testing.T) {
	root := t.TempDir()
	tree := driverTree{
		kernel: Kernel{Release: "7.3.4+deb13-amd64", source: source{root: root}},
		dir:    filepath.Join(root, "driver-7.3.4+deb13-amd64"),
	}
	write(t, tree.dir, map[string]string{
		"usr/src/linux-headers-7.3.4+deb13-amd64/Makefile": "KBUILD_OUTPUT=/usr/src/linux-headers-7.3.4+deb13-amd64\n",
		"drivers/gpu/drm/amd/amdgpu/Makefile":              "amdgpu-y := x.o",
	})
	if err := tree.prepare(tree.dir); err != nil {
		t.Fatal(err)
	}
	want := "KBUILD_OUTPUT=/driver-7.3.4+deb13-amd64/usr/src/linux-headers-7.3.4+deb13-amd64\n"
	if got := read(t, tree.dir, tree.headers(), "Makefile"); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if err := tree.compiler(); err != nil {
		t.Errorf("the host's compiler is of no use there: %v", err)
	}
}

func TestDriverOfATreeIsCopiedAndTheTreeIsLeftAlone(t *testing.T) {
	t.Setenv(CacheEnv, t.TempDir())
	dir, additions := t.TempDir(), t.TempDir()
	write(t, dir, map[string]string{
		"include/config/kernel.release": "7.3.4-mine\n", "arch/x86/boot/bzImage": "image", "modules.builtin": "kernel/lib/crc16.ko\n",
		"drivers/gpu/drm/amd/amdgpu/Makefile": "amdgpu-y := x.o", "drivers/gpu/drm/amd/amdgpu/x.c": "int x;",
		"drivers/gpu/drm/amd/amdgpu/x.o": "object", "drivers/gpu/drm/amd/amdgpu/amdgpu.ko": string(module(t, "depends=ttm\x00")),
		"drivers/gpu/drm/ttm/ttm.ko": string(module(t, "depends=\x00")), "drivers/gpu/drm/ttm/.ttm.ko.cmd": "",
		"drivers/gpu/drm/amd/include/registers.h": "r",
	})
	write(t, additions, map[string]string{"a.c": "int a;", "Kbuild": "amdgpu-y += softgpu/a.o"})
	before, err := contents(filepath.Join(dir, amdDir, "amdgpu"))
	if err != nil {
		t.Fatal(err)
	}
	k, err := FindKernel(t.Context(), dir+"/")
	if err != nil {
		t.Fatal(err)
	}
	modules, err := k.Modules(t.Context(), "amdgpu")
	if err != nil || len(modules) != 2 || modules[0].Name != "ttm" {
		t.Errorf("modules %+v, %v", modules, err)
	}
	tree, unlock, err := k.driverTree(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	for range 2 {
		if err := errors.Join(tree.copy(), tree.add(additions)); err != nil {
			t.Fatal(err)
		}
	}
	got := map[string]string{
		"release": k.Release, "image": read(t, k.Image()), "Makefile": read(t, tree.amdgpu(), "Makefile"),
		"x.c": read(t, tree.amdgpu(), "x.c"), "a.c": read(t, tree.amdgpu(), "softgpu", "a.c"),
		"registers": read(t, tree.dir, amdDir, "include", "registers.h"),
	}
	want := map[string]string{
		"release": "7.3.4-mine", "image": "image", "Makefile": "amdgpu-y := x.o\namdgpu-y += softgpu/a.o",
		"x.c": "int x;", "a.c": "int a;", "registers": "r",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, err := os.Stat(filepath.Join(tree.amdgpu(), "x.o")); err == nil {
		t.Error("an object of the tree was copied")
	}
	after, err := contents(filepath.Join(dir, amdDir, "amdgpu"))
	if diff := cmp.Diff(before, after, cmp.AllowUnexported(content{})); diff != "" || err != nil {
		t.Errorf("the tree has changed (-before +after), %v:\n%s", err, diff)
	}
}

func TestTreeThatWasNotBuiltIsNamed(t *testing.T) {
	dir := t.TempDir()
	if _, err := FindKernel(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "make bzImage modules") {
		t.Errorf("%v", err)
	}
}

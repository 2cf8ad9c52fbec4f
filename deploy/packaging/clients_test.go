package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

func TestPythonClientOfThePackageIsComplete(t *testing.T) {
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("no dpkg-deb")
	}
	const python = "/usr/bin/python3"
	if exec.CommandContext(t.Context(), python, "-c", "import google.protobuf").Run() != nil {
		t.Skip("no python3-protobuf")
	}
	r, dir, _ := released(t)
	root := unpacked(t, r, "python3-gpreempt.yaml", staged{dir: dir, arch: "amd64"})
	cmd := exec.CommandContext(t.Context(), python, "-c", "import gpreempt, gpreempt.asgi; print(gpreempt.__file__)")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH="+filepath.Join(root, "usr/lib/python3/dist-packages"))
	out, err := cmd.CombinedOutput()
	if want := filepath.Join(root, "usr/lib/python3/dist-packages/gpreempt/__init__.py") + "\n"; err != nil || string(out) != want {
		t.Errorf("%v: %s", err, out)
	}
}

func TestProgramLinksWithTheLibraryOfThePackage(t *testing.T) {
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("no dpkg-deb")
	}
	r, dir, _ := released(t)
	glibc, err := library(t.Context(), dir, runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}
	if glibc == "" {
		t.Skip("it cannot be built here")
	}
	root := unpacked(t, r, libraryConfig, staged{dir: dir, arch: runtime.GOARCH, glibc: glibc})
	libs := filepath.Join(root, libraryDirs["deb"][runtime.GOARCH])
	program := filepath.Join(t.TempDir(), "inference")
	cc := exec.CommandContext(t.Context(), "cc", "-I", filepath.Join(root, "usr/include"), filepath.Join(repository, "examples/c/inference.c"),
		"-o", program, "-L", libs, "-lgpreempt", "-Wl,-rpath,"+libs, "-pthread")
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	// It is found at run time by the name that the program has.
	if out, err := exec.CommandContext(t.Context(), "ldd", program).CombinedOutput(); err != nil || !strings.Contains(string(out), filepath.Join(libs, "libgpreempt.so.0")) {
		t.Errorf("%v: %s", err, out)
	}
}

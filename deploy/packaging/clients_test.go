package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

func TestPythonClientOfEachPackageIsComplete(t *testing.T) {
	if exec.CommandContext(t.Context(), python, "-c", "import google.protobuf").Run() != nil {
		t.Skip("no python3-protobuf")
	}
	imported := func(t *testing.T, root, site, version string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), python, "-c", "import gpreempt, gpreempt.asgi; print(gpreempt.__file__, gpreempt.__version__)")
		cmd.Dir, cmd.Env = root, append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH="+filepath.Join(root, site))
		out, err := cmd.CombinedOutput()
		if want := filepath.Join(root, site, "gpreempt/__init__.py") + " " + version + "\n"; err != nil || string(out) != want {
			t.Errorf("%v: %s, want %s", err, out, want)
		}
	}
	r, dir, _ := released(t)
	t.Run("deb", func(t *testing.T) {
		if _, err := exec.LookPath("dpkg-deb"); err != nil {
			t.Skip("no dpkg-deb")
		}
		imported(t, unpacked(t, r, "python3-gpreempt.yaml", staged{dir: dir, arch: "amd64"}), "usr/lib/python3/dist-packages", "1.2.3")
	})
	t.Run("rpm", func(t *testing.T) {
		if err := exec.CommandContext(t.Context(), "sh", "-c", "command -v rpm2cpio && command -v cpio").Run(); err != nil {
			t.Skip("no rpm2cpio or cpio: apt-get install rpm2cpio cpio")
		}
		if err := r.pack("python3-gpreempt.yaml", "rpm", staged{dir: dir, arch: "amd64"}); err != nil {
			t.Fatal(err)
		}
		root := t.TempDir()
		unpack := exec.CommandContext(t.Context(), "sh", "-c", `rpm2cpio "$1" | cpio -id --quiet --no-absolute-filenames`, "sh", filepath.Join(r.out, r.made[len(r.made)-1]))
		unpack.Dir = root
		if out, err := unpack.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for _, version := range []string{"3.9", "3.11", "3.12", "3.13", "3.14"} {
			imported(t, root, "usr/lib/python"+version+"/site-packages", "1.2.3")
		}
	})
	t.Run("wheel", func(t *testing.T) {
		r := release{packages: "1.2.3", date: r.date, out: t.TempDir()}
		if err := r.wheel(t.Context(), t.TempDir()); err != nil {
			t.Fatal(err)
		}
		if len(r.made) == 0 {
			t.Skip("it cannot be built here")
		}
		if want := "gpreempt-1.2.3-py3-none-any.whl"; r.made[0] != want {
			t.Errorf("it is called %s, want %s", r.made[0], want)
		}
		root := t.TempDir()
		// As pip does it, without dependencies.
		if out, err := exec.CommandContext(t.Context(), python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", root,
			filepath.Join(r.out, r.made[0])).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		imported(t, root, ".", "1.2.3")
	})
}

func TestVersionsOfPythonAreThoseOfPEP440(t *testing.T) {
	for packages, want := range map[string]string{
		"0.0.0+9.g7a473ef.dirty": "0.0.0+9.g7a473ef.dirty", "0.1.0~alpha": "0.1.0a0", "0.1.0~beta.3": "0.1.0b3", "0.1.0~rc.2+3.gabc1234": "0.1.0rc2+3.gabc1234", "0.1.0": "0.1.0",
	} {
		if got, err := pythonVersion(packages); err != nil || got != want {
			t.Errorf("pythonVersion(%q) = %q, %v, want %q", packages, got, err, want)
		}
	}
	if got, err := pythonVersion("0.1.0~nightly"); err == nil {
		t.Errorf("pythonVersion(0.1.0~nightly) = %q, want an error", got)
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

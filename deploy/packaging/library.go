package main

import (
	"context"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// libraryDirs are where libgpreempt is installed, by format and GOARCH.
var libraryDirs = map[string]map[string]string{
	"deb": {"amd64": "/usr/lib/x86_64-linux-gnu", "arm64": "/usr/lib/aarch64-linux-gnu"},
	"rpm": {"amd64": "/usr/lib64", "arm64": "/usr/lib64"},
}

// library builds libgpreempt below dir, as each format installs it, and returns the version of
// glibc that it needs: "" where it cannot be built, which is not an error.
func library(ctx context.Context, dir, arch string) (glibc string, err error) {
	if arch != runtime.GOARCH {
		fmt.Printf("SKIP libgpreempt for %s: it is built on that architecture only\n", arch)
		return "", nil
	}
	for _, needs := range []string{"make", "cc", "pkg-config", "protoc", "nanopb_generator.py"} {
		if _, err := exec.LookPath(needs); err != nil {
			fmt.Printf("SKIP libgpreempt: no %s; docs/integrations.md lists what it is built from\n", needs)
			return "", nil
		}
	}
	build := filepath.Join(dir, "clib")
	for format, dirs := range libraryDirs {
		cmd := exec.CommandContext(ctx, "make", "--no-print-directory", "-s", "-C", filepath.Join(repository, "bindings/c"), "install",
			"BUILD="+build, "DESTDIR="+filepath.Join(dir, "lib", format), "PREFIX=/usr", "LIBDIR="+dirs[arch], "CFLAGS=-O2", "LDFLAGS=-s")
		for _, variable := range os.Environ() {
			if !strings.HasPrefix(variable, "MAKE") { // the variables of a make that runs this, such as VERSION
				cmd.Env = append(cmd.Env, variable)
			}
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("libgpreempt: %w\n%s", err, out)
		}
	}
	// make writes with the umask, and a library needs no right to be run.
	err = filepath.WalkDir(filepath.Join(dir, "lib"), func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		return os.Chmod(name, 0o644)
	})
	if err != nil {
		return "", err
	}
	return neededGlibc(filepath.Join(build, "libgpreempt.so"))
}

// neededGlibc returns the highest version of glibc in a library's symbols, such as 2.34.
func neededGlibc(path string) (string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	symbols, err := f.ImportedSymbols()
	if err != nil {
		return "", err
	}
	minor := 0
	for _, s := range symbols {
		var is int
		if n, _ := fmt.Sscanf(s.Version, "GLIBC_2.%d", &is); n == 1 {
			minor = max(minor, is)
		}
	}
	return fmt.Sprintf("2.%d", minor), nil
}

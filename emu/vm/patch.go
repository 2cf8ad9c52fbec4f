package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// changedFile matches the two lines with which the part of a patch for a file begins.
var changedFile = regexp.MustCompile(`(?m)^--- (\S+)\n\+\+\+ b/(\S+)$`)

// madeFor matches what a patch says about the series of its kernel.
var madeFor = regexp.MustCompile(`(?m)^For Linux ([0-9]+\.[0-9]+)\b`)

// fits returns an error if a patch says that it is for another series than that of a release.
func fits(patch []byte, release string) error {
	m := madeFor.FindSubmatch(patch)
	if m == nil || strings.HasPrefix(release, string(m[1])+".") {
		return nil
	}
	return fmt.Errorf("the patch is for Linux %s, and this is %s: the driver that it changes is another one there", m[1], release)
}

// original is the folder of a tree for Debian's version of the files that patches change.
const original = "debian"

// patch makes the tree's files those of Debian's source with the patch applied, or those of the
// source if the patch is "". Files whose content stays the same are not written, for make.
func (t driverTree) patch(ctx context.Context, file string) error {
	kept := filepath.Join(t.dir, original)
	if err := os.MkdirAll(kept, 0o755); err != nil { //nolint:gosec // sources
		return err
	}
	if file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := fits(text, t.kernel.Release); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		for _, m := range changedFile.FindAllSubmatch(text, -1) {
			if string(m[1]) == "/dev/null" {
				continue
			}
			if err := t.keep(string(m[2])); err != nil {
				return err
			}
		}
	}
	tmp, err := os.MkdirTemp(t.dir, "patch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := os.CopyFS(tmp, os.DirFS(kept)); err != nil {
		return err
	}
	if file != "" {
		if err := apply(ctx, tmp, file); err != nil {
			return err
		}
		// The Makefile has -I for include/trace only.
		err := os.Symlink("../uapi", filepath.Join(t.dir, "include", "trace", "uapi"))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return filepath.WalkDir(tmp, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path) //nolint:gosec // a folder of this program's own
		if err != nil {
			return err
		}
		to := filepath.Join(t.dir, strings.TrimPrefix(path, tmp))
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil { //nolint:gosec // sources
			return err
		}
		return update(to, data)
	})
}

// keep copies a file of the tree before a patch changes it for the first time.
func (t driverTree) keep(name string) error {
	to := filepath.Join(t.dir, original, name)
	if _, err := os.Stat(to); !errors.Is(err, fs.ErrNotExist) { //nolint:gosec // sources
		return err
	}
	data, err := os.ReadFile(filepath.Join(t.dir, name)) //nolint:gosec // sources
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil { //nolint:gosec // sources
		return err
	}
	return update(to, data)
}

// apply applies a patch to the files below dir. A hunk whose context has changed is an error.
func apply(ctx context.Context, dir, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	cmd := exec.CommandContext(ctx, "patch", "-p1", "-d", dir, "--forward", "--fuzz=0", "--no-backup-if-mismatch") //nolint:gosec // constants, and a folder of this program's own
	cmd.Stdin = f
	text, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return &MissingError{What: "no patch to change the driver", Remedy: "apt-get install patch"}
	}
	if err != nil {
		return fmt.Errorf("%s does not apply: %w: %s", file, err, bytes.TrimSpace(text))
	}
	return nil
}

// checkPatch applies a patch to the driver's source, has checkpatch.pl read it, and compiles the C files
// that it changes with all warnings, each of which is an error.
func checkPatch(ctx context.Context, o options, out io.Writer) error {
	text, err := os.ReadFile(o.patch)
	if err != nil {
		return err
	}
	kernel, err := FindKernel(ctx, o.kernel)
	if err != nil {
		return err
	}
	root, err := repository(ctx)
	if err != nil {
		return err
	}
	t, unlock, err := kernel.driverTree(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := t.ready(ctx, filepath.Join(root, "emu", "softgpu"), o.patch, out); err != nil {
		return err
	}
	if err := t.checkStyle(ctx, o.patch, out); err != nil {
		return err
	}
	targets := []string{"W=1", "CONFIG_DRM_AMDGPU_WERROR=y"}
	for _, m := range changedFile.FindAllSubmatch(text, -1) {
		name, ok := strings.CutSuffix(string(m[2]), ".c")
		if !ok {
			continue
		}
		object, err := filepath.Rel(filepath.Join(amdDir, "amdgpu"), name+".o")
		if err != nil {
			return err
		}
		targets = append(targets, object)
		// make keeps an object whose sources have not changed, and says nothing about it.
		if err := os.Remove(filepath.Join(t.amdgpu(), object)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := t.make(ctx, out, targets...); err != nil {
		return err
	}
	fmt.Fprintf(out, "vm: %s applies to Linux %s, %d lines; checkpatch --strict and W=1 find nothing\n",
		o.patch, kernel.Release, bytes.Count(text, []byte("\n")))
	return nil
}

// checkStyle runs the kernel's checkpatch.pl.
func (t driverTree) checkStyle(ctx context.Context, patch string, out io.Writer) error {
	script := filepath.Join(t.dir, "scripts", "checkpatch.pl")
	if _, err := os.Stat(script); err != nil {
		return &MissingError{What: "no checkpatch.pl in " + t.dir, Remedy: "remove that folder: it is downloaded again"}
	}
	f, err := os.Open(patch)
	if err != nil {
		return err
	}
	defer f.Close()
	// By name, checkpatch.pl would take a file that git tracks for a source.
	cmd := exec.CommandContext(ctx, "perl", script, "--no-tree", "--strict", "-") //nolint:gosec // the kernel's script
	cmd.Stdin = f
	text, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return &MissingError{What: "no perl for checkpatch.pl", Remedy: "apt-get install perl"}
	case err != nil:
		return fmt.Errorf("checkpatch: %w:\n%s", err, text)
	}
	_, err = out.Write(text)
	return err
}

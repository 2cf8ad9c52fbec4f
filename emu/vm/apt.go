package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// source is where kernels come from: apt as the host has it, or with suites of a newer Debian.
type source struct {
	dir  string   // in the cache; for the kernels
	apt  []string // options of apt's commands
	root string   // of the Debian in which drivers are built; "" for the host
}

// A kernel whose series the host's apt does not offer is looked for in these suites. The compiler
// and the tools that its headers ask for are those of the first.
var (
	newerSuites   = []string{"trixie", "trixie-backports"}
	newerPackages = "gcc-14,make,libc6-dev,libelf1t64,libssl3t64,pahole"
)

const (
	keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	// Lists of packages that are older are read again.
	listsAge = 24 * time.Hour
)

// sources returns where kernels come from, in the order in which they are asked.
func sources(cache string) []source {
	newer := filepath.Join(cache, newerSuites[0])
	apt := filepath.Join(newer, "apt")
	return []source{
		{dir: cache},
		{dir: newer, root: filepath.Join(newer, "root"), apt: []string{
			"-o", "Dir::Etc::sourcelist=" + filepath.Join(apt, "sources.list"), "-o", "Dir::Etc::sourceparts=-",
			"-o", "Dir::State::Lists=" + filepath.Join(apt, "lists"), "-o", "Dir::Cache=" + filepath.Join(apt, "cache"),
			"-o", "APT::Sandbox::User=root", // the user of the sandbox may not enter the cache
		}},
	}
}

func (s source) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, name, append(append([]string{}, s.apt...), args...)...) //nolint:gosec // names apt gave
}

// refresh reads the lists of the source's packages again if they are old. The host's are the host's
// business.
func (s source) refresh(ctx context.Context) error {
	if s.root == "" {
		return nil
	}
	if _, err := os.Stat(keyring); err != nil {
		return &MissingError{What: "no " + keyring + " for the packages of Debian " + newerSuites[0], Remedy: "apt-get install debian-archive-keyring"}
	}
	unlock, err := lock(s.dir + ".lock")
	if err != nil {
		return err
	}
	defer unlock()
	apt := filepath.Join(s.dir, "apt")
	stamp := filepath.Join(apt, "updated")
	if info, err := os.Stat(stamp); err == nil && time.Since(info.ModTime()) < listsAge {
		return nil
	}
	for _, dir := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(apt, dir), 0o755); err != nil { //nolint:gosec // public lists
			return err
		}
	}
	archive, err := hostArchive(ctx)
	if err != nil {
		return err
	}
	var list strings.Builder
	for _, suite := range newerSuites {
		fmt.Fprintf(&list, "deb [signed-by=%s] %s %s main\n", keyring, archive, suite)
	}
	if err := update(filepath.Join(apt, "sources.list"), []byte(list.String())); err != nil {
		return err
	}
	if text, err := s.command(ctx, "apt-get", "update").CombinedOutput(); err != nil || bytes.Contains(text, []byte("\nW: Failed to fetch")) {
		return &MissingError{
			What:   fmt.Sprintf("the packages of Debian %s could not be listed (%v: %s)", newerSuites[0], err, lastLine(text)),
			Remedy: "check the network",
		}
	}
	return os.WriteFile(stamp, nil, 0o644) //nolint:gosec // as above
}

// hostArchive returns the address of the archive from which the host's apt has Debian's packages: it
// has the other suites, too.
func hostArchive(ctx context.Context) (string, error) {
	text, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI)",
		"Created-By: Packages", "Origin: Debian", "Label: Debian").Output()
	archives := strings.Fields(string(text))
	if err != nil || len(archives) == 0 {
		return "", &MissingError{What: fmt.Sprintf("apt knows no archive of Debian's packages (%v)", err), Remedy: "apt-get update, on Debian"}
	}
	return archives[0], nil
}

// show returns the newest version of a package that the source knows, and the packages it depends on.
func (s source) show(ctx context.Context, name string) (version string, depends []string, err error) {
	text, err := s.command(ctx, "apt-cache", "show", "--no-all-versions", name).Output()
	if errors.Is(err, exec.ErrNotFound) {
		return "", nil, &MissingError{What: "no apt-cache", Remedy: "kernels and their sources are Debian packages: run this on Debian"}
	}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "Version":
			version = value
		case "Depends":
			for one := range strings.SplitSeq(value, ", ") {
				one, _, _ = strings.Cut(one, " ")
				depends = append(depends, one)
			}
		}
	}
	if version == "" {
		return "", nil, &MissingError{What: fmt.Sprintf("apt knows no package %s (%v)", name, err), Remedy: "apt-get update; a newer kernel has replaced it"}
	}
	return version, depends, nil
}

// download fetches packages, NAME or NAME=VERSION, to dir and returns their files.
func (s source) download(ctx context.Context, dir string, packages ...string) ([]string, error) {
	// Run by root, apt drops its rights and needs the directory open.
	if err := os.Chmod(dir, 0o777); err != nil { //nolint:gosec // for the time of the download; apt checks the packages
		return nil, err
	}
	fetch := s.command(ctx, "apt-get", append([]string{"download"}, packages...)...)
	fetch.Dir = dir
	if text, err := fetch.CombinedOutput(); err != nil {
		return nil, &MissingError{
			What:   fmt.Sprintf("%s could not be downloaded (%v: %s)", strings.Join(packages, ", "), err, bytes.TrimSpace(text)),
			Remedy: "check the network, and apt-get update",
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(files) != len(packages) {
		return nil, fmt.Errorf("apt-get download left %d packages of %d (%w)", len(files), len(packages), err)
	}
	return files, nil
}

// unpack unpacks a package in dir. Nothing of it is executed or installed.
func unpack(ctx context.Context, file, dir string) error {
	if text, err := exec.CommandContext(ctx, "dpkg", "-x", file, dir).CombinedOutput(); err != nil { //nolint:gosec // a package of apt's
		return fmt.Errorf("dpkg -x %s: %w: %s", file, err, bytes.TrimSpace(text))
	}
	return nil
}

// makeRoot installs the Debian in which drivers are built, once, as root. The build runs there by
// unshare(1).
func (s source) makeRoot(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return &MissingError{What: "the driver is built in a Debian " + newerSuites[0] + " of its own, by unshare(1)", Remedy: "run this as root"}
	}
	unlock, err := lock(s.dir + ".lock")
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(filepath.Join(s.root, "usr", "bin", "make")); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	tmp, err := os.MkdirTemp(s.dir, "root-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := install(ctx, newerSuites[0], newerPackages, filepath.Join(tmp, "tree")); err != nil {
		return err
	}
	return os.Rename(filepath.Join(tmp, "tree"), s.root)
}

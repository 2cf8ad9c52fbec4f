package main

import (
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// CacheEnv names the environment variable with the directory for kernels and images.
// The default is gpreempt-vm in the user's cache directory.
const CacheEnv = "GPREEMPT_VM_CACHE"

// Kernel is a Debian kernel, unpacked on this host.
type Kernel struct {
	Release string // as uname -r gives it
	dir     string // of the unpacked package
}

// Image returns the path of the kernel image.
func (k Kernel) Image() string { return filepath.Join(k.dir, "boot", "vmlinuz-"+k.Release) }

// FetchKernel returns the newest kernel of a series, such as 6.12, that apt offers
// for amd64 with all its drivers, or the newest in the cache if apt offers none. The
// package is downloaded once and unpacked in the cache, never installed. If there is
// no kernel, the error is a *MissingError.
func FetchKernel(ctx context.Context, series string) (Kernel, error) {
	cache, err := cacheDir()
	if err != nil {
		return Kernel{}, err
	}
	offered, aptErr := offeredReleases(ctx, series)
	if len(offered) > 0 {
		k, err := fetch(ctx, cache, offered[0])
		if err == nil {
			return k, nil
		}
		aptErr = err
	}
	kept, err := filepath.Glob(filepath.Join(cache, series+".*"))
	if err != nil {
		return Kernel{}, err
	}
	if len(kept) == 0 {
		return Kernel{}, aptErr
	}
	releases := make([]string, len(kept))
	for i, dir := range kept {
		releases[i] = filepath.Base(dir)
	}
	slices.SortFunc(releases, newestFirst)
	return Kernel{Release: releases[0], dir: filepath.Join(cache, releases[0])}, nil
}

func cacheDir() (string, error) {
	dir := os.Getenv(CacheEnv)
	if dir == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("no cache directory: %w: set %s", err, CacheEnv)
		}
		dir = filepath.Join(user, "gpreempt-vm")
	}
	// dpkg and apt run in other directories.
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return dir, os.MkdirAll(dir, 0o755) //nolint:gosec // kernels of a public archive
}

// offeredReleases lists the releases that apt knows, newest first. The pattern excludes
// the cloud flavour, which has no GPU drivers, and the real-time flavour.
func offeredReleases(ctx context.Context, series string) ([]string, error) {
	name := `linux-image-` + regexp.QuoteMeta(series) + `\.[0-9.]+\+deb[0-9]+-amd64`
	text, err := exec.CommandContext(ctx, "apt-cache", "search", "--names-only", "^"+name+"$").Output() //nolint:gosec // the series is this program's
	if errors.Is(err, exec.ErrNotFound) {
		return nil, &MissingError{What: "no apt-cache", Remedy: "the guest's kernel is a Debian package: run this on Debian, or put an unpacked kernel in " + CacheEnv}
	}
	if err != nil {
		return nil, fmt.Errorf("apt-cache search: %w", err)
	}
	releases := parseSearch(text, series)
	if len(releases) == 0 {
		return nil, &MissingError{What: "apt knows no package " + name, Remedy: "apt-get update, with the suites of Debian 12 or later"}
	}
	return releases, nil
}

// parseSearch reads "NAME - DESCRIPTION" lines and returns the releases of the
// kernels among them, the newest first.
func parseSearch(text []byte, series string) []string {
	var releases []string
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		release, ok := strings.CutPrefix(name, "linux-image-")
		if ok && strings.HasPrefix(release, series+".") {
			releases = append(releases, release)
		}
	}
	slices.SortFunc(releases, newestFirst)
	return releases
}

var digits = regexp.MustCompile(`[0-9]+`)

// newestFirst compares releases by the numbers in them.
func newestFirst(a, b string) int {
	return slices.CompareFunc(digits.FindAllString(b, -1), digits.FindAllString(a, -1), func(x, y string) int {
		m, _ := strconv.Atoi(x) // digits only; numbers that overflow compare equal
		n, _ := strconv.Atoi(y)
		return cmp.Compare(m, n)
	})
}

// fetch downloads and unpacks a kernel that is not in the cache.
func fetch(ctx context.Context, cache, release string) (Kernel, error) {
	k := Kernel{Release: release, dir: filepath.Join(cache, release)}
	if _, err := os.Stat(k.Image()); err == nil {
		return k, nil
	}
	tmp, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return Kernel{}, err
	}
	defer os.RemoveAll(tmp)
	packages, err := download(ctx, tmp, "linux-image-"+release)
	if err != nil {
		return Kernel{}, err
	}
	unpacked := filepath.Join(tmp, "unpacked")
	if err := unpack(ctx, packages[0], unpacked); err != nil {
		return Kernel{}, err
	}
	if err := os.Rename(unpacked, k.dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return Kernel{}, err
	}
	return k, nil
}

// download fetches packages, NAME or NAME=VERSION, to dir and returns their files.
func download(ctx context.Context, dir string, packages ...string) ([]string, error) {
	// Run by root, apt drops its rights and needs the directory open.
	if err := os.Chmod(dir, 0o777); err != nil { //nolint:gosec // for the time of the download; apt checks the packages
		return nil, err
	}
	fetch := exec.CommandContext(ctx, "apt-get", append([]string{"download"}, packages...)...) //nolint:gosec // names apt gave
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

// packageVersion returns the newest version that apt knows of a package.
func packageVersion(ctx context.Context, name string) (string, error) {
	text, err := exec.CommandContext(ctx, "apt-cache", "show", "--no-all-versions", name).Output() //nolint:gosec // a name of the kernel's
	if errors.Is(err, exec.ErrNotFound) {
		return "", &MissingError{What: "no apt-cache", Remedy: "the driver's source is a Debian package: run this on Debian"}
	}
	for line := range strings.Lines(string(text)) {
		if version, ok := strings.CutPrefix(strings.TrimSpace(line), "Version: "); ok {
			return version, nil
		}
	}
	return "", &MissingError{What: fmt.Sprintf("apt knows no package %s (%v)", name, err), Remedy: "apt-get update; a newer kernel has replaced it"}
}

// Module is a kernel module, ready to be loaded.
type Module struct {
	Name   string
	Params string // such as "a=1 b=2"
	Data   []byte // ELF, not compressed
}

// Modules returns the named modules and their dependencies in the order of loading.
func (k Kernel) Modules(ctx context.Context, names ...string) ([]Module, error) {
	root := filepath.Join(k.dir, "lib", "modules", k.Release)
	if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
		root = filepath.Join(k.dir, "usr", "lib", "modules", k.Release)
	}
	l := loader{ctx: ctx, files: map[string]string{}, done: map[string]bool{}}
	builtin, err := os.ReadFile(filepath.Join(root, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(builtin)) {
		l.done[moduleName(strings.TrimSpace(line))] = true
	}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(d.Name(), ".ko") {
			l.files[moduleName(path)] = path
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if err := l.add(name); err != nil {
			return nil, err
		}
	}
	return l.modules, nil
}

// moduleName returns the name of the module in a file: the base name up to the first
// dot, with underscores for dashes as in the kernel.
func moduleName(path string) string {
	name, _, _ := strings.Cut(filepath.Base(path), ".")
	return strings.ReplaceAll(name, "-", "_")
}

// loader collects modules, dependencies first.
type loader struct {
	ctx     context.Context //nolint:containedctx // it lives for one call of Modules
	files   map[string]string
	done    map[string]bool
	modules []Module
}

func (l *loader) add(name string) error {
	name = moduleName(name)
	if l.done[name] {
		return nil
	}
	l.done[name] = true
	path, ok := l.files[name]
	if !ok {
		return fmt.Errorf("the kernel has no module %s", name)
	}
	data, err := readModule(l.ctx, path)
	if err != nil {
		return err
	}
	needs, err := depends(data)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, need := range needs {
		if err := l.add(need); err != nil {
			return fmt.Errorf("%w, which %s needs", err, name)
		}
	}
	l.modules = append(l.modules, Module{Name: name, Data: data})
	return nil
}

// readModule reads a module as Debian packs it. Unpacking it here is several times
// faster than in an emulated guest.
func readModule(ctx context.Context, path string) ([]byte, error) {
	if !strings.HasSuffix(path, ".xz") {
		return os.ReadFile(path)
	}
	data, err := exec.CommandContext(ctx, "xz", "-dc", path).Output() //nolint:gosec // a file of the kernel's
	if errors.Is(err, exec.ErrNotFound) {
		return nil, &MissingError{What: "no xz", Remedy: "apt-get install xz-utils"}
	}
	if err != nil {
		return nil, fmt.Errorf("xz -dc %s: %w", path, err)
	}
	return data, nil
}

// depends returns the names of the modules that a module depends on, from .modinfo.
func depends(module []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errors.New("no section .modinfo")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for entry := range bytes.SplitSeq(info, []byte{0}) {
		if list, ok := bytes.CutPrefix(entry, []byte("depends=")); ok && len(list) > 0 {
			return strings.Split(string(list), ","), nil
		}
	}
	return nil, nil
}

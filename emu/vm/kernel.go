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

// Kernel is a Debian kernel, unpacked on this host, or one built in a tree.
type Kernel struct {
	Release string // as uname -r gives it
	dir     string // of the unpacked packages, or the tree
	tree    bool
	source  source // of the packages
}

// Image returns the path of the kernel image.
func (k Kernel) Image() string {
	if k.tree {
		return filepath.Join(k.dir, "arch", "x86", "boot", "bzImage")
	}
	image := filepath.Join(k.dir, "usr", "lib", "modules", k.Release, "vmlinuz") // since 7.2
	if _, err := os.Stat(image); err == nil {
		return image
	}
	return filepath.Join(k.dir, "boot", "vmlinuz-"+k.Release)
}

// FindKernel returns the kernel of a tree, if the name is a path with a slash, and else the newest
// one of a series, such as 6.12, see FetchKernel.
func FindKernel(ctx context.Context, name string) (Kernel, error) {
	if strings.Contains(name, "/") {
		return treeKernel(name)
	}
	return FetchKernel(ctx, name)
}

// FetchKernel returns the newest kernel of a series for amd64 with all its drivers that apt offers,
// or the newest in the cache if apt offers none; if the host's suites have none, those of a newer
// Debian are asked. The packages are downloaded once and unpacked in the cache, never installed. If
// there is no kernel, the error is a *MissingError.
func FetchKernel(ctx context.Context, series string) (Kernel, error) {
	cache, err := cacheDir()
	if err != nil {
		return Kernel{}, err
	}
	var lacks MissingError
	for _, s := range sources(cache) {
		k, err := s.kernel(ctx, series)
		missing, ok := errors.AsType[*MissingError](err)
		if !ok {
			return k, err
		}
		if lacks.What == "" {
			lacks = *missing
			continue
		}
		lacks.What, lacks.Remedy = lacks.What+"; "+missing.What, lacks.Remedy+"; "+missing.Remedy
	}
	return Kernel{}, &lacks
}

// kernel returns the newest kernel that the source offers or has in the cache.
func (s source) kernel(ctx context.Context, series string) (Kernel, error) {
	offered, aptErr := s.offered(ctx, series)
	if len(offered) > 0 {
		k, err := s.fetch(ctx, offered[0])
		if err == nil {
			return k, nil
		}
		aptErr = err
	}
	kept, err := filepath.Glob(filepath.Join(s.dir, series+".*"))
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
	return Kernel{Release: releases[0], dir: filepath.Join(s.dir, releases[0]), source: s}, nil
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

// offered lists the releases that the source knows, newest first. The pattern excludes
// the cloud flavour, which has no GPU drivers, and the real-time flavour.
func (s source) offered(ctx context.Context, series string) ([]string, error) {
	if err := s.refresh(ctx); err != nil {
		return nil, err
	}
	name := `linux-image-` + regexp.QuoteMeta(series) + `\.[0-9.]+\+deb[0-9]+-amd64`
	text, err := s.command(ctx, "apt-cache", "search", "--names-only", "^"+name+"$").Output()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, &MissingError{What: "no apt-cache", Remedy: "the guest's kernel is a Debian package: run this on Debian, or put an unpacked kernel in " + CacheEnv}
	}
	if err != nil {
		return nil, fmt.Errorf("apt-cache search: %w", err)
	}
	releases := parseSearch(text, series)
	switch {
	case len(releases) > 0:
		return releases, nil
	case s.root != "":
		return nil, &MissingError{What: fmt.Sprintf("Debian's %s have no package %s", strings.Join(newerSuites, ", "), name), Remedy: "test another series"}
	default:
		return nil, &MissingError{What: "apt knows no package " + name, Remedy: "apt-get update, with the suites of Debian 12 or later"}
	}
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
func (s source) fetch(ctx context.Context, release string) (Kernel, error) {
	k := Kernel{Release: release, dir: filepath.Join(s.dir, release), source: s}
	if _, err := os.Stat(k.Image()); err == nil {
		return k, nil
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil { //nolint:gosec // kernels of a public archive
		return Kernel{}, err
	}
	tmp, err := os.MkdirTemp(s.dir, "fetch-")
	if err != nil {
		return Kernel{}, err
	}
	defer os.RemoveAll(tmp)
	image := "linux-image-" + release
	_, depends, err := s.show(ctx, image)
	if err != nil {
		return Kernel{}, err
	}
	packages := []string{image}
	for _, name := range depends { // since 7.2, image and modules have packages of their own
		if strings.HasSuffix(name, "-"+release) {
			packages = append(packages, name)
		}
	}
	files, err := s.download(ctx, tmp, packages...)
	if err != nil {
		return Kernel{}, err
	}
	unpacked := filepath.Join(tmp, "unpacked")
	for _, file := range files {
		if err := unpack(ctx, file, unpacked); err != nil {
			return Kernel{}, err
		}
	}
	if err := os.Rename(unpacked, k.dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return Kernel{}, err
	}
	return k, nil
}

// treeKernel returns the kernel that was built in a tree.
func treeKernel(path string) (Kernel, error) {
	dir, err := filepath.Abs(path)
	if err != nil {
		return Kernel{}, err
	}
	k := Kernel{dir: dir, tree: true}
	release, err := os.ReadFile(filepath.Join(dir, "include", "config", "kernel.release"))
	if err == nil {
		_, err = os.Stat(k.Image())
	}
	if err == nil {
		_, err = os.Stat(filepath.Join(dir, "modules.builtin"))
	}
	if err != nil {
		return Kernel{}, fmt.Errorf("%s is no tree of a kernel that has been built (make bzImage modules): %w", path, err)
	}
	k.Release = strings.TrimSpace(string(release))
	return k, nil
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
	if k.tree {
		root = k.dir
	} else if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
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
		if err == nil && d.Type().IsRegular() && moduleFile.MatchString(d.Name()) {
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

var moduleFile = regexp.MustCompile(`\.ko(\.xz)?$`)

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

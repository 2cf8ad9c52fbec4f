package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// The display code is left out: it is half of the driver, and a guest has no display.
// The configuration header of the kernel defines the options too, so a header of ours
// undefines them.
var withoutDisplay = []string{"CONFIG_DRM_AMD_DC", "CONFIG_DRM_AMD_DC_FP", "CONFIG_DRM_AMD_DC_SI", "CONFIG_DRM_AMD_ACP"}

// amdDir is the driver's folder in the kernel's source.
const amdDir = "drivers/gpu/drm/amd"

// driverTree is the source of amdgpu with the headers of its kernel, unpacked in the cache, or
// copied from the tree of the kernel. The objects stay there: a later build compiles what has changed.
// The tree of a kernel with a source.root lies in that folder.
type driverTree struct {
	kernel Kernel
	dir    string
}

// BuildDriver returns amdgpu.ko of the source for k, with the folder additions copied
// to amdgpu/softgpu, the file Kbuild of it appended to amdgpu's Makefile, and a patch applied
// unless it is "". The first build downloads the source and takes minutes; modules are cached by
// kernel, patch and content of the folder. Progress goes to out. If the host lacks a tool, or apt
// the packages, the error is a *MissingError. Concurrent calls, also of other processes, wait for
// each other.
func (k Kernel) BuildDriver(ctx context.Context, additions, patch string, out io.Writer) ([]byte, error) {
	t, unlock, err := k.driverTree(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	sum, err := digest(additions, patch)
	if err != nil {
		return nil, err
	}
	module := filepath.Join(t.dir, "amdgpu-"+sum+".ko")
	if built, err := os.ReadFile(module); !errors.Is(err, fs.ErrNotExist) && !k.tree {
		return built, err
	}
	if err := t.ready(ctx, additions, patch, out); err != nil {
		return nil, err
	}
	if err := t.make(ctx, out, "modules"); err != nil {
		return nil, err
	}
	if err := os.Rename(filepath.Join(t.amdgpu(), "amdgpu.ko"), module); err != nil {
		return nil, err
	}
	return os.ReadFile(module)
}

// driverTree returns the tree for k, locked until unlock is called. It may not exist yet.
func (k Kernel) driverTree(ctx context.Context) (t driverTree, unlock func(), err error) {
	cache, err := cacheDir()
	if err != nil {
		return driverTree{}, nil, err
	}
	name := "driver-" + k.Release
	switch {
	case k.tree:
		h := fnv.New32a()
		fmt.Fprint(h, k.dir)
		name = fmt.Sprintf("driver-tree-%08x", h.Sum32())
	case k.source.root != "":
		cache = k.source.root
		if err := k.source.makeRoot(ctx); err != nil {
			return driverTree{}, nil, err
		}
	}
	t = driverTree{kernel: k, dir: filepath.Join(cache, name)}
	unlock, err = lock(t.dir + ".lock")
	return t, unlock, err
}

// ready makes the tree ready to be compiled, with the additions and the patch. The first time, it
// downloads the source.
func (t driverTree) ready(ctx context.Context, additions, patch string, out io.Writer) error {
	for tool, from := range map[string]string{"make": "make", "tar": "tar", "xz": "xz-utils", "gcc": "gcc libc6-dev"} {
		if _, err := exec.LookPath(tool); err != nil {
			return &MissingError{What: "no " + tool + " to build the driver", Remedy: "apt-get install " + from}
		}
	}
	if t.kernel.tree {
		if patch != "" {
			return errors.New("-patch is for Debian's source: apply the patch to the tree")
		}
		if err := t.copy(); err != nil {
			return err
		}
		return t.add(additions)
	}
	if _, err := os.Stat(t.dir); errors.Is(err, fs.ErrNotExist) {
		if err := t.fetch(ctx, filepath.Dir(t.dir), out); err != nil {
			return err
		}
	}
	if err := t.add(additions); err != nil {
		return err
	}
	return t.patch(ctx, patch)
}

// lock waits for the lock of a file, until the returned function is called.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644) //nolint:gosec // in a cache of public files
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return func() { _ = f.Close() }, nil // nothing was written
		}
		if !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
	}
}

// digest returns a name for the content of a folder and of a patch, which may be "", and for the
// options of the build.
func digest(dir, patch string) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, withoutDisplay)
	files, err := contents(dir)
	if err != nil {
		return "", err
	}
	if patch != "" {
		text, err := os.ReadFile(patch)
		if err != nil {
			return "", err
		}
		files = append(files, content{"patch", text})
	}
	for _, f := range files {
		fmt.Fprintf(h, "%s %d\n%s", f.name, len(f.data), f.data)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:6]), nil
}

// content is a file of a folder.
type content struct {
	name string
	data []byte
}

// contents returns the files of a folder, without its documents, in the order of names.
func contents(dir string) (files []content, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || strings.HasSuffix(e.Name(), ".md") {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		files = append(files, content{e.Name(), data})
	}
	return files, nil
}

func (t driverTree) amdgpu() string { return filepath.Join(t.dir, amdDir, "amdgpu") }

// fetch downloads source and headers of the kernel's version and unpacks what the build
// needs.
func (t driverTree) fetch(ctx context.Context, cache string, out io.Writer) error {
	headers := "linux-headers-" + t.kernel.Release
	version, _, err := t.kernel.source.show(ctx, headers)
	if err != nil {
		return err
	}
	abi := strings.TrimSuffix(t.kernel.Release, "-amd64")
	numbers := digits.FindAllString(abi, 2)
	source := "linux-source-" + strings.Join(numbers, ".")
	tmp, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	fmt.Fprintf(out, "vm: downloading %s %s, about 165 MB, once\n", source, version)
	packages, err := t.kernel.source.download(ctx, tmp, source+"="+version, headers+"="+version,
		"linux-headers-"+abi+"-common="+version, "linux-kbuild-"+abi+"="+version)
	if err != nil {
		return err
	}
	tree, archive := filepath.Join(tmp, "tree"), filepath.Join(tmp, "archive")
	for _, p := range packages {
		to := tree
		if strings.HasPrefix(filepath.Base(p), source) {
			to = archive
		}
		if err := unpack(ctx, p, to); err != nil {
			return err
		}
	}
	fmt.Fprintln(out, "vm: unpacking the driver's source")
	tar := exec.CommandContext(ctx, "tar", "-xJf", filepath.Join(archive, "usr", "src", source+".tar.xz"), //nolint:gosec // a package's file
		"-C", tree, "--strip-components=1", source+"/"+amdDir, source+"/scripts/checkpatch.pl", source+"/scripts/spelling.txt",
		source+"/scripts/const_structs.checkpatch")
	if text, err := tar.CombinedOutput(); err != nil {
		return fmt.Errorf("tar -x %s: %w: %s", source, err, bytes.TrimSpace(text))
	}
	if err := t.prepare(tree); err != nil {
		return err
	}
	return os.Rename(tree, t.dir)
}

// prepare makes a fresh tree ready to be built in t.dir, where nothing is installed.
func (t driverTree) prepare(tree string) error {
	// It includes that of the common headers by the path of its package.
	path := filepath.Join(tree, t.headers(), "Makefile")
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	text = bytes.ReplaceAll(text, []byte("/usr/src/"), []byte(t.inRoot(filepath.Join(t.dir, "usr", "src"))+"/"))
	if err := os.WriteFile(path, text, 0o644); err != nil { //nolint:gosec // a public file
		return err
	}
	makefile := filepath.Join(tree, amdDir, "amdgpu", "Makefile")
	if err := os.Rename(makefile, makefile+".debian"); err != nil {
		return err
	}
	return support(tree)
}

// support adds what the build outside of a kernel's tree needs.
func support(tree string) error {
	// The headers of tracepoints include each other by a path relative to this folder.
	if err := os.MkdirAll(filepath.Join(tree, "include", "trace"), 0o755); err != nil { //nolint:gosec // as above
		return err
	}
	var undef strings.Builder
	for _, option := range withoutDisplay {
		fmt.Fprintln(&undef, "#undef", option)
	}
	return update(filepath.Join(tree, "undef.h"), []byte(undef.String()))
}

// copy brings the sources of the kernel's tree up to date. The registers' headers, which are most of
// them, are only referred to.
func (t driverTree) copy() error {
	from := filepath.Join(t.kernel.dir, amdDir)
	err := filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		name := strings.TrimPrefix(path, from)
		to := filepath.Join(t.dir, amdDir, name)
		switch {
		case err != nil:
			return err
		case name == "/include":
			if err := os.Symlink(path, to); err != nil && !errors.Is(err, fs.ErrExist) { //nolint:gosec // sources
				return err
			}
			return fs.SkipDir
		case d.IsDir():
			return os.MkdirAll(to, 0o755) //nolint:gosec // sources
		case name == "/amdgpu/Makefile":
			to += ".debian"
		case !sourceFile.MatchString(d.Name()):
			return nil
		}
		data, err := os.ReadFile(path) //nolint:gosec // sources
		if err != nil {
			return err
		}
		return update(to, data)
	})
	return errors.Join(err, support(t.dir))
}

var sourceFile = regexp.MustCompile(`^(Makefile|Kconfig|.*\.(c|h|S|asm))$`)

// inRoot returns a path as the build sees it.
func (t driverTree) inRoot(path string) string { return strings.TrimPrefix(path, t.kernel.source.root) }

// headers returns the folder of the unpacked headers in the tree.
func (t driverTree) headers() string {
	return filepath.Join("usr", "src", "linux-headers-"+t.kernel.Release)
}

// add copies the additions into the tree. It leaves files that have not changed alone, for
// make.
func (t driverTree) add(additions string) error {
	files, err := contents(additions)
	if err != nil {
		return err
	}
	dir := filepath.Join(t.amdgpu(), "softgpu")
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // sources
		return err
	}
	makefile, err := os.ReadFile(filepath.Join(t.amdgpu(), "Makefile.debian"))
	if err != nil {
		return err
	}
	for _, f := range files {
		if f.name == "Kbuild" {
			makefile = append(append(makefile, '\n'), f.data...)
			continue
		}
		if err := update(filepath.Join(dir, f.name), f.data); err != nil {
			return err
		}
	}
	return update(filepath.Join(t.amdgpu(), "Makefile"), makefile)
}

// update writes a file if its content differs.
func update(path string, data []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) { //nolint:gosec // sources
		return nil
	}
	return os.WriteFile(path, data, 0o644) //nolint:gosec // sources
}

var compilerName = regexp.MustCompile(`gcc-[0-9]+`)

// compiler returns a MissingError if the host lacks the compiler that the headers name.
func (t driverTree) compiler() error {
	if t.kernel.tree || t.kernel.source.root != "" {
		return nil
	}
	text, err := os.ReadFile(filepath.Join(t.dir, t.headers(), ".kernelvariables"))
	if err != nil {
		return err
	}
	name := string(compilerName.Find(text))
	if name == "" {
		return fmt.Errorf("%s names no compiler", filepath.Join(t.headers(), ".kernelvariables"))
	}
	if _, err := exec.LookPath("x86_64-linux-gnu-" + name); err != nil {
		return &MissingError{What: "no " + name + " to build the driver", Remedy: "apt-get install " + name}
	}
	return nil
}

// make builds targets of amdgpu, without debug information. Variables are targets, too.
func (t driverTree) make(ctx context.Context, out io.Writer, targets ...string) error {
	if err := t.compiler(); err != nil {
		return err
	}
	dir, kernel := t.inRoot(t.dir), t.inRoot(filepath.Join(t.dir, t.headers()))
	if t.kernel.tree {
		kernel = t.kernel.dir
	}
	args := []string{
		"-C", kernel, "M=" + t.inRoot(t.amdgpu()), fmt.Sprint("-j", runtime.NumCPU()),
		"CONFIG_DEBUG_INFO=", "CONFIG_DEBUG_INFO_BTF_MODULES=",
		"KCFLAGS=-include " + filepath.Join(dir, "undef.h") + " -I" + filepath.Join(dir, "include", "trace"),
	}
	args = append(args, targets...)
	for _, option := range withoutDisplay {
		args = append(args, option+"=")
	}
	// Variables of this project's make, such as VERSION, have another meaning in the kernel's.
	command, env := []string{"make"}, []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "TMPDIR=" + os.TempDir(), "LC_ALL=C"}
	if root := t.kernel.source.root; root != "" {
		command, env[0] = []string{"unshare", "--root=" + root, "--wd=/", "--mount-proc", "make"}, "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
		env[2] = "TMPDIR=/tmp"
	}
	args = append(command, args...)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // paths of the cache
	cmd.Env = env
	var log buildLog
	cmd.Stdout, cmd.Stderr = &log, &log
	began, stop, ended := time.Now(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(20 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				fmt.Fprintf(out, "vm: building amdgpu: %d files, %.0f s\n", log.files.Load(), time.Since(began).Seconds())
			}
		}
	}()
	err := cmd.Run()
	close(stop)
	<-ended
	if err != nil {
		return fmt.Errorf("build of amdgpu: %w; its messages end with\n%s", err, log.text[max(0, len(log.text)-4096):])
	}
	fmt.Fprintf(out, "vm: built amdgpu: %d files, %.0f s\n", log.files.Load(), time.Since(began).Seconds())
	return nil
}

// buildLog keeps make's output and counts the files it compiles.
type buildLog struct {
	text  []byte
	files atomic.Int64
}

func (l *buildLog) Write(b []byte) (int, error) {
	l.text = append(l.text, b...)
	l.files.Add(int64(bytes.Count(b, []byte("  CC [M]  "))))
	return len(b), nil
}

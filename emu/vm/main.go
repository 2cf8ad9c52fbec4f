// Command vm runs the tests of packages in a QEMU guest with an unmodified Debian
// kernel and its drivers. Nothing is installed, and root is not needed:
//
//	go run ./emu/vm [-deb FILE | -softgpu PARAMETERS [-patch FILE]] [-kernel 6.12|PATH/] [-module amdgpu]
//		[-need /dev/kfd] [-append WORDS] [-clean] [-with COMMANDS] [-limit 5m] PACKAGE[=TESTS[!OTHERS]]...
//	go run ./emu/vm -check -patch FILE
//
// TESTS is a pattern for -test.run, OTHERS one for -test.skip. With -deb the guest is a Debian with systemd as
// its first process, the package file present but not installed, and the driver's modules ready to
// be loaded (debian.go). With
// -softgpu the driver is built from Debian's source with the folder emu/softgpu and loaded
// with these parameters, such as softgpu=2, so that it has GPU nodes (driver.go), and with -patch
// also with that patch (patch.go); -check only applies and compiles the patch. The tests
// get GPREEMPT_GUEST=softgpu, and GPREEMPT_SOFTGPU, GPREEMPT_SEED, GPREEMPT_SCHEDULES and
// GPREEMPT_UNCHECKED of the host. The exit status is 0 when every package passed. It is
// also 0, after a line that begins with SKIP, when the host lacks QEMU or what the build
// needs, or no kernel is available.
//
// The same program is the guest's first process (guest.go).
package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

type options struct {
	kernel, module, need string
	limit                time.Duration
	deb, softgpu, patch  string
	check, clean         bool
	append               string
	with                 string
	packages             []string
}

func main() {
	if inGuest() {
		return
	}
	var o options
	flag.StringVar(&o.kernel, "kernel", "6.12", "the `series` of Debian's kernel, or the path of a tree in which a kernel was built, with a slash")
	flag.StringVar(&o.module, "module", "amdgpu", "kernel `module` to load")
	flag.StringVar(&o.need, "need", "/dev/kfd", "`path` that must exist once the module is loaded")
	flag.DurationVar(&o.limit, "limit", 5*time.Minute, "time limit of the guest")
	flag.StringVar(&o.deb, "deb", "", "a Debian guest with systemd, and this `package` in it")
	flag.StringVar(&o.softgpu, "softgpu", "", "build amdgpu with emu/softgpu and load it with these `parameters`")
	flag.StringVar(&o.patch, "patch", "", "with -softgpu: apply this patch `file` to the driver's source")
	flag.BoolVar(&o.check, "check", false, "check the patch and compile the files that it changes, without a guest")
	flag.BoolVar(&o.clean, "clean", false, "fail if the guest's kernel reports a fault of its own, such as memory that it finds corrupt")
	flag.StringVar(&o.append, "append", "", "more `words` for the kernel's command line")
	flag.StringVar(&o.with, "with", "", "`commands` to build into the guest's /bin, such as ./cmd/gpreemptd,./cmd/gpctl")
	flag.Parse()
	o.packages = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt) //nolint:forbidigo // main makes the first context
	do := run
	if o.check {
		do = checkPatch
	}
	err := do(ctx, o, os.Stdout)
	stop()
	var missing *MissingError
	switch {
	case errors.As(err, &missing) && o.check:
		fmt.Fprintf(os.Stdout, "SKIP check of %s: %v\n", o.patch, missing)
	case errors.As(err, &missing):
		fmt.Fprintf(os.Stdout, "SKIP tests in a guest (%s): %v\n", strings.Join(o.packages, " "), missing)
	case err != nil:
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) error {
	began := time.Now()
	if o.softgpu != "" && o.deb != "" {
		return errors.New("-softgpu and -deb exclude each other")
	}
	if o.patch != "" && o.softgpu == "" {
		return errors.New("-patch needs -softgpu: Debian's module cannot be patched")
	}
	if err := CheckHost(); err != nil {
		return err
	}
	kernel, err := FindKernel(ctx, o.kernel)
	if err != nil {
		return err
	}
	modules, err := kernel.Modules(ctx, o.module)
	if err != nil {
		return err
	}
	if o.softgpu != "" {
		if err := o.replaceDriver(ctx, kernel, modules, out); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp("", "gpreempt-vm-")
	if err != nil {
		return err
	}
	m := Manifest{Nonce: rand.Text(), Need: []string{o.need}, Limit: o.limit}
	initramfs := filepath.Join(dir, "initramfs")
	// kfdemu accesses VRAM that its owner has mapped without rights, by /proc/PID/mem. Debian's kernels
	// allow that since 7.2 to debuggers only. khugepaged has the lowest priority: on one busy CPU it may keep
	// the memory of a process locked for longer than the driver waits for the GPU, which kfdemu plays.
	guest := Guest{
		Kernel: kernel.Image(), Initramfs: initramfs, MemoryMiB: 1024,
		Append: strings.TrimSpace("rdinit=/init oops=panic proc_mem.force_override=always transparent_hugepage=never " + o.words()), Timeout: o.limit + 30*time.Second, Console: filepath.Join(dir, "console"),
	}
	nodes := "no GPU"
	if o.softgpu != "" {
		guest.MemoryMiB, nodes = 2048, "nodes that have no GPU: "+o.softgpu
	}
	content := o.bare(ctx, dir, &m, modules)
	if o.deb != "" {
		content, err = o.debian(ctx, kernel, &guest, &m, modules)
	}
	if err == nil {
		err = o.pack(ctx, dir, initramfs, &m, content)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	built := time.Since(began)
	fmt.Fprintf(out, "vm: Linux %s in QEMU, with %s and %s\n", kernel.Release, o.module, nodes)
	began = time.Now()
	count := counter{out: out}
	results, err := m.Run(ctx, guest, &count)
	if err != nil {
		// The directory is kept for inspection.
		return fmt.Errorf("%w; the guest's files are in %s; last kernel messages:\n%s", err, dir, tail(guest.Console))
	}
	if o.clean {
		reports, err := kernelReports(guest.Console)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "vm: reports of the kernel about itself: %d\n", len(reports))
		if len(reports) > 0 {
			return fmt.Errorf("the kernel reports faults of its own: %s; its console is in %s", strings.Join(reports, "; "), guest.Console)
		}
	}
	failed := 0
	for i, status := range results {
		result := "ok"
		if status != 0 {
			result = fmt.Sprintf("FAILED with status %d", status)
			failed++
		}
		fmt.Fprintf(out, "vm: %-40s %s\n", o.packages[i], result)
	}
	if count.empty {
		return errors.New("a package ran no test: its pattern matches no test")
	}
	fmt.Fprintf(out, "vm: on the real driver of Linux %s: tests passed %d, failed %d, skipped %d; built in %.0f s, guest %.0f s\n",
		kernel.Release, count.passed, count.failed, count.skipped, built.Seconds(), time.Since(began).Seconds())
	if failed > 0 {
		return fmt.Errorf("%d of %d packages failed; the guest's files are in %s", failed, len(results), dir)
	}
	return os.RemoveAll(dir)
}

// kernelReport matches what Linux prints about a fault of its own.
var kernelReport = regexp.MustCompile(`(?m)\b(BUG:? |WARNING: CPU|Oops|INFO: task|general protection|refcount_t:|list_(add|del) corruption|workqueue lockup).*$`)

// kernelReports returns the reports in the kernel's messages. The kernel writes warnings to its console
// with loglevel=5 or more.
func kernelReports(console string) ([]string, error) {
	text, err := os.ReadFile(console)
	return kernelReport.FindAllString(string(text), -1), err
}

// words returns what is added to the kernel's command line.
func (o options) words() string {
	if o.clean {
		return "loglevel=5 " + o.append
	}
	return o.append
}

// tail returns the end of the kernel's messages.
func tail(console string) []byte {
	text, err := os.ReadFile(console)
	if err != nil {
		return []byte(err.Error())
	}
	return text[max(0, len(text)-4096):]
}

// files adds to an archive.
type files func(a *Archive) error

// bare returns the files of a guest without a distribution: modules, commands and tests
// only.
func (o options) bare(ctx context.Context, dir string, m *Manifest, modules []Module) files {
	return func(a *Archive) (err error) {
		if m.Modules, err = addModules(a, "/modules", modules); err != nil {
			return err
		}
		for pkg := range strings.SplitSeq(o.with, ",") {
			if pkg == "" {
				continue
			}
			name := filepath.Base(pkg)
			if err := build(ctx, "build", filepath.Join(dir, name), pkg); err != nil {
				return err
			}
			if err := add(a, "/bin/"+name, filepath.Join(dir, name)); err != nil {
				return err
			}
		}
		return nil
	}
}

// replaceDriver replaces the distribution's amdgpu among modules by one with emu/softgpu.
func (o options) replaceDriver(ctx context.Context, kernel Kernel, modules []Module, out io.Writer) error {
	i := slices.IndexFunc(modules, func(m Module) bool { return m.Name == "amdgpu" })
	if i < 0 {
		return fmt.Errorf("-softgpu replaces amdgpu, which is not among the modules of %s", o.module)
	}
	root, err := repository(ctx)
	if err != nil {
		return err
	}
	if modules[i].Data, err = kernel.BuildDriver(ctx, filepath.Join(root, "emu", "softgpu"), o.patch, out); err != nil {
		return err
	}
	modules[i].Params = o.softgpu
	return nil
}

// repository returns the root of this module's source.
func repository(ctx context.Context) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("go list -m: %w", err)
	}
	return string(bytes.TrimSpace(root)), nil
}

// addModules adds modules, and returns them in the order of loading.
func addModules(a *Archive, dir string, modules []Module) (loads []Load, err error) {
	for i, module := range modules {
		path := fmt.Sprintf("%s/%02d-%s.ko", dir, i, module.Name)
		if err := a.File(path, 0o644, module.Data); err != nil {
			return nil, err
		}
		loads = append(loads, Load{Path: path, Params: module.Params})
	}
	return loads, nil
}

// pack builds the test binaries and writes the guest's initramfs.
func (o options) pack(ctx context.Context, dir, initramfs string, m *Manifest, content files) error {
	f, err := os.Create(initramfs)
	if err != nil {
		return err
	}
	defer f.Close() // on errors
	// The guest is emulated: fast decompression matters more than size.
	z, err := gzip.NewWriterLevel(f, gzip.BestSpeed)
	if err != nil {
		return err
	}
	a := NewArchive(z)
	bin := filepath.Join(dir, "init")
	if err := build(ctx, "build", bin, "github.com/gpreempt/gpreempt/emu/vm"); err != nil {
		return err
	}
	if err := add(a, "/init", bin); err != nil {
		return err
	}
	if err := content(a); err != nil {
		return err
	}
	for i, spec := range o.packages {
		p, err := o.test(ctx, a, filepath.Join(dir, fmt.Sprintf("test-%d", i)), spec)
		if err != nil {
			return err
		}
		m.Programs = append(m.Programs, p)
	}
	if err := m.AddTo(a); err != nil {
		return err
	}
	return errors.Join(a.Close(), z.Close(), f.Close())
}

// test adds the test binary of a package, and its testdata.
func (o options) test(ctx context.Context, a *Archive, bin, spec string) (Program, error) {
	pkg, tests, _ := strings.Cut(spec, "=")
	tests, others, _ := strings.Cut(tests, "!")
	if err := build(ctx, "test", bin, pkg); err != nil {
		return Program{}, err
	}
	module, within := moduleOf(pkg)
	source, err := exec.CommandContext(ctx, "go", "list", "-C", module, "-f", "{{.Dir}}", within).Output() //nolint:gosec // the packages the caller named
	if err != nil {
		return Program{}, fmt.Errorf("go list %s: %w", pkg, err)
	}
	home, above := "/test/"+strings.TrimLeft(pkg, "./"), ""
	p := Program{
		Path: home + "/test", Dir: home,
		Args: []string{"-test.v", "-test.timeout=" + o.limit.String()},
		Env:  []string{"PATH=/bin", "HOME=/tmp", "TMPDIR=/tmp"},
	}
	if o.softgpu != "" {
		p.Env = append(p.Env, "GPREEMPT_GUEST=softgpu")
		for _, name := range []string{"GPREEMPT_SOFTGPU", "GPREEMPT_SEED", "GPREEMPT_SCHEDULES", "GPREEMPT_UNCHECKED"} {
			p.Env = append(p.Env, name+"="+os.Getenv(name))
		}
	}
	if o.deb != "" {
		above = Overlay
		p.Env = debianEnv
		p.Args = append(p.Args, "-test.failfast") // each test continues from the state the previous one left
	}
	if tests != "" {
		p.Args = append(p.Args, "-test.run="+tests)
	}
	if others != "" {
		p.Args = append(p.Args, "-test.skip="+others)
	}
	if err := add(a, above+p.Path, bin); err != nil {
		return Program{}, err
	}
	data := filepath.Join(string(bytes.TrimSpace(source)), "testdata")
	if _, err := os.Stat(data); err != nil {
		return p, nil //nolint:nilerr // most packages have none
	}
	return p, a.Tree(above+home+"/testdata", os.DirFS(data))
}

// moduleOf returns the directory of the module that has a package such as ./lab/kfdtrace, and the
// package's path there.
func moduleOf(pkg string) (dir, within string) {
	if strings.HasPrefix(pkg, "./") {
		for dir = filepath.Dir(filepath.Join(pkg, "x")); dir != "."; dir = filepath.Dir(dir) {
			if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
				return dir, "./" + strings.TrimPrefix(filepath.Clean(pkg), dir+"/")
			}
		}
	}
	return ".", pkg
}

// build builds a static binary: the guest has no shared libraries.
func build(ctx context.Context, verb, out, pkg string) error {
	module, within := moduleOf(pkg)
	args := []string{verb, "-C", module, "-o", out, "-trimpath", "-ldflags=-s -w"}
	if verb == "test" {
		args = append(args, "-c", "-vet=off")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, within)...) //nolint:gosec // the packages the caller named
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s %s: %w\n%s", verb, pkg, err, text)
	}
	return nil
}

func add(a *Archive, name, path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("%w (go test -c writes no binary for a package without tests)", err)
	}
	return a.File(name, 0o755, data)
}

// counter forwards the output of tests and counts their results.
type counter struct {
	out                     io.Writer
	passed, failed, skipped int
	empty                   bool // a package ran no test
}

var testResult = regexp.MustCompile(`(?m)^\s*--- (PASS|FAIL|SKIP): `)

// Write requires whole lines.
func (c *counter) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("testing: warning: no tests to run")) {
		c.empty = true
	}
	for _, m := range testResult.FindAllSubmatch(b, -1) {
		switch string(m[1]) {
		case "PASS":
			c.passed++
		case "FAIL":
			c.failed++
		case "SKIP":
			c.skipped++
		}
	}
	return c.out.Write(b)
}

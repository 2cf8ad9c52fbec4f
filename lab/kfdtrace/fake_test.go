package kfdtrace

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// fakeKernel acts as the kernel's tracefs where a recording relies on it: what is
// made with an instance, and what is refused.
type fakeKernel struct {
	t    *testing.T
	cpus int
	// memoryKiB is available for all buffers of one instance.
	memoryKiB int
	// files are by name, without the newline that a program wrote.
	files  map[string]string
	locked map[string]bool
	// events exist, SYSTEM/EVENT. unfit of them cannot be enabled in an instance.
	events []string
	unfit  string
	// functions are the kernel's, NAME or NAME [MODULE].
	functions []string
	// trace is what trace_pipe returns, a chunk for each read; each is called for its text.
	trace []func() string
	// fail fails the call with this number, from 1, with err.
	fail int
	err  error
	// calls are the calls so far, as OPERATION NAME.
	calls []string
	piped int // open pipes
}

func chunk(text string) func() string { return func() string { return text } }

// newFakeKernel returns a kernel with the driver and everything that a recording can use.
func newFakeKernel(t *testing.T) *fakeKernel {
	t.Helper()
	k := &fakeKernel{
		t: t, files: map[string]string{}, locked: map[string]bool{}, cpus: 2, memoryKiB: 64 << 10,
		events: []string{"amdgpu/amdgpu_iv", "gpu_scheduler/drm_run_job", "sched/sched_switch", "sched/sched_wakeup"},
		functions: []string{
			"vfs_read", "pqm_create_queue [amdgpu]", "pqm_destroy_queue [amdgpu]", "init_mqd [amdgpu]", "init_mqd [amdgpu]",
			"execute_queues_cpsch.constprop.0 [amdgpu]", "update_queue", "kfd_dbg_trap_activate.part.0 [amdgpu]",
		},
	}
	k.put("kprobe_events", "")
	k.putEvents("")
	return k
}

// symbols writes the kernel's symbols, as of /proc/kallsyms, and returns the path.
func (k *fakeKernel) symbols() string {
	path := filepath.Join(k.t.TempDir(), "kallsyms")
	text := "0000000000000000 A fixed_percpu_data\n"
	for i, line := range k.functions {
		symbol, module, _ := strings.Cut(line, " ")
		if module != "" {
			module = "\t" + module
		}
		at := uint64(0xffffffffc0700000) + uint64(i)*64
		text += fmt.Sprintf("%016x t %s%s\n%016x t __pfx_%s%s\n", at, symbol, module, at-16, symbol, module)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		k.t.Fatal(err)
	}
	return path
}

func (k *fakeKernel) put(name, text string) { k.files[name] = text }

func (k *fakeKernel) get(name string) string {
	text, ok := k.files[name]
	if !ok {
		k.t.Errorf("missing file %s", name)
	}
	return text
}

func absent(operation, name string) error {
	return &fs.PathError{Op: operation, Path: name, Err: syscall.ENOENT}
}

func (k *fakeKernel) putEvents(dir string) {
	k.put(dir+"events/enable", "0")
	for _, e := range k.events {
		k.put(dir+"events/"+e+"/enable", "0")
		k.put(dir+"events/"+filepath.Dir(e)+"/enable", "0")
	}
}

// call counts a call and fails the one numbered k.fail.
func (k *fakeKernel) call(operation, name string) error {
	k.calls = append(k.calls, operation+" "+name)
	if len(k.calls) == k.fail {
		return &fs.PathError{Op: operation, Path: name, Err: k.err}
	}
	return nil
}

func (k *fakeKernel) ReadFile(name string) ([]byte, error) {
	if err := k.call("read", name); err != nil {
		return nil, err
	}
	text, ok := k.files[name]
	if !ok {
		return nil, absent("open", name)
	}
	return []byte(text + "\n"), nil
}

func (k *fakeKernel) List(dir string) ([]string, error) {
	if err := k.call("list", dir); err != nil {
		return nil, err
	}
	return k.list(dir), nil
}

func (k *fakeKernel) list(dir string) []string {
	names := map[string]bool{}
	for path := range k.files {
		if below, ok := strings.CutPrefix(path, dir+"/"); ok {
			name, _, _ := strings.Cut(below, "/")
			names[name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

type fakeLock struct {
	k   *fakeKernel
	dir string
}

func (l *fakeLock) Close() error {
	delete(l.k.locked, l.dir)
	return nil
}

func (k *fakeKernel) Lock(dir string) (io.Closer, error) {
	if err := k.call("lock", dir); err != nil {
		return nil, err
	}
	if k.locked[dir] {
		return nil, ErrLocked
	}
	k.locked[dir] = true
	return &fakeLock{k, dir}, nil
}

func (k *fakeKernel) Mkdir(dir string) error {
	if err := k.call("mkdir", dir); err != nil {
		return err
	}
	if len(k.list(dir)) > 0 {
		return &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.EEXIST}
	}
	k.put(dir+"/tracing_on", "1")
	k.put(dir+"/trace_clock", "[local] global mono")
	k.put(dir+"/buffer_size_kb", "1410")
	k.put(dir+"/trace_marker", "")
	k.put(dir+"/trace_pipe", "")
	k.put(dir+"/options/raw", "1") // set at the top level
	k.put(dir+"/options/irq-info", "1")
	for cpu := range k.cpus {
		k.put(fmt.Sprintf("%s/per_cpu/cpu%d/stats", dir, cpu), "overrun: 0")
	}
	k.putEvents(dir + "/")
	return nil
}

func (k *fakeKernel) Remove(dir string) error {
	if err := k.call("rmdir", dir); err != nil {
		return err
	}
	if k.piped > 0 {
		return &fs.PathError{Op: "rmdir", Path: dir, Err: syscall.EBUSY}
	}
	maps.DeleteFunc(k.files, func(name, _ string) bool { return strings.HasPrefix(name, dir+"/") })
	return nil
}

func (k *fakeKernel) Write(name, data string) error {
	if err := k.call("write", name); err != nil {
		return err
	}
	if _, ok := k.files[name]; !ok {
		return absent("open", name)
	}
	if err := k.write(name, strings.TrimSuffix(data, "\n")); err != nil {
		return &fs.PathError{Op: "write", Path: name, Err: err}
	}
	return nil
}

func (k *fakeKernel) write(name, data string) error {
	dir, base := filepath.Split(name)
	switch {
	case name == kprobeEvents:
		return k.define(data)
	case base == "buffer_size_kb":
		kib, err := strconv.Atoi(data)
		if err != nil {
			return syscall.EINVAL
		}
		if kib*k.cpus > k.memoryKiB {
			return syscall.ENOMEM
		}
	case k.unfit != "" && strings.HasSuffix(name, k.unfit+"/enable"):
		return syscall.EINVAL
	case strings.HasSuffix(dir, "/events/"): // all of them
		for file := range k.files {
			if strings.HasPrefix(file, dir) && strings.HasSuffix(file, "/enable") {
				k.put(file, data)
			}
		}
	}
	k.put(name, data)
	return nil
}

// dirs are the top level and the instances, as prefixes of names.
func (k *fakeKernel) dirs() []string {
	dirs := []string{""}
	for _, name := range k.list("instances") {
		dirs = append(dirs, "instances/"+name+"/")
	}
	return dirs
}

// define makes or removes a probe: "p:GROUP/NAME ADDRESS", "-:GROUP/NAME".
func (k *fakeKernel) define(line string) error {
	definition, at, _ := strings.Cut(line, " ")
	kind, name, _ := strings.Cut(definition, ":")
	probes := slices.DeleteFunc(strings.Split(k.get(kprobeEvents), "\n"), func(s string) bool { return s == "" })
	i := slices.IndexFunc(probes, func(p string) bool { return strings.Contains(p, ":"+name+" ") })
	switch {
	case kind == "-" && i < 0:
		return syscall.ENOENT
	case kind == "-":
		for _, dir := range k.dirs() {
			if k.files[dir+"events/"+filepath.Dir(name)+"/enable"] == "1" {
				return syscall.EBUSY
			}
		}
		probes = slices.Delete(probes, i, i+1)
	case i >= 0:
		return syscall.EEXIST
	case !strings.HasPrefix(at, "0x"):
		return syscall.EINVAL
	default:
		if kind == "r" {
			definition = "r10:" + name
		}
		probes = append(probes, definition+" "+at)
		for _, dir := range k.dirs() {
			k.put(dir+"events/"+filepath.Dir(name)+"/enable", "0")
		}
	}
	k.put(kprobeEvents, strings.Join(probes, "\n"))
	return nil
}

func (k *fakeKernel) OpenPipe(name string) (Pipe, error) {
	if err := k.call("open", name); err != nil {
		return nil, err
	}
	k.piped++
	return &fakePipe{k: k, dir: filepath.Dir(name)}, nil
}

type fakePipe struct {
	k   *fakeKernel
	dir string
}

var errOff = errors.New("the trace was read while it was set up")

func (p *fakePipe) ReadSome(b []byte) (int, error) {
	if err := p.k.call("read", "trace_pipe"); err != nil {
		return 0, err
	}
	if len(p.k.trace) == 0 {
		return 0, nil
	}
	if p.k.get(p.dir+"/trace_marker") == "" {
		return 0, errOff
	}
	next := p.k.trace[0]
	p.k.trace = p.k.trace[1:]
	return copy(b, next()), nil
}

func (p *fakePipe) Close() error {
	p.k.piped--
	return p.k.call("close", "trace_pipe")
}

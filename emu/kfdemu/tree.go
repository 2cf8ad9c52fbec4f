package kfdemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Paths in the tree of gpumodel, which has no links, and in that of the host.
const (
	classDir  = "sys/class/kfd/kfd"
	deviceDir = "sys/devices/virtual/kfd/kfd"
	debugDir  = "sys/kernel/debug/kfd"
	procDir   = deviceDir + "/proc"
	nodesDir  = deviceDir + "/topology/nodes"
)

// modulesFile replaces the host's list of loaded modules, in which rocminfo looks for the
// driver.
const (
	modulesFile = "modules"
	hostModules = "/proc/modules"
)

// scratchDir has files before they are renamed to their place.
const scratchDir = "scratch"

// Tree is a directory of plain files: those of an emulated driver in /sys and /dev, which
// its owner updates. A program that enters it has them at their places among the host's:
// the tree is mounted over /sys and /dev, and the host's other entries are bound into it.
// The host itself is not changed, and nothing is mounted outside of the program's namespace.
//
// Nothing in these files comes from hardware: values that gpumodel does not have are
// invented in the driver's formats. The methods may be called by several goroutines.
type Tree struct {
	dir   string
	files func() fs.FS
	// nodes is the topology.
	nodes []node

	// mu guards what follows, and is held while files are written.
	mu sync.Mutex
	// procs is the content of each directory in procDir as last written.
	procs map[string]folder
	// vms is the content of proc in debugDir as last written.
	vms folder
	// made numbers the entries of scratchDir.
	made   uint64
	closed bool
}

// NewTree writes the tree of files() to a new directory: its sys, at the places of the driver, and other
// files that ROCm's libraries and tools read. It leaves out proc: the processes are real.
// files is called for each update.
//
// The directory is on a tmpfs, if one is writable: there inode numbers are not reused, on
// which readers of sysfs depend.
func NewTree(files func() fs.FS) (_ *Tree, err error) {
	dir, err := os.MkdirTemp(tmpfs(), fmt.Sprintf("kfdemu-%d-", os.Getpid()))
	if err != nil {
		return nil, fmt.Errorf("make the directory of the emulated sysfs: %w", err)
	}
	t := &Tree{dir: dir, files: files, procs: map[string]folder{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	for _, name := range []string{scratchDir, procDir, debugDir + "/proc"} {
		if err := mkdirAll(t.path(name)); err != nil {
			return nil, fmt.Errorf("write the emulated sysfs: %w", err)
		}
	}
	if err := t.writeStatic(files()); err != nil {
		return nil, fmt.Errorf("write the emulated sysfs: %w", err)
	}
	if err := errors.Join(t.Processes(), t.Debugfs()); err != nil {
		return nil, err
	}
	return t, nil
}

// tmpfs returns a writable directory on a tmpfs, or else the one for temporary files.
func tmpfs() string {
	for _, dir := range []string{"/run", os.Getenv("XDG_RUNTIME_DIR"), "/dev/shm"} {
		var st unix.Statfs_t
		if dir != "" && unix.Statfs(dir, &st) == nil && st.Type == unix.TMPFS_MAGIC && unix.Access(dir, unix.W_OK|unix.X_OK) == nil {
			return dir
		}
	}
	return os.TempDir()
}

// Dir returns the directory of the tree, which has sys and dev.
func (t *Tree) Dir() string { return t.dir }

// Close removes the tree. Programs that entered it keep the files that they have open,
// which no longer change.
func (t *Tree) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	if err := os.RemoveAll(t.dir); err != nil {
		return fmt.Errorf("remove the emulated sysfs: %w", err)
	}
	return nil
}

func (t *Tree) path(name string) string { return t.dir + "/" + name }

// writeStatic writes the files that do not change.
func (t *Tree) writeStatic(files fs.FS) error {
	modelled, err := readNodes(files)
	if err != nil {
		return err
	}
	host, err := hostNodes()
	if err != nil {
		return err
	}
	t.nodes = onHost(modelled, host)
	all, links, err := made(t.nodes)
	if err != nil {
		return err
	}
	err = fs.WalkDir(files, "sys", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case name == classDir+"/proc" || name == classDir+"/topology/nodes" || name == debugDir:
			return fs.SkipDir
		case d.IsDir():
			return nil
		}
		b, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		if rest, ok := strings.CutPrefix(name, classDir); ok {
			name = deviceDir + rest
		}
		all[name] = string(b)
		return nil
	})
	if err != nil {
		return err
	}
	loaded, err := os.ReadFile(hostModules)
	switch {
	case err == nil:
		all[modulesFile] = withDriver(string(loaded))
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	for name, text := range all {
		if err := write(t.path(name), text); err != nil {
			return err
		}
	}
	for name, target := range links {
		if err := mkdirAll(path.Dir(t.path(name))); err != nil {
			return err
		}
		if err := os.Symlink(target, t.path(name)); err != nil {
			return err
		}
	}
	return nil
}

// withDriver returns a list of loaded modules with the driver in it, once.
func withDriver(loaded string) string {
	var b strings.Builder
	b.WriteString("amdgpu 1 0 - Live 0x0000000000000000\n")
	for line := range strings.Lines(loaded) {
		if !strings.HasPrefix(line, "amdgpu ") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// write creates a file that all users may read, independent of the umask, and the
// directories above it.
func write(name, text string) error {
	if err := mkdirAll(path.Dir(name)); err != nil {
		return err
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Chmod(name, 0o444) //nolint:gosec // as above
}

// mkdirAll creates a directory and those above it, readable for all users.
func mkdirAll(name string) error {
	if st, err := os.Stat(name); err == nil && st.IsDir() {
		return nil
	}
	if err := mkdirAll(path.Dir(name)); err != nil {
		return err
	}
	if err := os.Mkdir(name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.Chmod(name, 0o755) //nolint:gosec // as above
}

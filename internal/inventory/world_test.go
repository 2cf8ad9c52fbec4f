package inventory_test

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// variables are the environment variables of the children.
var variables = []string{"GPREEMPT_CLASS", "AMD_QUEUE_TAG"}

// child is a real process, whose command line and environment have the same tag.
type child struct {
	cmd   *exec.Cmd
	stdin io.Closer
	tag   string
	key   gpreempt.ProcessKey
}

func startChild(t *testing.T, tag string) *child {
	t.Helper()
	return startChildIf(t, tag, func(int32) bool { return true })
}

// startChildIf starts a child and returns nil when ok rejects its pid.
func startChildIf(t *testing.T, tag string, ok func(pid int32) bool) *child {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: exec.Command(self, "-tag", tag), tag: tag}
	c.cmd.Env = append(os.Environ(), inventory.ChildEnv+"=1", "GPREEMPT_CLASS="+tag, "AMD_QUEUE_TAG=of "+tag)
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := c.cmd.Process.Pid
	if !ok(int32(pid)) {
		c.end()
		return nil
	}
	// Until its program is loaded a process has no command line.
	if _, err := io.Copy(io.Discard, stdout); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	stat, err := discovery.ParseProcStat(b)
	if err != nil {
		t.Fatal(err)
	}
	c.key = gpreempt.ProcessKey{PID: int32(pid), Start: stat.Start}
	return c
}

// end kills the child. Then its pid is free.
func (c *child) end() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
	_ = c.stdin.Close()
}

// process returns what a scan should find of the child.
func (c *child) process(t *testing.T) gpreempt.Process {
	t.Helper()
	exe, err := filepath.EvalSymlinks(c.cmd.Path)
	if err != nil {
		t.Fatal(err)
	}
	cgroup, err := os.ReadFile("/proc/self/cgroup")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	comm := filepath.Base(c.cmd.Path)
	return gpreempt.Process{
		Key: c.key, Comm: comm[:min(len(comm), 15)], Cmdline: strings.Join(c.cmd.Args, " "), Exe: exe,
		UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()),
		Env:    map[string]string{"GPREEMPT_CLASS": c.tag, "AMD_QUEUE_TAG": "of " + c.tag},
		Cgroup: discovery.ParseCgroup(cgroup),
	}
}

// world is a simulated sysfs on a real file system that never uses an inode number
// twice, beside the real /proc.
type world struct {
	t          *testing.T
	dir, procs string
	made       int
}

const tmpfsMagic = 0x01021994

func newWorld(t *testing.T) *world {
	t.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs("/dev/shm", &st); err != nil || st.Type != tmpfsMagic {
		t.Skip("needs a tmpfs at /dev/shm: on other file systems inode numbers are used again, unlike on sysfs")
	}
	dir, err := os.MkdirTemp("/dev/shm", "gpreempt") //nolint:usetesting // TempDir is rarely on a tmpfs
	if err != nil {
		t.Skipf("needs to write to /dev/shm: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	w := &world{t: t, dir: dir, procs: filepath.Join(dir, "sys/class/kfd/kfd/proc")}
	for _, path := range []string{w.procs, filepath.Join(dir, "outside")} {
		w.must(os.MkdirAll(path, 0o755))
	}
	w.must(os.Symlink("/proc", filepath.Join(dir, "proc")))
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) files() *discovery.FS {
	f := discovery.NewFS(discovery.Host(w.dir))
	f.SetEnv(variables)
	return f
}

// outside returns a new path beside the tree: renaming from and to it makes changes of
// the tree atomic.
func (w *world) outside() string {
	w.made++
	return filepath.Join(w.dir, "outside", strconv.Itoa(w.made))
}

func (w *world) process(pid int32) string { return filepath.Join(w.procs, strconv.Itoa(int(pid))) }

func (w *world) queueDir(q gpreempt.Queue) string {
	return filepath.Join(w.process(q.Process.PID), "queues", strconv.Itoa(int(q.ID)))
}

// addProcess adds a process to KFD's list.
func (w *world) addProcess(pid int32) {
	w.t.Helper()
	dir := w.outside()
	w.must(os.MkdirAll(filepath.Join(dir, "queues"), 0o755))
	w.must(os.WriteFile(filepath.Join(dir, "pasid"), []byte("32770\n"), 0o644))
	w.must(os.Rename(dir, w.process(pid)))
}

// addQueue adds a queue of a process.
func (w *world) addQueue(q gpreempt.Queue) {
	w.t.Helper()
	dir := w.outside()
	w.must(os.Mkdir(dir, 0o755))
	for name, text := range map[string]string{"gpuid": q.GPU.String(), "size": strconv.FormatUint(q.RingBytes, 10), "type": "0"} {
		w.must(os.WriteFile(filepath.Join(dir, name), []byte(text), 0o444))
	}
	w.must(os.Rename(dir, w.queueDir(q)))
}

func (w *world) remove(path string) {
	w.t.Helper()
	dir := w.outside()
	w.must(os.Rename(path, dir))
	w.must(os.RemoveAll(dir))
}

// whole reports whether a scan has read all of a process's memory that it shows.
func whole(p gpreempt.Process) bool {
	return p.Cmdline != "" && p.Exe != "" && len(p.Env) == len(variables)
}

// tagged reports whether everything that is known of a process has the tag.
func tagged(p gpreempt.Process, tag string) bool {
	return (p.Cmdline == "" || slices.Contains(strings.Fields(p.Cmdline), tag)) &&
		(len(p.Env) == 0 || p.Env["GPREEMPT_CLASS"] == tag && p.Env["AMD_QUEUE_TAG"] == "of "+tag)
}

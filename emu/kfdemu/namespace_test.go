package kfdemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// newTree returns the tree of a machine with two queues of this process.
func newTree(tb testing.TB) (*Tree, *machine, []gpreempt.Queue) {
	tb.Helper()
	m, queues, err := newMachine()
	if err != nil {
		tb.Fatal(err)
	}
	t, err := NewTree(func() fs.FS { return m.FS() })
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := t.Close(); err != nil {
			tb.Error(err)
		}
	})
	return t, m, queues
}

// lookInside returns what a program finds that entered the tree, or skips the test. The tree is
// prepared already.
func lookInside(tb testing.TB, t *Tree) (s sight) {
	tb.Helper()
	cmd := roleCommand("join", t.Dir())
	var refusal strings.Builder
	cmd.Stderr = &refusal
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == notAllowed {
		tb.Skip(refusal.String())
	}
	if err != nil {
		tb.Fatalf("%v: %s", err, refusal.String())
	}
	decode(tb, out, &s)
	return s
}

func merge(tb testing.TB, t *Tree) {
	tb.Helper()
	if err := t.Merge(); err != nil {
		tb.Fatal(err)
	}
}

// fromMachine returns what a program should find of a machine.
func fromMachine(tb testing.TB, m *machine, queues []gpreempt.Queue) sight {
	tb.Helper()
	s := sight{
		GPUs: gpusOf(tb, m.Machine), Queues: queues, MQDs: map[int32]int{queues[0].Process.PID: len(queues)},
		Devices: map[string]string{
			"/dev/kfd": "20666 236:0", "/dev/dri/renderD128": "20666 226:128", "/dev/dri/renderD129": "20666 226:129", "/dev/null": "20666 1:3",
		},
		Nearby: map[string][]string{}, ReadOnly: true, Natively: syscall.EACCES.Error(),
	}
	var err error
	if s.Modules, err = modules(); err != nil {
		tb.Fatal(err)
	}
	if s.Modules != "" {
		s.Modules = "amdgpu 1 0 - Live 0x0000000000000000\n" + s.Modules
	}
	for _, dir := range nearby {
		if s.Nearby[dir], err = names(dir); err != nil {
			tb.Fatal(err)
		}
	}
	return s
}

// gpusOf returns the GPUs of a machine, numbered after the CPU nodes of this host.
func gpusOf(tb testing.TB, m *gpumodel.Machine) []gpreempt.GPU {
	tb.Helper()
	gpus, err := discovery.NewFS(m.FS()).GPUs()
	if err != nil {
		tb.Fatal(err)
	}
	for i := range gpus {
		gpus[i].Node = cpuNodes(tb) + i
		gpus[i].Name = "Emulated " + gpreempt.GFXName(gpus[i].GFX)
	}
	return gpus
}

func TestAProgramInTheNamespaceFindsTheEmulatedDriver(t *testing.T) {
	emulated, m, queues := newTree(t)
	merge(t, emulated)
	want := fromMachine(t, m, queues)
	var err error
	if want.Effective, err = effective(); err != nil {
		t.Fatal(err)
	}
	if want.Dir, err = os.Getwd(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, lookInside(t, emulated)); diff != "" {
		t.Errorf("what the program sees (-want +got):\n%s", diff)
	}
}

func TestTheNamespaceFollowsTheMachine(t *testing.T) {
	emulated, m, queues := newTree(t)
	merge(t, emulated) // before the queue below
	key := queues[0].Process
	id, err := m.CreateQueue(key, m.GPUs()[1].ID, gpreempt.QueueCompute, 2048)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.DestroyQueue(key, queues[0].ID); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(emulated.Processes(key.PID), emulated.Debugfs("mqds")); err != nil {
		t.Fatal(err)
	}
	got := lookInside(t, emulated)
	want := []gpreempt.Queue{queues[1], {Process: key, ID: id, GPU: m.GPUs()[1].ID, Type: gpreempt.QueueCompute, RingBytes: 2048 * 64}}
	if diff := cmp.Diff(want, got.Queues); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[int32]int{key.PID: 2}, got.MQDs); diff != "" {
		t.Errorf("queues in mqds (-want +got):\n%s", diff)
	}
}

// hostView returns, as this process finds it, what the tree is mounted over.
func hostView(tb testing.TB) map[string][]string {
	tb.Helper()
	view := map[string][]string{}
	for _, dir := range append([]string{"/sys", "/dev", "/sys/class", "/sys/class/kfd", "/sys/kernel/debug"}, nearby...) {
		all, err := names(dir)
		if err != nil {
			tb.Fatal(err)
		}
		view[dir] = all
	}
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		tb.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[4] == "/sys" || f[4] == "/dev" || strings.Contains(line, "kfdemu") {
			view["mounts"] = append(view["mounts"], line)
		}
	}
	return view
}

func TestTheHostDoesNotChange(t *testing.T) {
	before := hostView(t)
	emulated, _, _ := newTree(t)
	merge(t, emulated)
	lookInside(t, emulated)
	if diff := cmp.Diff(before, hostView(t)); diff != "" {
		t.Errorf("the host while there is a namespace (-before +now):\n%s", diff)
	}
	if err := emulated.Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, hostView(t)); diff != "" {
		t.Errorf("the host afterwards (-before +now):\n%s", diff)
	}
	if _, err := os.Stat(emulated.Dir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left: %v", emulated.Dir(), err)
	}
}

// addresses are those in the list of loaded modules, which not all users may read.
var addresses = regexp.MustCompile("0x[0-9a-f]+")

// hidepid is the option of /proc that hides other users' processes.
var hidepid = regexp.MustCompile(`(?m)^proc /proc .*\bhidepid=(2|invisible|4|ptraceable)`)

// nobody is a user without privileges.
const nobody = 1000

func TestAnUnprivilegedEmulatorHasAUserNamespace(t *testing.T) {
	cmd := roleCommand("unprivileged", "")
	uid := uint32(os.Getuid())
	if uid == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		uid = nobody
	}
	var refusal strings.Builder
	cmd.Stderr = &refusal
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == notAllowed {
		t.Skipf("user %d may have no user namespace with mounts here: %s", uid, refusal.String())
	}
	if err != nil {
		t.Fatalf("%v: %s", err, refusal.String())
	}
	var got sight
	decode(t, out, &got)
	m, queues, err := newMachine()
	if err != nil {
		t.Fatal(err)
	}
	if mounts, err := os.ReadFile("/proc/self/mounts"); err == nil && hidepid.Match(mounts) && len(got.Queues) == 0 {
		t.Skip("/proc is mounted with hidepid, which hides the emulator from programs in another user namespace")
	}
	want := fromMachine(t, m, queues)
	// Device files cannot be created there: these are other ones of the right kind.
	for name := range want.Devices {
		want.Devices[name] = want.Devices["/dev/null"]
	}
	want.Natively = "opened"
	// The queues are those of the emulator.
	emulator := got.Queues[0].Process
	for i := range want.Queues {
		want.Queues[i].Process = emulator
	}
	// The process is outside of the program's user namespace.
	want.Warnings = []string{fmt.Sprintf("program of process %[1]d omitted: readlink /proc/%[1]d/exe: permission denied", emulator.PID)}
	want.MQDs = map[int32]int{emulator.PID: len(queues)}
	want.Effective = "0000000000080000" // CAP_SYS_PTRACE
	// Programs of other users read no addresses.
	want.Modules = addresses.ReplaceAllString(want.Modules, "")
	got.Modules = addresses.ReplaceAllString(got.Modules, "")
	if want.Dir, err = os.Getwd(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what the program sees (-want +got):\n%s", diff)
	}
}

func TestARefusalNamesWhatIsMissing(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to start a program as another user")
	}
	cmd := roleCommand("refused", "")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	want := "mount the emulated sysfs: not allowed: unshare: operation not permitted: " +
		"the process has no CAP_SYS_ADMIN: run it as root, with that capability, or in a user namespace\n"
	if diff := cmp.Diff(want, string(out)); diff != "" {
		t.Errorf("the refusal (-want +got):\n%s", diff)
	}
}

func TestNothingIsMergedWithAMissingTree(t *testing.T) {
	emulated, _, _ := newTree(t)
	if err := os.RemoveAll(filepath.Join(emulated.Dir(), "sys")); err != nil {
		t.Fatal(err)
	}
	if err := emulated.Merge(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want that the directory is missing", err)
	}
}

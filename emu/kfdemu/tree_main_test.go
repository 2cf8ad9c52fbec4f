package kfdemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// roleVariable selects a program that the test binary runs instead of the tests.
const roleVariable = "KFDEMU_TEST_ROLE"

// roles are the programs that the tests run. They report on standard output.
var roles = map[string]func(dir string) error{
	"join": join, "enter": enterWithoutRights, "look": look, "unprivileged": unprivileged, "refused": refused,
}

// notAllowed is the exit code of a role that the host does not allow.
const notAllowed = 2

// runRole runs a role and exits.
func runRole(role, dir string) {
	if err := roles[role](dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		if errors.Is(err, ErrPrivilege) {
			os.Exit(notAllowed)
		}
		os.Exit(1)
	}
	os.Exit(0)
}

// become executes the test binary in another role, in the calling thread's place.
func become(role, dir string) error {
	if err := os.Setenv(roleVariable, role+":"+dir); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", os.Args, os.Environ())
}

// roleCommand is the test binary in a role.
func roleCommand(role, dir string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+role+":"+dir)
	cmd.Stderr = os.Stderr
	return cmd
}

func decode(tb testing.TB, text []byte, v any) {
	tb.Helper()
	if err := json.Unmarshal(text, v); err != nil {
		tb.Fatalf("%q: %v", text, err)
	}
}

// join enters a tree as a launcher does.
func join(dir string) error {
	runtime.LockOSThread()
	if err := Enter(dir); err != nil {
		return err
	}
	return become("look", "")
}

// enterWithoutRights enters as a launcher that was started with the attributes of UserNamespace.
func enterWithoutRights(dir string) error {
	runtime.LockOSThread()
	if err := Enter(dir); err != nil {
		return err
	}
	if err := DropPrivileges(); err != nil {
		return err
	}
	return become("look", dir)
}

// sight is the emulated driver as a program finds it.
type sight struct {
	GPUs     []gpreempt.GPU
	Queues   []gpreempt.Queue
	Warnings []string
	// MQDs is the number of queues in mqds, by process.
	MQDs map[int32]int
	// Devices has the mode and the number of the device files.
	Devices map[string]string
	// Nearby has the entries beside the emulated driver's.
	Nearby map[string][]string
	// ReadOnly: the files cannot be changed. Natively is the result of opening /dev/kfd.
	ReadOnly bool
	Natively string
	// Modules has the list of loaded modules, if the kernel has one.
	Modules string
	// Effective are the program's capabilities.
	Effective string
	Dir       string
}

func look(string) error {
	s := sight{MQDs: map[int32]int{}, Devices: map[string]string{}, Nearby: map[string][]string{}}
	host := discovery.NewFS(discovery.Host("/"))
	var err error
	if s.GPUs, err = host.GPUs(); err != nil {
		return err
	}
	snapshot, err := host.Scan()
	if err != nil {
		return err
	}
	s.Warnings = snapshot.Warnings
	for _, p := range snapshot.Processes {
		s.Queues = append(s.Queues, p.Queues...)
	}
	text, err := os.ReadFile("/" + debugfs.MQDs)
	if err != nil {
		return err
	}
	dump, err := debugfs.ParseMQDs(text)
	if err != nil {
		return err
	}
	for _, p := range dump.Processes {
		s.MQDs[p.PID] = len(p.Queues)
	}
	for _, name := range []string{"/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129", "/dev/null"} {
		var st unix.Stat_t
		if err := unix.Stat(name, &st); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		s.Devices[name] = fmt.Sprintf("%o %d:%d", st.Mode, unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	for _, dir := range nearby {
		if s.Nearby[dir], err = names(dir); err != nil {
			return err
		}
	}
	err = os.WriteFile("/sys/class/kfd/kfd/topology/generation_id", nil, 0o600)
	s.ReadOnly = errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.EACCES)
	if f, err := os.OpenFile("/dev/kfd", os.O_RDWR, 0); err != nil {
		s.Natively = errors.Unwrap(err).Error()
	} else {
		s.Natively = "opened"
		f.Close()
	}
	if err := os.WriteFile("/dev/null", []byte("text"), 0o600); err != nil {
		return err
	}
	if s.Modules, err = modules(); err != nil {
		return err
	}
	if s.Effective, err = effective(); err != nil {
		return err
	}
	if s.Dir, err = os.Getwd(); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(s)
}

// nearby are directories that are the same as on the host.
var nearby = []string{"/sys/fs/cgroup", "/sys/class/net", "/sys/bus/pci/devices", "/sys/devices/system", "/dev/pts"}

// names returns the entries of a directory, if it exists.
func names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	all := []string{}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all, err
}

func modules() (string, error) {
	b, err := os.ReadFile("/proc/modules")
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return string(b), err
}

func effective() (string, error) {
	b, err := os.ReadFile("/proc/thread-self/status")
	_, rest, _ := strings.Cut(string(b), "CapEff:")
	mask, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
	return mask, err
}

// self is the key of this process.
func self() (gpreempt.ProcessKey, error) {
	b, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return gpreempt.ProcessKey{}, err
	}
	st, err := discovery.ParseProcStat(b)
	return gpreempt.ProcessKey{PID: int32(os.Getpid()), Start: st.Start}, err
}

// machine is a machine one process of which makes queues.
type machine struct {
	*gpumodel.Machine
	ids map[uint32]bool // of its queues
}

// CreateQueue makes a queue with the lowest free id.
func (m *machine) CreateQueue(key gpreempt.ProcessKey, gpu gpreempt.GPUID, typ gpreempt.QueueType, packets int) (uint32, error) {
	id := uint32(0)
	for m.ids[id] {
		id++
	}
	ring := uint64(id+1) << 32
	err := m.AttachQueue(key, gpumodel.QueueSpec{
		ID: id, GPU: gpu, Type: typ, Ring: ring, RingBytes: uint64(packets) * 64, Read: ring + 1<<24, Write: ring + 1<<24 + 8, Doorbell: id * 8,
	})
	m.ids[id] = err == nil
	return id, err
}

func (m *machine) DestroyQueue(key gpreempt.ProcessKey, id uint32) error {
	delete(m.ids, id)
	return m.DetachQueue(key, id)
}

// newMachine returns a machine with two GPUs on which this process has two queues.
func newMachine() (*machine, []gpreempt.Queue, error) {
	spec, err := gpumodel.PresetByName("mi300x")
	if err != nil {
		return nil, nil, err
	}
	key, err := self()
	if err != nil {
		return nil, nil, err
	}
	m := &machine{gpumodel.New(spec, 2, 1), map[uint32]bool{}}
	if _, err := m.StartProcess(gpumodel.ProcSpec{PID: key.PID, Start: key.Start}); err != nil {
		return nil, nil, err
	}
	var queues []gpreempt.Queue
	for i, typ := range []gpreempt.QueueType{gpreempt.QueueCompute, gpreempt.QueueSDMA} {
		const packets, packetBytes = 1024, 64
		gpu := m.GPUs()[i].ID
		id, err := m.CreateQueue(key, gpu, typ, packets)
		if err != nil {
			return nil, nil, err
		}
		queues = append(queues, gpreempt.Queue{Process: key, ID: id, GPU: gpu, Type: typ, RingBytes: packets * packetBytes})
	}
	return m, queues, nil
}

// unprivileged is an emulator without privileges that starts a program.
func unprivileged(string) (err error) {
	m, _, err := newMachine()
	if err != nil {
		return err
	}
	t, err := NewTree(func() fs.FS { return m.FS() })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	if err := t.Merge(); err != nil {
		return err
	}
	cmd := roleCommand("enter", t.Dir())
	if cmd.SysProcAttr, err = UserNamespace(); err != nil {
		return err
	}
	cmd.Stdout = os.Stdout
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start a program in a user namespace: %w: %w", ErrPrivilege, err)
	}
	err = cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == notAllowed {
		return ErrPrivilege
	}
	return err
}

// refused is an emulator that may not enter its tree. It reports the error.
func refused(string) (err error) {
	m, _, err := newMachine()
	if err != nil {
		return err
	}
	t, err := NewTree(func() fs.FS { return m.FS() })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	if err := t.Merge(); err != nil {
		return err
	}
	runtime.LockOSThread()
	err = Enter(t.Dir())
	if !errors.Is(err, ErrPrivilege) {
		return fmt.Errorf("entering the tree gave %w, not ErrPrivilege", err)
	}
	fmt.Println(err)
	return nil
}

package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

const (
	nodeName = "node"
	nodeIP   = "10.200.0.1"
	// serviceIP is the API server's for pods. It is an address of the node, so there is no kube-proxy.
	serviceIP = "10.96.0.1"
	nodeTemp  = "/run/tmp"
)

// prepareNode makes the files and the network of the node, in the namespaces of this process: what is
// written below /var and /run is in memory.
func prepareNode() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make all mounts private: %w", err)
	}
	if err := unix.Mount("run", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	for _, dir := range []string{"/run/var/upper", "/run/var/work", nodeTemp, "/run/cni", "/run/kfdemu"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := hideSettings(); err != nil {
		return err
	}
	if err := unix.Mount("var", "/var", "overlay", 0, "lowerdir=/var,upperdir=/run/var/upper,workdir=/run/var/work"); err != nil {
		return fmt.Errorf("mount /var: %w", err)
	}
	for _, dir := range []string{"/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/var/log"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("node", dir, "tmpfs", 0, "mode=755"); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	if err := unix.Sethostname([]byte(nodeName)); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"link", "add", "node0", "type", "bridge"},
		{"address", "add", nodeIP + "/24", "dev", "node0"},
		{"address", "add", serviceIP + "/32", "dev", "node0"},
		{"link", "set", "node0", "up"},
		{"route", "add", "default", "dev", "node0"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %q: %w: %s", args, err, out)
		}
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
}

// settings are those of the host's kernel that the kubelet requires, and would set.
var settings = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// hideSettings has the kubelet find them as it requires, so that it does not set them.
func hideSettings() error {
	for name, value := range settings {
		file := "/run/settings/" + name
		err := os.MkdirAll(filepath.Dir(file), 0o755)
		if err == nil {
			err = os.WriteFile(file, []byte(value+"\n"), 0o644)
		}
		if err == nil {
			err = unix.Mount(file, "/proc/sys/"+name, "", unix.MS_BIND, "")
		}
		if err != nil {
			return fmt.Errorf("hide the host's setting %s: %w", name, err)
		}
	}
	return nil
}

// machine is the emulated machine with the mount namespace of the node.
type machine struct {
	*kfdemu.Emulator
	starts chan func()
}

// emulate starts the machine of the node.
func emulate() (*machine, error) {
	e, err := kfdemu.New(kfdemu.Config{Machine: "mi300x", Dir: "/run/kfdemu", Shim: built("kfdemu")})
	if err != nil {
		return nil, err
	}
	m := &machine{e, make(chan func())}
	entered := make(chan error)
	go func() {
		runtime.LockOSThread() // without an unlock: its mount namespace is another
		err := kfdemu.Enter(filepath.Join("/run/kfdemu", "tree"))
		if err == nil {
			// The kubelet and the CSI driver mount for pods.
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
		}
		entered <- err
		for start := range m.starts {
			start()
		}
	}()
	if err := <-entered; err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return m, nil
}

// start starts a program in the mount namespace of the node: not on the machine, but where the kernel's
// files about it are.
func (m *machine) start(cmd *exec.Cmd) error {
	err := make(chan error)
	m.starts <- func() { err <- cmd.Start() }
	return <-err
}

// killProgram kills the processes of the node with this command name.
func killProgram(name string) error {
	files, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return err
	}
	killed := false
	for _, file := range files {
		comm, err := os.ReadFile(file)
		if err != nil || strings.TrimSpace(string(comm)) != name {
			continue // or it has ended
		}
		// The pid namespace is the host's, which may have others of this name.
		group, err := os.ReadFile(filepath.Join(filepath.Dir(file), "cgroup"))
		if err != nil || !strings.Contains(string(group), "/"+os.Getenv(groupEnv)+"/") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil {
			err = unix.Kill(pid, unix.SIGKILL)
		}
		if err != nil {
			return err
		}
		killed = true
	}
	if !killed {
		return fmt.Errorf("no process of the node is %s", name)
	}
	return nil
}

package safety

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"strings"
	"syscall"
	"testing/fstest"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// fakeHost is a host made of files: what the kernel of one would show. No
// hardware was looked at to make it.
type fakeHost struct {
	files  fstest.MapFS
	denied map[string]bool // paths that may not be opened
	cfg    Config
	driver Driver
	noOpen error // why the driver cannot be opened
}

// Open, ReadLink and Lstat are those of the files, except for denied paths.
func (h *fakeHost) Open(name string) (fs.File, error) {
	if h.denied[name] {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.EACCES}
	}
	return h.files.Open(name)
}

func (h *fakeHost) ReadLink(name string) (string, error)   { return h.files.ReadLink(name) }
func (h *fakeHost) Lstat(name string) (fs.FileInfo, error) { return h.files.Lstat(name) }

func (h *fakeHost) write(name, text string) { h.files[name] = &fstest.MapFile{Data: []byte(text)} }

func (h *fakeHost) param(name, value string) {
	h.write("sys/module/amdgpu/parameters/"+name, value+"\n")
}

// userQueue adds a client of DRM with a user queue.
func (h *fakeHost) userQueue(client, pid int, address string) {
	dir := fmt.Sprintf("sys/kernel/debug/dri/client-%d/", client)
	h.write(dir+"proc_info", fmt.Sprintf("pid: %d\ncomm: x\n", pid))
	h.write(dir+"queue-1/mqd_info", "queue_type: 1\n")
	h.files[dir+"device"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../" + address)}
}

// device puts a device on the PCI bus.
func (h *fakeHost) device(address, vendor, class string) {
	dir := "sys/bus/pci/devices/" + address + "/"
	h.write(dir+"vendor", vendor+"\n")
	h.write(dir+"class", class+"\n")
}

// remove removes the files at or below path.
func (h *fakeHost) remove(path string) {
	maps.DeleteFunc(h.files, func(name string, _ *fstest.MapFile) bool {
		return name == path || strings.HasPrefix(name, path+"/")
	})
}

const topology = "sys/class/kfd/kfd/topology/"

// node writes a topology node; id 0 makes it a CPU.
func (h *fakeHost) node(n int, id gpreempt.GPUID, name string, gfx, bus, slots, xccs, capability uint32) {
	dir := fmt.Sprintf("%snodes/%d/", topology, n)
	h.write(dir+"gpu_id", fmt.Sprintf("%d\n", id))
	h.write(dir+"name", name+"\n")
	h.write(dir+"properties", fmt.Sprintf("simd_count 1216\nsimd_per_cu 4\ngfx_target_version %d\nlocation_id %d\ndomain 0\ndrm_render_minor %d\n"+
		"num_cp_queues %d\ncapability %d\nnum_xcc %d\n", gfx, bus<<8, 126+n, slots, capability, xccs))
}

// capable is the capability property of a GPU that can be debugged.
const capable = 0x28078000 | 0x8000 | 0x20000000

// process writes the files of a process, with a compute queue on each of gpus.
func (h *fakeHost) process(pid int, comm, cmdline string, tracer int, gpus ...gpreempt.GPUID) {
	dir := fmt.Sprintf("proc/%d/", pid)
	h.write(dir+"stat", fmt.Sprintf("%d (%s) S 1 1 1 0 -1 4194304 10 0 0 0 5 6 0 0 20 0 1 0 %d 1000 20 0\n", pid, comm, pid*10))
	h.write(dir+"status", processStatus(comm, pid, tracer, 1000, 0))
	h.write(dir+"comm", comm+"\n")
	h.write(dir+"cmdline", strings.ReplaceAll(cmdline, " ", "\x00")+"\x00")
	h.write(dir+"cgroup", "0::/batch\n")
	kfd := fmt.Sprintf("sys/class/kfd/kfd/proc/%d/", pid)
	h.files[kfd+"queues"] = &fstest.MapFile{Mode: fs.ModeDir | 0o755}
	for id, gpu := range gpus {
		queue := fmt.Sprintf("%squeues/%d/", kfd, id)
		h.write(queue+"gpuid", fmt.Sprint(gpu))
		h.write(queue+"size", "1048576")
		h.write(queue+"type", "0")
	}
}

// part writes the files of a process of gpreempt that has the driver open.
func (h *fakeHost) part(pid int, comm, cmdline string) {
	h.process(pid, comm, cmdline, 0)
	h.write(fmt.Sprintf("proc/%d/status", pid), processStatus(comm, pid, 0, 0, allCaps))
	h.denied[fmt.Sprintf("proc/%d/environ", pid)] = true // which is no fact that matters
}

func processStatus(comm string, pid, tracer, uid int, caps uint64) string {
	return fmt.Sprintf("Name:\t%s\nTgid:\t%d\nPid:\t%[2]d\nTracerPid:\t%d\nUid:\t%d\t%[4]d\t%[4]d\t%[4]d\nGid:\t%[4]d\t%[4]d\t%[4]d\t%[4]d\nCapEff:\t%016x\n", comm, pid, tracer, uid, caps)
}

// allCaps is the effective set of root.
const allCaps = 1<<41 - 1

// The GPUs of the fake MI300X host.
const (
	gpuA gpreempt.GPUID = 34535
	gpuB gpreempt.GPUID = 41235
)

// mi300x returns a healthy host with two MI300X under HWS, examined by its daemon.
func mi300x() *fakeHost {
	h := &fakeHost{
		files: fstest.MapFS{}, denied: map[string]bool{},
		driver: Driver{Version: "1.17", Minor: 17, Profile: "6.12"},
	}
	h.cfg = Config{
		Root: h, ByDaemon: true, Debugfs: true, Version: "v0.3.0",
		OpenDriver: func() (Driver, error) {
			if h.noOpen != nil {
				return Driver{}, h.noOpen
			}
			return h.driver, nil
		},
		Hazards: map[gpreempt.GPUID]Result{gpuA: {Action: Allow}, gpuB: {Action: Allow}},
	}
	h.write("proc/sys/kernel/osrelease", "6.12.107+deb13-amd64\n")
	h.write("proc/sys/kernel/yama/ptrace_scope", "1\n")
	h.write("proc/self/status", processStatus("gpreemptd", 100, 0, 0, allCaps))
	h.write("proc/self/uid_map", "         0          0 4294967295\n")
	h.files["proc/self/ns/pid"] = &fstest.MapFile{Data: []byte("pid:[4026531836]"), Mode: fs.ModeSymlink}
	h.write("sys/kernel/debug/kfd/mqds", "")
	h.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
	h.write("dev/kmsg", "")
	h.param("sched_policy", "0")
	h.param("cwsr_enable", "1")
	h.param("num_kcq", "-1")
	h.device("0000:00:1f.0", "0x8086", "0x060100")
	h.device("0000:03:00.0", "0x1a03", "0x030000")
	h.device("0000:c1:00.0", "0x1002", "0x120000")
	h.device("0000:c6:00.0", "0x1002", "0x120000")
	h.write(topology+"generation_id", "2\n")
	h.node(0, 0, "", 0, 0, 0, 0, 0)
	h.node(2, gpuA, "mi300x", 90402, 0xc1, 24, 8, capable)
	h.node(3, gpuB, "mi300x", 90402, 0xc6, 24, 8, capable)
	h.part(100, "gpreemptd", "/usr/sbin/gpreemptd serve")
	h.process(4242, "python3", "python3 train.py", 101, gpuA, gpuB, gpuB)
	h.process(5001, "tritonserver", "tritonserver", 0, gpuA, gpuA)
	h.write("sys/class/kfd/kfd/proc/5001/queues/1/type", "1") // SDMA: takes no compute slot
	h.part(101, "gpreempt-helper", "gpreemptd session-helper")
	return h
}

// diagnosis makes root examine the host while the daemon is not running.
func (h *fakeHost) diagnosis() {
	h.cfg.ByDaemon = false
	h.write("proc/self/status", processStatus("gpreemptd", 200, 0, 0, allCaps))
	h.remove("proc/100")
	h.remove("sys/class/kfd/kfd/proc/100")
	h.process(200, "gpreemptd", "gpreemptd diagnose", 0)
	h.process(4242, "python3", "python3 train.py", 0, gpuA, gpuB, gpuB)
}

// noDriver removes the driver.
func (h *fakeHost) noDriver() {
	h.remove("sys/class/kfd")
	h.remove("sys/module/amdgpu")
	h.remove("sys/kernel/debug/kfd")
	h.noOpen = errors.New("opened the driver on a host without one")
}

// noGPUs removes the GPU nodes, as with a driver without hardware.
func (h *fakeHost) noGPUs() {
	h.remove(topology + "nodes/2")
	h.remove(topology + "nodes/3")
	h.remove("sys/class/kfd/kfd/proc/4242")
	h.remove("sys/class/kfd/kfd/proc/5001")
}

// noPCI removes the GPUs from the bus.
func (h *fakeHost) noPCI() {
	h.remove("sys/bus/pci/devices/0000:c1:00.0")
	h.remove("sys/bus/pci/devices/0000:c6:00.0")
}

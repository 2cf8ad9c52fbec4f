package discovery

import (
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const debugProcsDir = "sys/kernel/debug/kfd/proc"

// drmMajor is the device number of DRM (include/drm/drm_file.h), amdgpuDriver the name of
// the driver in fdinfo.
const (
	drmMajor     = 226
	amdgpuDriver = "amdgpu"
)

// maxDescriptors bounds how many descriptors of a process are looked at.
const maxDescriptors = 16 << 10

// ProcessGPUs returns the GPUs that the driver lists for a process, in the driver's order:
// those that the device cgroup of the process allowed when it opened the driver
// (kfd_init_apertures), used or not. The list does not change while the process lives and
// executes no other program. The error is fs.ErrNotExist when the driver does not know the
// process.
func ProcessGPUs(root fs.FS, pid int32) ([]gpreempt.GPU, error) {
	dir := procsDir + "/" + strconv.Itoa(int(pid))
	entries, err := fs.ReadDir(root, dir)
	if err != nil {
		return nil, fmt.Errorf("list the GPUs of process %d: %w", pid, err)
	}
	gpus, err := NewFS(root).GPUs()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(gpus, func(g gpreempt.GPU) bool {
		return !slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() == vramFile(g.ID) })
	}), nil
}

// GPUsAfter returns those of gpus that come after the first with a queue and have none. A
// queue needs a VM.
func GPUsAfter(gpus []gpreempt.GPU, withQueues []gpreempt.GPUID) []gpreempt.GPU {
	hasQueue := func(g gpreempt.GPU) bool { return slices.Contains(withQueues, g.ID) }
	first := slices.IndexFunc(gpus, hasQueue)
	if first < 0 {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(gpus[first:]), hasQueue)
}

func vramFile(gpu gpreempt.GPUID) string { return "vram_" + gpu.String() }

// WithoutVM returns those of gpus on which a process is not known to have acquired a VM
// (kfd_process_device_init_vm). A process that has one keeps it. Nothing in the files of
// the kernel is made to show this; in the order of their cost, this does:
//
//   - pasid_GPU in debugfs, which Linux 7.2 has: it is 0 without a VM, and decides alone.
//   - vram_GPU in sysfs: memory of the GPU needs a VM. 0 shows nothing.
//   - A render node of the GPU that the process has open, with the process's own PASID in
//     its fdinfo: acquiring the VM gives it that. Where the process has no PASID of its own
//     (Linux 7.2 shows 0 in sysfs) and debugfs cannot be read, the open node alone counts:
//     ROCm's runtime acquires the VM of each node that it opens, before it creates a queue, and keeps the node open (hsakmt_fmm_init_process_apertures).
//
// A process that has closed its render nodes may have VMs that this does not find.
func WithoutVM(root fs.FS, pid int32, gpus []gpreempt.GPU) []gpreempt.GPUID {
	process := strconv.Itoa(int(pid))
	var without []gpreempt.GPUID
	minors := map[uint32]gpreempt.GPUID{}
	for _, g := range gpus {
		pasid, err := readNumber(root, debugProcsDir+"/"+process+"/pasid_"+g.ID.String())
		if err == nil {
			if pasid == 0 {
				without = append(without, g.ID)
			}
			continue
		}
		if vram, err := readNumber(root, procsDir+"/"+process+"/"+vramFile(g.ID)); err == nil && vram > 0 {
			continue
		}
		without = append(without, g.ID)
		minors[uint32(g.RenderMinor)] = g.ID
	}
	if len(minors) == 0 {
		return without
	}
	own, err := readPASID(root, pid)
	if err != nil {
		return without
	}
	nodes := openRenderNodes(root, process, own)
	return slices.DeleteFunc(without, func(id gpreempt.GPUID) bool {
		return slices.ContainsFunc(nodes, func(minor uint32) bool { return minors[minor] == id })
	})
}

// openRenderNodes returns the minor device numbers of the amdgpu nodes that a process has
// open, with the PASID in their fdinfo if it is not 0.
func openRenderNodes(root fs.FS, process string, pasid uint64) (minors []uint32) {
	descriptors, err := fs.ReadDir(root, "proc/"+process+"/fdinfo")
	if err != nil {
		return nil
	}
	for _, d := range descriptors[:min(len(descriptors), maxDescriptors)] {
		text, err := fs.ReadFile(root, "proc/"+process+"/fdinfo/"+d.Name())
		if err != nil || !isVMOf(string(text), pasid) {
			continue
		}
		// The file is a device: the stat of any other one could wait for a program (FUSE).
		info, err := fs.Stat(root, "proc/"+process+"/fd/"+d.Name())
		if err != nil {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && major(st.Rdev) == drmMajor {
			minors = append(minors, minor(st.Rdev))
		}
	}
	return minors
}

// isVMOf reports whether an fdinfo is that of an amdgpu node with a PASID, or with any if
// pasid is 0 (amdgpu_show_fdinfo).
func isVMOf(fdinfo string, pasid uint64) bool {
	isGPU, found := false, pasid == 0
	for line := range strings.Lines(fdinfo) {
		switch key, value, _ := strings.Cut(line, ":"); key {
		case "drm-driver":
			isGPU = strings.TrimSpace(value) == amdgpuDriver
		case "pasid":
			found = found || strings.TrimSpace(value) == strconv.FormatUint(pasid, 10)
		}
	}
	return isGPU && found
}

// PASID returns the PASID of a process, by which drivers before 7.x name it in the kernel log;
// 0 if it has none or is not known. root is that of the host.
func PASID(root fs.FS, pid int32) uint32 {
	if n, err := readPASID(root, pid); err == nil {
		return uint32(n)
	}
	return 0
}

// readPASID reads the PASID of a process (kfd_procfs_show).
func readPASID(root fs.FS, pid int32) (uint64, error) {
	return readNumber(root, procsDir+"/"+strconv.Itoa(int(pid))+"/pasid")
}

func readNumber(root fs.FS, path string) (uint64, error) {
	text, err := fs.ReadFile(root, path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
}

// major and minor split a device number (new_decode_dev, in 64 bits).
func major(dev uint64) uint32 { return uint32(dev>>8&0xfff | dev>>32&^0xfff) }
func minor(dev uint64) uint32 { return uint32(dev&0xff | dev>>12&^0xff) }

package discovery

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const nodesDir = "sys/class/kfd/kfd/topology/nodes"

// EmulatedFile exists only with an emulated driver, and contains its name. kfdemu writes
// it.
const EmulatedFile = "sys/class/kfd/kfd/emulated"

// Backend returns what is behind /dev/kfd on the host with the root directory root: "kfd",
// or "emulated ..." when no hardware is involved.
func Backend(root fs.FS) string {
	text, err := fs.ReadFile(root, EmulatedFile)
	if err != nil {
		return "kfd"
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return "emulated " + line
}

// mesGFX is the first gfx_target_version whose firmware schedules queue by queue. No file
// contains the scheduler in use.
const mesGFX = 110000

// mecQueues is the number of queues of the compute micro-engine that KFD uses: 4 pipes of
// 8 queues.
const mecQueues = 32

// GPUs reads the topology and returns its GPU nodes, ascending by node number, without CPU
// nodes. A node that cannot be read costs that node alone: it is as it was when it was read
// last, or else omitted, and Omitted says why.
func (f *FS) GPUs() ([]gpreempt.GPU, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.addGPUs(f.gpus())
}

// Omitted returns the nodes that the last GPUs could not read, each with the reason, which
// names file and line, and the remedy.
func (f *FS) Omitted() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.omitted)
}

// Generation returns a text that changes after the driver has added or removed a GPU, cut to
// the size of other files.
func (f *FS) Generation() (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b, err := f.read("sys/class/kfd/kfd/topology/generation_id")
	return string(b), err
}

// gpus is GPUs, under the lock.
func (f *FS) gpus() ([]gpreempt.GPU, error) {
	entries, err := fs.ReadDir(f.root, nodesDir)
	if err != nil {
		return nil, fmt.Errorf("read the KFD topology: %w: check that the amdgpu driver is loaded and has a GPU", err)
	}
	var gpus []gpreempt.GPU
	var omitted []string
	var unread []int // nodes
	for _, entry := range entries {
		number, err := strconv.ParseUint(entry.Name(), 10, 31)
		if err != nil {
			continue
		}
		gpu, err := f.gpu(int(number))
		if first := slices.IndexFunc(gpus, func(g gpreempt.GPU) bool { return g.ID == gpu.ID }); err == nil && gpu.ID != 0 && first >= 0 {
			err = fmt.Errorf("gpu_id %d is that of node %d too", gpu.ID, gpus[first].Node)
		}
		switch {
		case err == nil && gpu.ID != 0:
			gpus = append(gpus, gpu)
		case err == nil, vanished(err):
		case errors.Is(err, fs.ErrPermission):
			omitted = append(omitted, fmt.Sprintf("node %d: %v: allow the daemon its GPU in the devices cgroup", number, err))
		default:
			unread = append(unread, int(number))
			omitted = append(omitted, fmt.Sprintf("node %d: %v: see what the driver says of its GPU (dmesg | grep -i amdgpu), and compare with rocminfo", number, err))
		}
	}
	for _, gpu := range f.gpusRead {
		if slices.Contains(unread, gpu.Node) && !slices.ContainsFunc(gpus, func(g gpreempt.GPU) bool { return g.ID == gpu.ID }) {
			gpus = append(gpus, gpu)
		}
	}
	slices.SortFunc(gpus, func(a, b gpreempt.GPU) int { return a.Node - b.Node })
	f.omitted, f.gpusRead = omitted, gpus
	return slices.Clone(gpus), nil
}

// gpu reads one node; the ID is 0 for a CPU.
func (f *FS) gpu(node int) (gpreempt.GPU, error) {
	dir := nodesDir + "/" + strconv.Itoa(node)
	id, err := f.number(dir+"/gpu_id", 32)
	if err != nil || id == 0 {
		return gpreempt.GPU{}, err
	}
	b, err := f.read(dir + "/name")
	if err != nil {
		return gpreempt.GPU{}, err
	}
	name := strings.TrimSpace(text(b))
	path := dir + "/properties"
	if b, err = f.read(path); err != nil {
		return gpreempt.GPU{}, err
	}
	p, err := ParseNodeProperties(bytes.NewReader(b))
	if err != nil {
		return gpreempt.GPU{}, inFile(path, err)
	}
	if p == (NodeProperties{}) {
		return gpreempt.GPU{}, fmt.Errorf("%s has no property of a GPU", path)
	}
	gpu := gpuOf(node, gpreempt.GPUID(id), name, p)
	if product := f.product(gpu.RenderMinor); product != "" {
		gpu.Name = product
	}
	return gpu, nil
}

// product returns the name of the board that has a render node, which boards with a memory for it
// have (amdgpu_fru_product_name_show); "" for others.
func (f *FS) product(minor int) string {
	b, err := f.read(fmt.Sprintf("sys/class/drm/renderD%d/device/product_name", minor))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(text(b))
}

// gpuOf interprets the properties of a GPU node.
func gpuOf(node int, id gpreempt.GPUID, name string, p NodeProperties) gpreempt.GPU {
	if name == "" || name == "ip discovery" { // the driver has no name for newer chips
		name = gpreempt.GFXName(uint32(p.GFX))
	}
	bus, device, function := p.Location>>8&0xff, p.Location>>3&0x1f, p.Location&0x7
	return gpreempt.GPU{
		ID:          id,
		Node:        node,
		Name:        name,
		GFX:         uint32(p.GFX),
		BDF:         fmt.Sprintf("%04x:%02x:%02x.%x", p.Domain, bus, device, function),
		RenderMinor: int(p.RenderMinor),
		XCCs:        int(max(p.XCCs, 1)),
		CUs:         int(p.SIMDs / max(p.SIMDsPerCU, 1)),
		QueueSlots:  queueSlots(p),
		MES:         p.GFX >= mesGFX,

		DebugFirmware: p.DebugFirmware(),
	}
}

// queueSlots returns how many user compute queues run at once. A queue takes the same slot
// on each XCC, so this is the number of slots of one XCC. num_cp_queues is that number in
// the mainline driver (24 on MI300X with its 8 XCCs), and the sum over the XCCs in AMD's
// own (120 on MI308X with 4). A number above the capacity of one XCC must be the sum.
func queueSlots(p NodeProperties) int {
	if p.CPQueues > mecQueues && p.XCCs > 1 {
		return int(p.CPQueues / p.XCCs)
	}
	return int(p.CPQueues)
}
